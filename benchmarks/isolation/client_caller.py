"""One client whose fits the driver asks for, in one of several ways."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.isolation.ways import with_manager, with_pipe
from benchmarks.shared.member import serve, wait_until_gone

_SHAPES = ((16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (10, 512), (10,))  # of client_task's model
PRELOAD = "ours-forkserver, preload"


def in_process() -> Callable[..., Any]:
    from benchmarks.isolation import client_task

    return client_task.train


def article() -> Callable[..., Any]:
    from benchmarks.isolation import client_task

    return lambda weights, config: with_manager(client_task.into_dict, weights, config)["fit"]


def spawn() -> Callable[..., Any]:
    from benchmarks.isolation import client_task

    return lambda weights, config: with_pipe(client_task.into_pipe, weights, config)


def ours(start_method: str, **options: Any) -> Callable[..., Any]:
    from flower_gpu import GPUClient

    return GPUClient("benchmarks.isolation.client_task:train", start_method=start_method, **options).fit


WAYS: dict[str, Callable[[], Callable[..., Any]]] = {
    "in-process": in_process,
    "article": article,
    "spawn": spawn,
    "ours-spawn": partial(ours, "spawn"),
    "ours-forkserver": partial(ours, "forkserver"),
    PRELOAD: partial(ours, "forkserver", preload="benchmarks.isolation.client_task:load_data"),
}


def prepare(way: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    fit = WAYS[way]()
    random = np.random.default_rng(0)
    weights = [random.normal(0, 0.1, shape).astype(np.float32) for shape in _SHAPES]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        trained, examples, metrics = fit(weights, {"seed": request["seed"]})
        wait_until_gone(metrics["pid"])
        seconds = time.perf_counter() - began
        changed = any((new != old).any() for new, old in zip(trained, weights, strict=True))
        return {"seconds": seconds, "loss": metrics["loss"], "examples": examples, "changed": bool(changed)}

    return answer


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1]))
