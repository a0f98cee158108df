"""A client whose calls load cuDNN's libraries, like training on a GPU, and measure the cost."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from benchmarks.shared.member import MB, Answer, serve, wait_until_gone
from flower_gpu.frameworks.pytorch import PyTorch


def task(loads: bool) -> dict[str, Any]:
    files = PyTorch().loaded_on_gpu() if loads else []
    before = _memory_mb()
    began = time.perf_counter()
    for file in files:
        ctypes.CDLL(file)
    load_s = time.perf_counter() - began
    private_mb, pss_mb = (after - earlier for after, earlier in zip(_memory_mb(), before, strict=True))
    figures = {"libraries": len(files), "load_s": load_s, "private_mb": private_mb, "pss_mb": pss_mb}
    return {"pid": os.getpid(), **figures}


def _memory_mb() -> tuple[float, float]:
    """Return the memory that only this process has, and its PSS."""
    with open("/proc/self/smaps_rollup") as lines:
        fields = dict(line.split()[:2] for line in lines)
    return int(fields["Private_Dirty:"]) * 1024 / MB, int(fields["Pss:"]) * 1024 / MB


def _prepare() -> Answer:
    from flower_gpu.workers import caller
    from flower_gpu.workers.call import Call

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        env = {"CUDA_VISIBLE_DEVICES": "0" if request["has_gpu"] else ""}
        call = Call("benchmarks.isolation.cudnn_client:task", (request["loads"],), env=env)
        began = time.perf_counter()
        figures: dict[str, Any] = caller.run(call, "forkserver")
        wait_until_gone(figures.pop("pid"))
        return {**figures, "call_s": time.perf_counter() - began}

    answer({"has_gpu": False, "loads": False})  # Starts the fork server.
    return answer


if __name__ == "__main__":
    serve(_prepare)
