"""Run a program in a fork that begins and ends like a fresh interpreter, but with imported libraries."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from types import ModuleType
from typing import Any, Final, NoReturn

from flower_gpu import frameworks
from flower_gpu.workers import threads
from flower_gpu.workers.own_process import facts

#: Exit status of a program whose end is unknown. It does not count as success.
UNKNOWN: Final = 255


def begin(argv: Sequence[str], streams: Sequence[int], environ: Mapping[str, str]) -> None:
    """Set up the process as a fresh program.

    ``argv``: path and arguments of the program.
    ``streams``: descriptors of its standard input, output and error.
    ``environ``: environment variables with the number of threads for its libraries.
    """
    facts.is_program = True
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The old object has already reached the end of its input, so it would not read the new input.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.argv[:] = argv
    main = ModuleType("__main__")
    main.__file__ = argv[0]
    sys.modules["__main__"] = main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    frameworks.seed_fork()
    threads.apply(environ)


def packages_of(environment: str) -> str:
    """Return the folder with the packages of a virtual environment of this Python."""
    return f"{environment}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def use_environment(environment: str) -> None:
    """Let this process find packages and programs of a virtual environment before its own."""
    sys.path.insert(0, packages_of(environment))
    os.environ["PATH"] = os.pathsep.join([f"{environment}/bin", os.environ.get("PATH", os.defpath)])
    os.environ["VIRTUAL_ENV"] = environment


def run_to_end(main: Callable[[], Any], then: Callable[[], object] = lambda: None) -> NoReturn:
    """Run a program and its exit functions, and exit without finalizing the interpreter."""
    code = 1
    try:
        code = _status_of(main)
        then()
        end()
    finally:
        flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)


def end() -> None:
    """Run the steps of an interpreter's exit, without finalizing it object by object.

    With torch, pandas and scikit-learn, finalization takes seconds.
    """
    # This comes first, because it tells the processes of pools to end. The exit functions of multiprocessing
    # wait for these processes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Call this explicitly, because a fork has not registered it as an exit function.
    util._exit_function()  # type: ignore[attr-defined]
    flush()


def flush() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, replaced, or without a reader
            stream.flush()


def with_all_cores(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return variables that give all cores to a library that was loaded with one thread."""
    return {threads.VARIABLE: str(len(os.sched_getaffinity(0))), **environ}


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
