"""A caller of part ``steps``. It never initialises CUDA itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.isolation.ways import with_manager, with_pipe
from benchmarks.shared.member import MB, Answer, serve, wait_until_gone

_TASK = "benchmarks.gpu.work:train_in_steps"
_FREE_AGAIN_S = 30.0
#: The driver's bookkeeping may take some memory meanwhile.
_TOLERANCE_MB = 16.0


def article() -> Callable[..., Any]:
    from benchmarks.gpu import work

    return partial(with_manager, work.train_in_steps)


def spawn() -> Callable[..., Any]:
    from benchmarks.gpu import work

    return partial(with_pipe, work.train_in_steps)


def ours(start_method: str) -> Callable[..., Any]:
    from flower_gpu import run_in_worker

    return partial(run_in_worker, _TASK, start_method=start_method)


WAYS: dict[str, Callable[[], Callable[..., Any]]] = {
    "article": article,
    "spawn": spawn,
    "ours-spawn": partial(ours, "spawn"),
    "ours-forkserver": partial(ours, "forkserver"),
}


def prepare(way: str, model: str, batch: int, side: int) -> Answer:
    train = WAYS[way]()
    weights = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal weights
        used_mb = _used_mb()
        began = time.monotonic()
        result = train(weights, model, batch, side)
        wait_until_gone(result["pid"])
        while _used_mb() > used_mb + _TOLERANCE_MB:
            if time.monotonic() - began > _FREE_AGAIN_S:
                raise RuntimeError(f"the GPU's memory was not free again after {_FREE_AGAIN_S:g} s")
            time.sleep(0.001)
        ended = time.monotonic()
        trained = result["weights"]
        changed = weights is None or any((a != b).any() for a, b in zip(trained, weights, strict=True))
        weights = trained
        return {
            "began": began,
            **result["marks"],
            "ended": ended,
            "loss": result["loss"],
            "changed": bool(changed),
        }

    return answer


def _used_mb() -> float:
    """Return the memory in use on all GPUs, by NVML."""
    import pynvml

    # NVML counts initialisations, so only the first one takes time.
    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return float(sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / MB)


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
