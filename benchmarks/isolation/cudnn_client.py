"""A client whose calls load cuDNN's libraries as a training on a GPU does, and tell what that took."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.shared.member import MB, serve, wait_until_gone
from flower_gpu.frameworks.pytorch import PyTorch

_KB = 1024


def task(loads: bool) -> dict[str, Any]:
    files = PyTorch().loaded_on_gpu() if loads else []
    before = _memory_mb()
    began = time.perf_counter()
    for file in files:
        ctypes.CDLL(file)
    load_s = time.perf_counter() - began
    own_mb, pss_mb = (after - earlier for after, earlier in zip(_memory_mb(), before, strict=True))
    return {
        "pid": os.getpid(),
        "libraries": len(files),
        "load_s": load_s,
        "own_mb": own_mb,
        "pss_mb": pss_mb,
    }


def _memory_mb() -> tuple[float, float]:
    """Return what this process has written and shares with nobody, and its PSS."""
    with open("/proc/self/smaps_rollup") as lines:
        fields = dict(line.split()[:2] for line in lines)
    return int(fields["Private_Dirty:"]) * _KB / MB, int(fields["Pss:"]) * _KB / MB


def _prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    from flower_gpu.workers import caller
    from flower_gpu.workers.call import Call

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        env = {"CUDA_VISIBLE_DEVICES": "0" if request["names_gpu"] else ""}
        call = Call("benchmarks.isolation.cudnn_client:task", (request["loads"],), env=env)
        began = time.perf_counter()
        told: dict[str, Any] = caller.run(call, "forkserver")
        wait_until_gone(told["pid"])
        return {**told, "seconds": time.perf_counter() - began}

    answer({"names_gpu": False, "loads": False})  # starts the fork server
    return answer


if __name__ == "__main__":
    serve(_prepare)
