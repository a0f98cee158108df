"""A fork of the server becomes a program: as a fresh interpreter, but for what is imported already."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket
from types import ModuleType
from typing import Any, Final, NoReturn

import numpy as np

from flower_gpu.flower.programs import starter
from flower_gpu.flower.programs.entry import Entry
from flower_gpu.workers import threads

# Modules of Flower's that start programs of Flower's, by ``subprocess.Popen``.
_STARTERS: Final = (
    "flwr.superlink.cli.flower_superlink",
    "flwr.supercore.superexec.executor.subprocess_executor",
    "flwr.supernode.start_client_internal",
)
# Runs the ServerApp. Other programs multiply no matrices, and threads that wait for that cost time.
_COMPUTES: Final = "flwr-serverapp"

_programs: starter.Programs | None = None


def become(
    found: Entry,
    argv: Sequence[str],
    env: Mapping[str, str],
    group: int | None,
    streams: Sequence[int],
    folder: int,
    connection: socket,
) -> Callable[[], Any]:
    """Take on what a program is started with, in a new fork; return its function.

    Parameters
    ----------
    found : Entry
        The program.
    argv : sequence of str
        Its name and arguments.
    env : mapping
        All its environment variables.
    group : int or None
        Its process group; 0 for one of its own, None for a session of its own.
    streams : sequence of int
        Descriptors of its standard input, output and error.
    folder : int
        Descriptor of its working directory.
    connection : socket.socket
        Over which it has programs started itself.
    """
    if group is None:
        os.setsid()
    else:
        with suppress(OSError):  # the group has ended
            os.setpgid(0, group)
    os.fchdir(folder)
    os.close(folder)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = [found.path, *argv[1:]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    be_shown_as(" ".join([sys.executable, *sys.argv]), Path(found.path).name)
    main = ModuleType("__main__")
    main.__file__ = found.path
    sys.modules["__main__"] = main
    np.random.seed()
    threads.apply(os.environ if Path(found.path).name != _COMPUTES else _with_all_cores(os.environ))
    use(starter.Programs(connection))
    return found.load()


def be_shown_as(command: str, name: str | None = None) -> None:
    """Have ``ps`` show this process with a command line and a name, where setproctitle is installed."""
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(command)
        if name is not None:
            setproctitle.setthreadtitle(name)


def _with_all_cores(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables by which a library that was loaded with one thread gets what it begins with."""
    return {threads.VARIABLE: str(len(os.sched_getaffinity(0))), **environ}


def is_one() -> bool:
    """Tell whether this process has its programs forked by a server: a fork of one does from the start."""
    return _programs is not None


def use(programs: starter.Programs) -> None:
    """Have the programs that Flower starts in this process forked by a server."""
    global _programs
    _programs = programs
    replacement = starter.Subprocess(programs)
    for name in _STARTERS:
        module = sys.modules.get(name)
        if isinstance(getattr(module, "subprocess", None), types.ModuleType):
            module.subprocess = replacement  # type: ignore[union-attr]


def run_to_end(main: Callable[[], Any]) -> NoReturn:
    """Run a program, and end as an interpreter does; what the kernel takes down is left to it."""
    code = 1
    try:
        code = _status_of(main)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)


def _status_of(main: Callable[[], Any]) -> int:
    try:
        result = main()
    except SystemExit as end:
        result = end.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    if result is None or isinstance(result, int):
        return result or 0
    print(result, file=sys.stderr)
    return 1
