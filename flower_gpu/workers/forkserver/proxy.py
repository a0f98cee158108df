"""A program that the host's fork server forks, and the process that stands for it where the user started it.

That process passes on the signals that it gets, and ends with the exit status of the program. Streams,
environment and folder of the program are its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from flower_gpu.errors import WorkerStartError
from flower_gpu.polling import readable
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.forkserver.client import Forked
from flower_gpu.workers.interpreter import UNKNOWN
from flower_gpu.workers.messages import Gone

_PASSED_ON: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")

_log = logging.getLogger("flwr.flower_gpu")


def fork(
    function: str, label: str, modules: Sequence[str], without: frozenset[str]
) -> Callable[[], int] | None:
    """Have a function run as a program with the arguments of this one, ended at once when this process ends.

    ``function``: ``"package.module:function"``, called without arguments.
    ``label``: what it does.
    ``modules``: what it imports, and its workers; the server has them before.
    ``without``: top-level names of libraries for which they have no use.
    Returns what waits for its end (:func:`_wait`); None where no server can do that.
    """
    if not client.is_supported() or _is_watched():
        return None
    life, end = os.pipe2(os.O_CLOEXEC)
    place: client.ServerPlace | None = None
    try:
        client.learn(modules, without, client.LEARN_FOR_LIMITED_S)
        place = client.find(Call(function, label=label, without=without), None, {})
        message = {"op": "program", "function": function, "argv": sys.argv, "label": label}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return partial(_wait, label, place, place.fork(message, [life, 0, 1, 2]), end)
    except (WorkerStartError, Gone, OSError) as error:
        _log.debug("%s runs in this process: %s", label, error)
        os.close(end)  # should there be one, it ends
        if place is not None:
            place.close()
        return None
    finally:
        os.close(life)


def _wait(label: str, place: client.ServerPlace, forked: Forked, life: int) -> int:
    """Pass signals on to a program until it has ended; returns its exit status, as a shell tells it.

    ``place``: what has forked it. It is closed at the end.
    ``life``: the write end of the pipe by which it ends with this process.
    """
    with _passing_on_to(forked.pidfd):
        readable([forked.pidfd], None)
    os.close(life)
    status = forked.reap()
    place.close()
    if status is None:
        _say(f"how {label} has ended is not known: the fork server was ended")
        return UNKNOWN
    if status < 0:
        _say(f"the process of {label} was killed by {signal.Signals(-status).name} ({-status})")
        return 128 - status
    return status


def _say(text: str) -> None:
    print(f"flower-gpu: {text}", file=sys.stderr, flush=True)


def _is_watched() -> bool:
    """Tell whether this process is in a debugger or profiler, which would not see a fork of another one."""
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


@contextmanager
def _passing_on_to(pidfd: int) -> Iterator[None]:
    """Pass signals on to a process, in the block; Ctrl-Z stops both."""

    def pass_on(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    def stop(number: int, _: Any) -> None:
        pass_on(signal.SIGSTOP, None)
        os.kill(os.getpid(), signal.SIGSTOP)  # until SIGCONT
        pass_on(signal.SIGCONT, None)

    handlers = {getattr(signal, name): pass_on for name in _PASSED_ON}
    before: dict[int, Any] = {}
    for number, handler in {**handlers, signal.SIGTSTP: stop}.items():
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
