"""Runs a command's work in a fork of the host's fork server, which has already imported the libraries.

There are two processes. The *proxy* is the process that the user has started. The *program* is the fork that
does the work, with the proxy's streams, environment and working directory. The proxy forwards its signals to
the program, waits, and exits with the program's exit status.

The program must not outlive the proxy. So the proxy holds the write end of a pipe, and the program the read
end. When the proxy is killed, the kernel closes the write end, and the program ends at once.
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

_FORWARDED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")

_log = logging.getLogger("flwr.flower_gpu")


def fork(
    function: str, label: str, modules: Sequence[str], without: frozenset[str]
) -> Callable[[], int] | None:
    """Start a program that calls a function. The program gets the arguments of this process (``sys.argv``).

    Returns a function that waits for the program and returns its exit status (:func:`_wait`). Returns None if
    no server can run the program. Then the command does its work in this process. The program is killed when
    this process ends.

    ``function``: the function as ``"package.module:function"``, called without arguments.
    ``label``: name of the program in messages.
    ``modules``: modules that the program and its workers need. The server imports them before it forks.
    ``without``: top-level names of libraries that the server must not import.
    """
    if not client.is_supported() or _is_watched():
        return None
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    place: client.ServerPlace | None = None
    try:
        client.learn(modules, without, client.LEARN_FOR_LIMITED_S)
        place = client.find(Call(function, label=label, without=without), None, {})
        message = {"op": "program", "function": function, "argv": sys.argv, "label": label}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return partial(_wait, label, place, place.fork(message, [read_end, 0, 1, 2]), write_end)
    except (WorkerStartError, Gone, OSError) as error:
        _log.debug("%s runs in this process: %s", label, error)
        # The program may have been forked although this process got no answer. Closing the pipe ends it.
        os.close(write_end)
        if place is not None:
            place.close()
        return None
    finally:
        os.close(read_end)


def _wait(label: str, place: client.ServerPlace, forked: Forked, write_end: int) -> int:
    """Forward signals to a program until it has exited. Return its exit status.

    If signal n killed the program, the status is 128 + n, as in a shell.

    ``place``: connection to the server that has forked the program. It is closed at the end.
    ``write_end``: write end of the pipe that keeps the program alive. It is closed at the end.
    """
    with _forwarding_to(forked.pidfd):
        readable([forked.pidfd], None)
    os.close(write_end)
    status = forked.reap()
    place.close()
    if status is None:
        _say(f"the exit status of {label} is unknown, because the fork server has ended")
        return UNKNOWN
    if status < 0:
        _say(f"the process of {label} was killed by {signal.Signals(-status).name} ({-status})")
        return 128 - status
    return status


def _say(text: str) -> None:
    print(f"flower-gpu: {text}", file=sys.stderr, flush=True)


def _is_watched() -> bool:
    """Return True if a debugger, profiler or coverage tool watches this process.

    The tool could not watch the program, which is a fork of another process.
    """
    monitoring: Any = getattr(sys, "monitoring", None)  # New in Python 3.12.
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


@contextmanager
def _forwarding_to(pidfd: int) -> Iterator[None]:
    """Forward signals to a process within the block. Ctrl-Z stops that process and this one.

    A signal that this process ignores, as after ``nohup``, stays ignored.
    """

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    def stop(number: int, _: Any) -> None:
        forward(signal.SIGSTOP, None)
        # This process stops here until it gets SIGCONT.
        os.kill(os.getpid(), signal.SIGSTOP)
        forward(signal.SIGCONT, None)

    handlers = {getattr(signal, name): forward for name in _FORWARDED}
    previous: dict[int, Any] = {}
    for number, handler in {**handlers, signal.SIGTSTP: stop}.items():
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
