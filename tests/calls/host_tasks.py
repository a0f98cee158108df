"""Tasks that use the host directly, as code without knowledge of leases does: CUDA, and an MPS daemon."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
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


def use_mps_folder(folder: str) -> dict[str, str]:
    """Try what clients of an MPS daemon need in its pipe folder, and what is forbidden there.

    Return "done" or the name of its error for each action.
    """
    path = Path(folder)
    actions: dict[str, Callable[[], object]] = {
        "connect": lambda: _connect(path / "control"),
        "list": lambda: list(path.iterdir()),
        "read and write": lambda: os.close(os.open(path / "log", os.O_RDWR)),
        "make": (path / "new").touch,
        "remove": (path / "log").unlink,
        "replace": lambda: (path / "log").rename(path / "control"),
        "empty": lambda: os.truncate(path / "log", 0),
    }
    return {name: _outcome(action) for name, action in actions.items()}


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def _outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"
