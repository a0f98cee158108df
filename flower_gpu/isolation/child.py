"""The worker's side: environment first, then the task, then out.

One entry for every start method: `serve`. Only the standard library is imported before the environment
is set.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_STACK_DUMP_SIGNAL = signal.SIGQUIT  # what a terminal's Ctrl-\ sends: "show where you are"


@dataclass(frozen=True)
class Descriptors:
    """File descriptors of a worker.

    Parameters
    ----------
    life : int
        Read end of a pipe that only the caller writes to: closed when the caller is gone.
    events : int
        Write end of the pipe for events, JSON lines.
    reply : int
        Memory file for the result.
    request : int
        Memory file with the task and its arguments; -1 where a fork has them already.
    """

    life: int
    events: int
    reply: int
    request: int = -1


@dataclass(frozen=True)
class Outcome:
    """What a worker found out: a value or an error, never both.

    Parameters
    ----------
    value : object
        What the task returned.
    error_type : str, optional
        ``module.Class`` of the exception.
    error_text : str
        ``str`` of the exception.
    error_traceback : str
        The formatted traceback.
    error_pickle : bytes, optional
        The exception itself, where it can be passed on. Kept as bytes, so that a caller without the
        library that defines it need not import that library.
    """

    value: Any = None
    error_type: str | None = None
    error_text: str = ""
    error_traceback: str = ""
    error_pickle: bytes | None = None


def spawned() -> NoReturn:
    """Run as the program of a fresh interpreter; the start record is the first argument."""
    record = json.loads(sys.argv.pop(1))
    descriptors = Descriptors(**record["descriptors"])
    for descriptor in vars(descriptors).values():
        os.set_inheritable(descriptor, False)  # not for programs that the task starts

    def load() -> tuple[Any, ...]:
        from flower_gpu.isolation import transport

        request: tuple[Any, ...] = transport.load(descriptors.request)
        return request

    serve(descriptors, record["env"], record["setup"], load)
    sys.exit(0)


def forked(
    descriptors: Descriptors,
    stdout: int,
    stderr: int,
    env: Mapping[str, str],
    setup: str | None,
    request: tuple[Any, ...],
) -> None:
    """Run in a fork of the caller, where threads, handlers and streams are those of the caller."""
    with contextlib.suppress(OSError):  # the caller does the same; whoever comes first
        os.setpgid(0, 0)
    for number in signal.valid_signals():
        # The caller's handlers would act in its name (Flower's report the task as stopped).
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    # The caller's sys.stdout may be anything (a notebook's, a test runner's).
    sys.stdout = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    serve(descriptors, env, setup, lambda: request)


def serve(
    descriptors: Descriptors,
    env: Mapping[str, str],
    setup: str | None,
    load: Callable[[], tuple[Any, ...]],
) -> None:
    """Do one call: load the task and its arguments, run it, leave the result in the reply file.

    Parameters
    ----------
    descriptors : Descriptors
        The lines to the caller.
    env : mapping of str to str
        Environment variables of this worker.
    setup : str, optional
        ``"package.module:function"`` to call before the task is loaded.
    load : callable
        Returns ``(task, args, kwargs)``. May import whatever the task needs.
    """
    _die_with_the_caller(descriptors.life)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ended from outside: no traceback for that
    faulthandler.enable(file=2)
    faulthandler.register(_STACK_DUMP_SIGNAL, file=2, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(env)

    from flower_gpu.isolation import events, transport
    from flower_gpu.isolation.call import load_task

    lock = threading.Lock()

    def send(event: dict[str, Any]) -> None:
        with lock:
            os.write(descriptors.events, json.dumps(event, default=str).encode() + b"\n")

    with events.sending_to(send):
        try:
            if setup is not None:
                load_task(setup)()
            task, args, kwargs = load()
            function = load_task(task)
            _check_environment(env)
            outcome = Outcome(value=function(*args, **kwargs))
        except SystemExit:
            raise  # the task asked for it; the caller reports the exit code
        except BaseException as error:
            outcome = _failure(error)
    try:
        transport.dump(outcome, descriptors.reply)
    except Exception as error:
        os.ftruncate(descriptors.reply, 0)
        transport.dump(_failure(_unsendable(error)), descriptors.reply)
    send({"event": "result"})


def _die_with_the_caller(life: int) -> None:
    """Have the kernel kill this process group when the caller is gone, even while the GIL is held."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        poll = select.poll()
        poll.register(life, 0)  # POLLHUP is always reported
        if poll.poll(0):  # it went before the signal was armed
            os.killpg(0, signal.SIGKILL)
        return

    def wait() -> None:  # macOS has no F_SETSIG
        os.read(life, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="flower-gpu-life", daemon=True).start()


def _check_environment(env: Mapping[str, str]) -> None:
    from flower_gpu.errors import WorkerStartError

    lost = {name: os.environ.get(name) for name in env if os.environ.get(name) != env[name]}
    if lost:
        name, value = next(iter(lost.items()))
        raise WorkerStartError(
            f"the worker's environment was changed while the task was loaded: {name} is {value!r}, "
            f"not {env[name]!r}. Set it through env= and not in the task's module"
        )


def _failure(error: BaseException) -> Outcome:
    kind = type(error)
    text = "".join(traceback.format_exception(kind, error, _without_own_frames(error)))
    return Outcome(
        error_type=f"{kind.__module__}.{kind.__qualname__}",
        error_text=str(error),
        error_traceback=text.rstrip(),
        error_pickle=_pickled(error),
    )


def _without_own_frames(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    own = Path(__file__).parent
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == own:
        frames = frames.tb_next
    return frames or error.__traceback__


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    if not isinstance(error, Exception):  # KeyboardInterrupt would stop the caller
        return None
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)  # many exceptions can be pickled but not built again
    except Exception:
        return None
    return data


def _unsendable(error: Exception) -> Exception:
    from flower_gpu.errors import InvalidResultError

    result = InvalidResultError(
        f"the task returned something that cannot be passed between processes "
        f"({type(error).__name__}: {error}). Return numpy arrays, numbers, strings, and lists or "
        "dicts of them"
    )
    return result.with_traceback(error.__traceback__)
