"""A client that runs one fit per request, in one of several ways."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.isolation.ways import with_manager, with_pipe
from benchmarks.shared.member import Answer, serve, wait_until_gone

_SHAPES = ((16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (10, 512), (10,))  # The model of client_task.
_TASK = "benchmarks.isolation.client_task"

Fit = Callable[..., Any]


def in_process() -> Fit:
    from benchmarks.isolation import client_task

    return client_task.train


def article() -> Fit:
    from benchmarks.isolation import client_task

    return partial(with_manager, client_task.train)


def spawn() -> Fit:
    from benchmarks.isolation import client_task

    return partial(with_pipe, client_task.train)


def ours(start_method: str, **options: Any) -> Fit:
    from flower_gpu import GPUClient

    return GPUClient(f"{_TASK}:train", start_method=start_method, **options).fit


WAYS: dict[str, Callable[[], Fit]] = {
    "in-process": in_process,
    "article": article,
    "spawn": spawn,
    "ours-spawn": partial(ours, "spawn"),
    "ours-forkserver": partial(ours, "forkserver"),
    "ours-forkserver, preload": partial(ours, "forkserver", preload=f"{_TASK}:load_data"),
}


def prepare(way: str) -> Answer:
    fit = WAYS[way]()
    random = np.random.default_rng(0)
    weights = [random.normal(0, 0.1, shape).astype(np.float32) for shape in _SHAPES]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        trained, _, metrics = fit(weights, {"seed": request["seed"]})
        wait_until_gone(metrics["pid"])
        seconds = time.perf_counter() - began
        changed = any((new != old).any() for new, old in zip(trained, weights, strict=True))
        return {"seconds": seconds, "loss": metrics["loss"], "changed": bool(changed)}

    return answer


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1]))
