"""Helpers of the scripts in these tests. A script runs clients in a new process, on a host with stub GPUs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import mod_functions
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from mod_messages import context, message, reply_values

from flower_gpu import gpu_mod

logging.getLogger("flwr").setLevel(logging.CRITICAL)
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 11, 12, 13


def ask(
    node_config: Mapping[str, Any] | None = None,
    *,
    run_config: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    function: Any = mod_functions.leased,
    kind: str = "train",
    state: Any = None,
    **options: Any,
) -> Any:
    """Let a client handle a message. Returns the values of its reply, or the type and text of the error."""
    app = ClientApp(mods=[gpu_mod(**{"start_method": "fork", **options})])
    for register in (app.train(), app.evaluate()):
        register(function)
    try:
        return reply_values(app(message(kind, config), context(node_config, run_config, state)))
    except Exception as error:
        return [type(error).__name__, str(error)]
