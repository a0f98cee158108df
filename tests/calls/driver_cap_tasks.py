"""Tasks that ask CUDA itself for memory, as code does that knows nothing of leases."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

OUT_OF_MEMORY = 2


def take(*sizes: int) -> list[int]:
    """Take memory of the GPU piece by piece; returns CUDA's answers."""
    cuda = ctypes.CDLL(None)
    return [cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size)) for size in sizes]


def fail_beyond(size: int) -> None:
    """Ask for so much, and raise the error that CuPy or Numba raise where there is none."""
    if take(size) == [OUT_OF_MEMORY]:
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")


def group() -> str:
    """Return this process's control group."""
    return Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()


def take_and_wait(size: int, seconds: float) -> str:
    """Take memory, and keep it until it was looked at."""
    take(size)
    time.sleep(seconds)
    return group()


def kill_itself() -> None:
    """End as by the kernel."""
    take(1 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
