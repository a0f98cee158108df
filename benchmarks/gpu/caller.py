"""One caller of GPU work; it never starts CUDA itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.isolation.ways import with_manager, with_pipe
from benchmarks.shared.member import MB, serve, wait_until_gone

_MEMORY_BACK_S = 30.0
_SAME_MB = 16.0  # the driver's own bookkeeping


def article() -> Callable[..., Any]:
    from benchmarks.gpu import task as gpu_task

    return lambda *args: with_manager(gpu_task.into_dict, *args)["train"]


def spawn() -> Callable[..., Any]:
    from benchmarks.gpu import task as gpu_task

    return lambda *args: with_pipe(gpu_task.into_pipe, *args)


def ours(start_method: str) -> Callable[..., Any]:
    from flower_gpu import run_in_worker

    return partial(run_in_worker, "benchmarks.gpu.task:train", start_method=start_method)


WAYS: dict[str, Callable[[], Callable[..., Any]]] = {
    "article": article,
    "spawn": spawn,
    "ours-spawn": partial(ours, "spawn"),
    "ours-forkserver": partial(ours, "forkserver"),
}


def prepare(way: str, model: str, batch: int, side: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    train = WAYS[way]()
    weights = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal weights
        used_mb = _used_mb()
        began = time.monotonic()
        result = train(weights, model, batch, side)
        wait_until_gone(result["pid"])
        while _used_mb() > used_mb + _SAME_MB:
            if time.monotonic() - began > _MEMORY_BACK_S:
                raise RuntimeError(f"the GPU's memory was not back after {_MEMORY_BACK_S:g} s")
            time.sleep(0.001)
        ended = time.monotonic()
        trained = result["weights"]
        changed = weights is None or any((a != b).any() for a, b in zip(trained, weights, strict=True))
        weights = trained
        told = {key: result[key] for key in ("loss", "later_count")}
        return {"began": began, **result["marks"], "ended": ended, **told, "changed": bool(changed)}

    return answer


def _used_mb() -> float:
    """Return what the machine's GPUs hold, as the driver tells."""
    import pynvml

    pynvml.nvmlInit()  # counts, so that only the first one costs something
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return float(sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / MB)


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
