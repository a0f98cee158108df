"""Tasks that allocate memory directly from CUDA, as code without knowledge of leases does."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

OUT_OF_MEMORY = 2


def allocate(*sizes: int) -> list[int]:
    """Allocate pieces of GPU memory, and return CUDA's status codes."""
    cuda = ctypes.CDLL(None)
    return [cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size)) for size in sizes]


def fail_beyond(size: int) -> None:
    """Allocate this many bytes. If CUDA has too little, raise the same error as CuPy and Numba."""
    if allocate(size) == [OUT_OF_MEMORY]:
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")


def group() -> str:
    """Return this process's control group."""
    return Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()


def allocate_and_wait(size: int, seconds: float) -> str:
    """Allocate memory and keep it for some seconds. Return the control group."""
    allocate(size)
    time.sleep(seconds)
    return group()


def kill_itself() -> None:
    """Allocate memory, and end as if the kernel had killed this process."""
    allocate(1 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
