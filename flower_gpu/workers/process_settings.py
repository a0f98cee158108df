"""The settings of a Python process that code can change, each with functions to read and to set it.

The table has two users. A worker takes some of the settings over from its caller
(:mod:`flower_gpu.workers.caller_settings`). A worker of a simulation sets all of them anew before each
message (:mod:`flower_gpu.simulation.process_state`). Values are plain, because they are compared, and some
travel.
"""

from __future__ import annotations

# The public functions turn each number into an enum, which takes 20 times as long.
import _signal  # type: ignore[import-not-found]
import ctypes
import decimal
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from flower_gpu.frameworks.framework import Setting

_UNSETTABLE: Final = {signal.SIGKILL, signal.SIGSTOP}
_SIGNALS: Final = tuple(sorted(int(number) for number in signal.valid_signals() - _UNSETTABLE))
_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS: Final = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_GET_NO_NEW_PRIVS: Final = 39  # linux/prctl.h
_NUMPY_ERRORS: Final = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}

# The bytes behind os.environ: decoding all variables takes longer than reading all other settings.
_variables: Any = getattr(os.environb, "_data", os.environb)
_filters: Any = warnings.filters


def _set_environ(value: dict[bytes, bytes]) -> None:
    time_zone = os.environb.get(b"TZ")
    for name in os.environb.keys() - value.keys():
        del os.environb[name]
    os.environb.update(value)
    if os.environb.get(b"TZ") != time_zone:
        time.tzset()


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def _streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr


def _set_streams(value: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr = value


def _hooks() -> tuple[Any, ...]:
    return sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, threading.excepthook


def _set_hooks(value: tuple[Any, ...]) -> None:
    sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, threading.excepthook = value


def _tracers() -> tuple[Any, ...]:
    return sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()


def _set_tracers(value: tuple[Any, ...]) -> None:
    setters: tuple[Callable[[Any], None], ...] = (sys.settrace, sys.setprofile)
    for set_, function in zip((*setters, threading.settrace, threading.setprofile), value, strict=True):
        set_(function)


def _stack_size() -> int:
    value = threading.stack_size()  # this call also resets the size to 0
    threading.stack_size(value)
    return value


def _collector() -> tuple[Any, ...]:
    return gc.isenabled(), gc.get_threshold(), gc.get_debug()


def _set_collector(value: tuple[Any, ...]) -> None:
    is_enabled, threshold, debug = value
    gc.enable() if is_enabled else gc.disable()
    gc.set_threshold(*threshold)
    gc.set_debug(debug)


def _logging() -> tuple[int, int]:
    return logging.root.manager.disable, logging.root.level


def _set_logging(value: tuple[int, int]) -> None:
    logging.disable(value[0])
    logging.root.setLevel(value[1])


def _decimal() -> tuple[Any, ...]:
    fields: Any = decimal.getcontext().__reduce__()[1]
    *fields, _flags, traps = fields
    return (*fields, [], traps)


def _set_decimal(value: tuple[Any, ...]) -> None:
    decimal.setcontext(decimal.Context(*value))


def _numpy_errors() -> dict[str, Any] | None:
    """Return numpy's handling of errors; None for the default, and if numpy is not imported."""
    numpy: Any = sys.modules.get("numpy")
    handling = dict(numpy.geterr()) if hasattr(numpy, "geterr") else _NUMPY_ERRORS
    return None if handling == _NUMPY_ERRORS else handling


def _set_numpy_errors(value: dict[str, Any] | None) -> None:
    if value is not None or "numpy" in sys.modules:
        import numpy

        # The function for "call" and "log" belongs to the process that has set it, and may be missing here.
        has_function = numpy.geterrcall() is not None
        wanted: dict[str, Any] = {
            name: "warn" if mode in ("call", "log") and not has_function else mode
            for name, mode in (value or _NUMPY_ERRORS).items()
        }
        numpy.seterr(**wanted)


def _handlers() -> list[Any]:
    return [_signal.getsignal(number) for number in _SIGNALS]


def _set_handlers(value: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, value, strict=True):
        # None stands for a handler that a C library has installed. Python cannot install it again.
        if handler is not None and _signal.getsignal(number) is not handler:
            _signal.signal(number, handler)


def _blocked() -> set[Any]:
    blocked: set[Any] = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return blocked


def _set_blocked(value: set[Any]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, value)


def _timers() -> list[float]:
    return [signal.getitimer(timer)[0] for timer in _TIMERS]


def _set_timers(value: list[float]) -> None:
    for timer, seconds in zip(_TIMERS, value, strict=True):
        signal.setitimer(timer, seconds)


#: The settings that can be set anew, by the names that docs/explanation/simulation.md has for them.
SETTINGS: Final[Mapping[str, Setting]] = {
    # Timers come first, because an alarm of an earlier client must not interrupt the rest.
    "timers": Setting(_timers, _set_timers),
    "signal handlers": Setting(_handlers, _set_handlers),
    "blocked signals": Setting(_blocked, _set_blocked),
    "environment variables": Setting(lambda: dict(_variables), _set_environ),
    "working directory": Setting(os.getcwd, os.chdir),
    "umask": Setting(_umask, os.umask),
    "`sys.path`": Setting(lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
    "`sys.argv`": Setting(lambda: list(sys.argv), lambda value: sys.argv.__setitem__(slice(None), value)),
    "`sys.stdin`, `sys.stdout`, `sys.stderr`": Setting(_streams, _set_streams),
    "`sys.excepthook` and the other hooks": Setting(_hooks, _set_hooks),
    "trace and profile functions": Setting(_tracers, _set_tracers),
    "recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "switch interval": Setting(sys.getswitchinterval, sys.setswitchinterval),
    "stack size of new threads": Setting(_stack_size, threading.stack_size),
    "garbage collector": Setting(_collector, _set_collector),
    "warnings' filters": Setting(
        lambda: list(_filters), lambda value: _filters.__setitem__(slice(None), value)
    ),
    "level of the root logger, `logging.disable`": Setting(_logging, _set_logging),
    "locale": Setting(
        lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)
    ),
    "`decimal`'s context": Setting(_decimal, _set_decimal),
    "`socket`'s default timeout": Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "`tempfile.tempdir`": Setting(
        lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value)
    ),
    "`multiprocessing`'s start method": Setting(
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda value: multiprocessing.set_start_method(value, force=True),
    ),
    "numpy's handling of floating-point errors": Setting(_numpy_errors, _set_numpy_errors),
    **(
        {"cores": Setting(lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value))}
        if hasattr(os, "sched_getaffinity")
        else {}
    ),
}

