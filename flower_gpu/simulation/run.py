"""One simulated run: a ServerApp in this process, virtual nodes in workers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import ServerApp
from flwr.serverapp.server_app import LoadServerAppError
from flwr.supercore.object_ref import load_app
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu.config import cores
from flower_gpu.flower.app_imports import libraries_of
from flower_gpu.isolation.forkserver import client
from flower_gpu.launch.app import FlowerApp
from flower_gpu.simulation.grid import LocalGrid
from flower_gpu.simulation.messages import AppReference, Handler
from flower_gpu.simulation.nodes import VirtualNodes


def simulate(
    app_dir: str | Path,
    num_supernodes: int,
    *,
    run_config: Mapping[str, Any] | None = None,
    max_workers: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Context:
    """Run a Flower app on virtual nodes of this machine.

    Parameters
    ----------
    app_dir : str or Path
        The app's folder, with its ``pyproject.toml``.
    num_supernodes : int
        How many nodes there are.
    run_config : mapping, optional
        Values in the place of the app's own.
    max_workers : int, optional
        How many messages are handled at a time, at most: by default one for each core. Leases may let fewer run.
    seed : int
        Of the nodes' ids.
    **options
        How each message's worker runs, and how much of a GPU it gets: see :class:`flower_gpu.CallOptions`.

    Returns
    -------
    Context
        The server's, as the app has left it.
    """
    app = FlowerApp.load(Path(app_dir))
    config = {**app.run_config, **(run_config or {})}
    run_id = secrets.randbits(63)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
    nodes = VirtualNodes(num_supernodes, seed, run_id, config)
    reference = AppReference(app.path, app.clientapp)
    if client.is_supported():
        client.learn([*_OURS, *libraries_of(app.path, app.clientapp.partition(":")[0])])
    handler = Handler(reference, nodes, options, app.name)
    server_app = load_app(app.serverapp, LoadServerAppError, app.path)
    assert isinstance(server_app, ServerApp)
    context = Context(run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(config))
    with closing(LocalGrid(Run.create_empty(run_id), nodes, handler, max_workers or cores())) as grid:
        server_app(grid=grid, context=context)
    return context


_OURS = ("flower_gpu.simulation.messages", "flwr.clientapp")
