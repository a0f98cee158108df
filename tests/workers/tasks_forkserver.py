"""Tasks that report what their worker has from its fork server and what from its caller."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import random
import resource
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

LOADED_BEFORE = frozenset(sys.modules)


def server() -> int:
    """Return the pid of the process that forked this one."""
    return os.getppid()


def wait(started: str, until: str) -> int:
    """Create a file to report that the task runs, then wait until another file exists."""
    parent = os.getppid()
    Path(started).touch()
    while not Path(until).exists():
        time.sleep(0.01)
    return parent


def abort_after(started: str, until: str) -> None:
    wait(started, until)
    print("the last words", flush=True)
    os.abort()


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getppid()


def attribute(module: str, name: str) -> Any:
    """Return an attribute of a module, and True if the module was loaded before this module."""
    return [getattr(import_module(module), name), module in LOADED_BEFORE]


def loaded_before(*modules: str) -> list[bool]:
    return [name in LOADED_BEFORE for name in modules]


def stack() -> list[str]:
    return [frame.name for frame in traceback.extract_stack()]


def root_logger(loaded: str) -> list[Any]:
    assert loaded in sys.modules
    root = logging.getLogger()
    return [[str(handler) for handler in root.handlers], logging.getLevelName(root.level)]


def uses(*modules: str) -> list[bool]:
    """Import modules. For each of them, return True if it was loaded before this module."""
    for name in modules:
        import_module(name)
    return loaded_before(*modules)


def uses_in_fork(*modules: str) -> list[list[bool]]:
    """Import one more module in each fork of this worker, and return the results of :func:`uses`."""
    from flower_gpu.workers import caller, methods
    from flower_gpu.workers.call import Call

    return [caller.run(Call(uses, modules[: count + 1]), methods.FORK) for count in range(len(modules))]


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def environment() -> list[list[str]]:
    """Return all variables, as Python and as the C library have them, in hexadecimal."""
    import ctypes

    block = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    raw, index = [], 0
    while (entry := block[index]) is not None:
        raw.append(entry.hex())
        index += 1
    python = [(name + b"=" + value).hex() for name, value in os.environb.items()]
    return [sorted(python), sorted(raw)]


def inherited() -> dict[str, Any]:
    """Return the properties that a child inherits from its parent."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = os.umask(0)
    return {
        **kernel_properties(),
        "path": sys.path,
        "folder": Path().stat().st_ino,
        "umask": umask,
        "cpus": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
    }


def kernel_properties() -> dict[str, Any]:
    """Return the privileges, scheduling and other kernel properties of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    status_names = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
    library = ctypes.CDLL(None)
    numbers = {"x86_64": (252, 239), "aarch64": (31, 236)}.get(platform.machine())
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 64)()
    if numbers:
        library.syscall(numbers[1], ctypes.byref(mode), nodes, ctypes.c_ulong(4096), None, 0)
    return {
        **{name: status[name].split() for name in status_names},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "class": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "io": library.syscall(numbers[0], 1, 0) if numbers else 0,
        "numa": [mode.value, list(nodes)],
        "personality": library.personality(ctypes.c_ulong(0xFFFFFFFF)),
        "timer slack": library.prctl(30, 0, 0, 0, 0),
        "huge pages": library.prctl(42, 0, 0, 0, 0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "core": Path("/proc/self/coredump_filter").read_text(),
    }


def random_numbers() -> list[float]:
    import numpy as np
    import torch

    numpy_numbers = float(np.random.rand()), float(np.random.default_rng().random())
    return [random.random(), *numpy_numbers, float(torch.rand(1))]


def hashed(text: str) -> int:
    return hash(text)


def parent_of(_: Any) -> int:
    return os.getppid()


def plus_one(weights: list[Any]) -> tuple[list[Any], int]:
    for array in weights:
        array += 1
    return weights, os.getppid()


def libraries_of_cudnn() -> list[str]:
    """Return the files of cuDNN that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/libcudnn" in line})


def allocates() -> int:
    """Use the GPU, and return the bytes that PyTorch has reserved on it."""
    import torch

    assert torch.ones(1024, device="cuda").is_cuda
    return torch.cuda.memory_reserved()