#: Names of the settings that a worker takes over from its caller. The environment, the working directory, the
#: umask and the cores travel as :class:`flower_gpu.workers.forkserver.identity.Inherited`.
TAKEN_OVER: Final = (
    "recursion limit",
    "switch interval",
    "stack size of new threads",
    "level of the root logger, `logging.disable`",
    "locale",
    "`decimal`'s context",
    "`socket`'s default timeout",
    "`multiprocessing`'s start method",
    "numpy's handling of floating-point errors",
)


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(number) for number in _LIMITS]


def _set_limits(value: list[tuple[int, int]]) -> None:
    for number, limit in zip(_LIMITS, value, strict=True):
        if resource.getrlimit(number) != limit:
            resource.setrlimit(number, limit)


def _scheduling() -> tuple[int, int]:
    return os.sched_getscheduler(0), os.sched_getparam(0).sched_priority


def _set_scheduling(value: tuple[int, int]) -> None:
    os.sched_setscheduler(0, value[0], os.sched_param(value[1]))


def _privileges() -> tuple[Any, ...]:
    no_new_privileges: int = _program().prctl(_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
    return os.getresuid(), os.getresgid(), os.getgroups(), no_new_privileges


@cache
def _program() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _standard_files() -> list[tuple[int, int] | None]:
    """Return device and inode of the files of descriptors 0, 1 and 2; None for a closed descriptor."""
    identities: list[tuple[int, int] | None] = []
    for descriptor in range(3):
        try:
            state = os.fstat(descriptor)
            identities.append((state.st_dev, state.st_ino))
        except OSError:
            identities.append(None)
    return identities


def _refuse(_: Any) -> None:
    raise PermissionError("this cannot be set again")


#: Settings that a process may be unable to set anew. If one of them stays changed, the process must end.
LASTING: Final[Mapping[str, Setting]] = {
    "niceness": Setting(
        lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda value: os.setpriority(os.PRIO_PROCESS, 0, value)
    ),
    "resource limits": Setting(_limits, _set_limits),
    "process group": Setting(os.getpgrp, _refuse),
    "files of descriptors 0 to 2": Setting(_standard_files, _refuse),
    **(
        {
            "scheduling class": Setting(_scheduling, _set_scheduling),
            "user, groups, `no_new_privs`": Setting(_privileges, _refuse),
        }
        if sys.platform == "linux"
        else {}
    ),
}
