"""Runs a command's work in a program that the host's fork server forks. The command itself is the proxy.

The proxy forwards the signals that it gets, and ends with the exit status of the program. The program has the
proxy's streams, environment and working directory. The proxy holds the write end of a pipe. When the proxy is
killed, the kernel closes the pipe, and the program ends at once.
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
    """Run a function as a forked program with the arguments of this process.

    Returns a function that waits for the program and returns its exit status (:func:`_wait`). Returns None if
    no server can run the program. The program is killed when this process ends.

    ``function``: the function as ``"package.module:function"``, called without arguments.
    ``label``: name of the program in messages.
    ``modules``: modules that the program and its workers import. The server imports them first.
    ``without``: top-level names of libraries that the server must not import.
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
        # If the program was forked after all, this ends it.
        os.close(end)
        if place is not None:
            place.close()
        return None
    finally:
        os.close(life)


def _wait(label: str, place: client.ServerPlace, forked: Forked, life: int) -> int:
    """Forward signals to a program until it has exited. Return its exit status as a shell would.

    ``place``: the place that has forked the program. It is closed at the end.
    ``life``: write end of a pipe. Closing it kills the program.
    """
    with _forwarding_to(forked.pidfd):
        readable([forked.pidfd], None)
    os.close(life)
    status = forked.reap()
    place.close()
    if status is None:
        _say(f"it is unknown how {label} ended: the fork server was ended")
        return UNKNOWN
    if status < 0:
        _say(f"the process of {label} was killed by {signal.Signals(-status).name} ({-status})")
        return 128 - status
    return status


def _say(text: str) -> None:
    print(f"flower-gpu: {text}", file=sys.stderr, flush=True)


def _is_watched() -> bool:
    """Return True if a debugger or profiler watches this process. It could not watch the server's fork."""
    monitoring: Any = getattr(sys, "monitoring", None)  # New in Python 3.12.
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


@contextmanager
def _forwarding_to(pidfd: int) -> Iterator[None]:
    """Forward signals to a process within the block. Ctrl-Z stops both processes."""

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    def stop(number: int, _: Any) -> None:
        forward(signal.SIGSTOP, None)
        os.kill(os.getpid(), signal.SIGSTOP)  # This call returns after SIGCONT.
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
