"""Starting services, waiting with them, and stopping all of them, whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from flower_gpu.isolation.forkserver import control
from flower_gpu.launch import guard, processes
from flower_gpu.launch.service import Service

#: How long a service may take to end in its own way.
GRACE_S: Final = 1.5
_SERVER_END_S: Final = 2.0
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchStoppedError(Exception):
    """The user (or the system) asked the launcher to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class LaunchFailedError(Exception):
    """Something the launcher started has failed.

    Parameters
    ----------
    message : str
        What happened, in one line.
    service : Service, optional
        Whose log shows why.
    """

    def __init__(self, message: str, service: Service | None = None) -> None:
        super().__init__(message)
        self.service = service


class Supervisor:
    """Owns every process of a run; a context manager, from which nothing that was started comes out alive.

    Signals that ask to stop interrupt :meth:`wait` only, so they never hit the middle of something else.

    Parameters
    ----------
    marker : str
        An entry ``NAME=value`` that is in the environment of every process of this run and of no other.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._services: list[Service] = []
        self._received: list[int] = []
        self._not_ours: set[tuple[int, int]] = set()
        self._stack = contextlib.ExitStack()
        self._wakeup = -1
        self.left: list[int] = []

    def __enter__(self) -> Supervisor:
        with contextlib.ExitStack() as stack:
            if processes.adopt_orphans(True):
                stack.callback(processes.adopt_orphans, False)
            stack.enter_context(_guard(self._marker))
            self._not_ours = processes.children_now()  # the guard is one of them: it must outlive us
            self._wakeup = stack.enter_context(_wakeup_pipe())
            for signum in (*_STOP_SIGNALS, signal.SIGCHLD):
                previous = signal.getsignal(signum)
                if signum == signal.SIGHUP and previous == signal.SIG_IGN:
                    continue  # nohup
                signal.signal(signum, self._on_signal)
                stack.callback(signal.signal, signum, previous or signal.SIG_DFL)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self._stack.close()

    def start(self, *services: Service) -> None:
        """Start services, and take over their supervision."""
        for service in services:
            self._services.append(service)  # first, so that nothing comes between start and list
            service.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until a child ends, but not longer than asked.

        Raises
        ------
        LaunchStoppedError
            If the launcher was asked to stop, now or before.
        """
        self._raise_if_stopped()
        if select.select([self._wakeup], [], [], timeout_s)[0]:
            self._drain()
            self._raise_if_stopped()
            processes.reap_adopted(self._own(), self._not_ours)

    def stop(self, *services: Service, grace_s: float = GRACE_S) -> None:
        """End services in order, and by force where that takes too long or on a second Ctrl-C.

        Parameters
        ----------
        *services : Service
            Which; default: all, and everything they have started.
        grace_s : float
            How long they may take to end in their own way.
        """
        stopping = services or tuple(self._services)
        asked_before = len(self._received)
        for service in stopping:
            service.terminate()
        deadline = time.monotonic() + grace_s
        while any(service.runs for service in stopping):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or len(self._received) > asked_before:
                break
            select.select([self._wakeup], [], [], remaining)
            self._drain()
        if services:
            processes.send((s.pid for s in services if s.runs and s.pid), signal.SIGKILL)
            return
        # Fork servers serve other runs, too, also one that has a successor and only finishes its calls: the
        # workers in them that are this run's end with their callers.
        shared = processes.identities(control.family())
        self.left = processes.kill_all(os.fsencode(self._marker), self._own(), self._not_ours | shared)
        control.stop(if_unused=True, wait_s=_SERVER_END_S)
        processes.send((s.pid for s in stopping if s.runs and s.pid), signal.SIGKILL)  # without /proc
        for service in stopping:
            while service.runs and service.pid not in self.left:
                time.sleep(0.01)

    def _own(self) -> set[int]:
        return {service.pid for service in self._services if service.pid is not None}

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if signum != signal.SIGCHLD:
            self._received.append(signum)

    def _raise_if_stopped(self) -> None:
        if self._received:
            raise LaunchStoppedError(self._received[0])

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass


@contextlib.contextmanager
def _guard(marker: str) -> Iterator[None]:
    """Keep a process beside this one that ends the run when this one is killed."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, marker],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={key: value for key, value in os.environ.items() if f"{key}={value}" != marker},
        start_new_session=True,  # out of reach of what is sent to the launcher's group or terminal
    ):
        yield  # then its input ends, and so does the guard


@contextlib.contextmanager
def _wakeup_pipe() -> Iterator[int]:
    """Let signals wake up a ``select``: without it, one that comes just before would be slept over."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(previous)
        os.close(read)
        os.close(write)
