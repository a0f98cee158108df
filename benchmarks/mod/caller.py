"""A client process: calls its ClientApp when the driver asks, with and without the mod in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from flwr.supercore.task_identity import TaskIdentity

from benchmarks.mod import app as mod_app
from benchmarks.shared.member import serve


def prepare(start_method: str, size_mb: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 11, 12, 13
    app = mod_app.client_app(start_method)
    model = mod_app.content(size_mb)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        seconds = {}
        ways = list(mod_app.ACTIONS)
        for way in reversed(ways) if request["reversed"] else ways:
            message, context = mod_app.new_message(model, mod_app.ACTIONS[way]), mod_app.new_context()
            began = time.perf_counter()
            reply = app(message, context)  # the mod returns when the worker is gone
            seconds[way] = time.perf_counter() - began
            mod_app.check(reply, model)
        return seconds

    return answer


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1], float(sys.argv[2])))
