"""Tasks for reused workers: they read settings of their process, and change them."""

from __future__ import annotations

import ctypes
import decimal
import gc
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from flower_gpu.simulation import in_worker

Item = tuple[Callable[[], Any], Callable[[], Any]]


def _torch(path: str) -> tuple[Any, str]:
    """Return the owner and the attribute name of one of torch's settings."""
    import torch

    owner: Any = torch
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def _call(path: str, *arguments: Any) -> Callable[[], Any]:
    return lambda: getattr(*_torch(path))(*arguments)


def _flag(path: str, value: Any) -> Item:
    return lambda: getattr(*_torch(path)), lambda: setattr(*_torch(path), value)


def _dtype(name: str) -> Any:
    return getattr(*_torch(name))


def _umask() -> int:
    original = os.umask(0)
    os.umask(original)
    return original


def _replace_stdout() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _handler(number: int, handler: Any) -> Item:
    return lambda: signal.getsignal(number), lambda: signal.signal(number, handler)


def _trace(*_: object) -> None:
    return None


#: For each setting: a function that reads it, and a function that changes it.
OF_TORCH: dict[str, Item] = {
    "cudnn.enabled": _flag("backends.cudnn.enabled", False),
    "cudnn.benchmark": _flag("backends.cudnn.benchmark", True),
    "cudnn.deterministic": _flag("backends.cudnn.deterministic", True),
    "cudnn.allow_tf32": _flag("backends.cudnn.allow_tf32", False),
    "matmul.allow_tf32": _flag("backends.cuda.matmul.allow_tf32", True),
    "matmul.allow_fp16_reduced": _flag("backends.cuda.matmul.allow_fp16_reduced_precision_reduction", False),
    "matmul.allow_bf16_reduced": _flag("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", False),
    "float32 matmul precision": (
        _call("get_float32_matmul_precision"),
        _call("set_float32_matmul_precision", "medium"),
    ),
    "flash attention": (
        _call("backends.cuda.flash_sdp_enabled"),
        _call("backends.cuda.enable_flash_sdp", False),
    ),
    "deterministic algorithms": (
        _call("are_deterministic_algorithms_enabled"),
        _call("use_deterministic_algorithms", True),
    ),
    "default dtype": (
        _call("get_default_dtype"),
        lambda: _call("set_default_dtype", _dtype("float64"))(),
    ),
    "default device": (_call("get_default_device"), _call("set_default_device", "meta")),
    "threads": (_call("get_num_threads"), _call("set_num_threads", 3)),
    "gradients": (_call("is_grad_enabled"), _call("set_grad_enabled", False)),
    "anomalies": (_call("is_anomaly_enabled"), _call("autograd.set_detect_anomaly", True)),
    "autocast": (_call("is_autocast_enabled", "cpu"), _call("set_autocast_enabled", "cpu", True)),
    "small numbers": (lambda: sys.float_info.min / 2, _call("set_flush_denormal", True)),
    "sharing strategy": (
        _call("multiprocessing.get_sharing_strategy"),
        _call("multiprocessing.set_sharing_strategy", "file_system"),
    ),
}
#: Available since torch 2.9, in addition to the flags above.
OF_NEW_TORCH: dict[str, Item] = {
    f"{name}.fp32_precision": _flag(f"{name}.fp32_precision", value)
    for name, value in (
        ("backends", "tf32"),
        ("backends.cuda.matmul", "tf32"),
        ("backends.cudnn", "ieee"),
        ("backends.cudnn.conv", "ieee"),
        ("backends.mkldnn.matmul", "bf16"),
    )
}
OF_PYTHON: dict[str, Item] = {
    "variables": (
        lambda: sorted(os.environ.items()),
        lambda: (os.environ.update(OF_A_CLIENT="1"), os.environ.pop("PATH")),
    ),
    "folder": (os.getcwd, lambda: os.chdir("/")),
    "umask": (_umask, lambda: os.umask(0o77)),
    "numpy errors": (np.geterr, lambda: np.seterr(all="raise")),
    "collector": (gc.isenabled, gc.disable),
    "warnings": (lambda: len(warnings.filters), lambda: warnings.filterwarnings("error", "of a client")),
    "timer": (
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda: signal.setitimer(signal.ITIMER_REAL, 600),
    ),
    "cores": (
        lambda: sorted(os.sched_getaffinity(0)),
        lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    ),
    "output": (lambda: sys.stdout.fileno(), _replace_stdout),
    "input": (lambda: sys.stdin is None, lambda: setattr(sys, "stdin", None)),
    "arguments": (lambda: list(sys.argv), lambda: sys.argv.append("--of-a-client")),
    "path": (lambda: list(sys.path), lambda: sys.path.append("/of/a/client")),
    "SIGCHLD": _handler(signal.SIGCHLD, signal.SIG_IGN),
    "SIGINT": _handler(signal.SIGINT, signal.default_int_handler),
    "SIGPROF": _handler(signal.SIGPROF, signal.SIG_IGN),
    "SIGTERM": _handler(signal.SIGTERM, signal.SIG_IGN),
    "SIGRTMIN": _handler(signal.SIGRTMIN, print),
    "blocked signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]),
    ),
    "timer of the profiler": (
        lambda: signal.getitimer(signal.ITIMER_PROF)[0] > 0,
        lambda: signal.setitimer(signal.ITIMER_PROF, 600),
    ),
    "virtual timer": (
        lambda: signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0,
        lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 600),
    ),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL),
        lambda: locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"),
    ),
    "precision": (lambda: decimal.getcontext().prec, lambda: setattr(decimal.getcontext(), "prec", 5)),
    "socket timeout": (socket.getdefaulttimeout, lambda: socket.setdefaulttimeout(3)),
    "thresholds of the collector": (gc.get_threshold, lambda: gc.set_threshold(5, 5, 5)),
    "excepthook": (lambda: sys.excepthook, lambda: setattr(sys, "excepthook", print)),
    "hook of threads": (lambda: threading.excepthook, lambda: setattr(threading, "excepthook", print)),
    "trace function": (sys.gettrace, lambda: sys.settrace(_trace)),
    "profile function of threads": (threading.getprofile, lambda: threading.setprofile(_trace)),
    "switch interval": (sys.getswitchinterval, lambda: sys.setswitchinterval(0.1)),
    "recursion limit": (sys.getrecursionlimit, lambda: sys.setrecursionlimit(1111)),
    "level of the root logger": (lambda: logging.root.level, lambda: logging.root.setLevel(3)),
    "folder for files": (lambda: tempfile.tempdir, lambda: setattr(tempfile, "tempdir", "/of/a/client")),
    "start method": (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda: multiprocessing.set_start_method("spawn", force=True),
    ),
    "time zone": (
        lambda: time.strftime("%z", time.localtime(0)),
        lambda: (os.environ.update(TZ="UTC+7"), time.tzset()),
    ),
}
#: Settings that a process may be unable to reset. Its worker ends then.
LASTING: dict[str, Item] = {
    "niceness": (lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda: os.nice(3)),
    "soft limit": (
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
        lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ),
    ),
    "hard limit": (
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    ),
    "scheduling class": (
        lambda: os.sched_getscheduler(0),
        lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    ),
    "files of descriptors 0 to 2": (
        lambda: [stat.S_IFMT(os.fstat(descriptor).st_mode) for descriptor in range(3)],
        lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1),
    ),
    # No process can undo this setting.
    "no_new_privs": (
        lambda: ctypes.CDLL(None).prctl(39, 0, 0, 0, 0),
        lambda: ctypes.CDLL(None).prctl(38, 1, 0, 0, 0),
    ),
}
ALL = {**OF_TORCH, **OF_NEW_TORCH, **OF_PYTHON, **LASTING}


def look_and_change(name: str) -> tuple[int, str, str]:
    """Start as a client does. Return the pid, and the setting before and after a change."""
    look, change = ALL[name]
    with in_worker.as_first(7):
        original = repr(look())
        change()
        return os.getpid(), original, repr(look())


def look_at(names: list[str]) -> dict[str, str]:
    """Start as a client does. Return the settings by name."""
    with in_worker.as_first(7):
        return {name: repr(ALL[name][0]()) for name in names}


def thread_counts() -> tuple[int, str, int]:
    """Start as a client does. Return the pid, and the requested and actual number of threads."""
    with in_worker.as_first(7):
        torch: Any = sys.modules["torch"]
        return os.getpid(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def numbers(seed: int) -> tuple[int, list[float]]:
    """Start as a client does. Return the pid and random numbers of all kinds."""
    with in_worker.as_first(seed):
        drawn = [random.random(), float(np.random.rand())]
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            drawn += [float(torch.rand(())), float(torch.randn(()))]
        return os.getpid(), drawn


def import_torch_late() -> tuple[int, str]:
    """Start as a client does, import torch, and change its default dtype.

    Returns the pid and the dtype before the change.
    """
    with in_worker.as_first(7):
        import torch

        original = str(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        return os.getpid(), original
