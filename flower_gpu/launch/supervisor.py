"""The processes of a run: started, watched and always ended here.

::

    launcher ──starts──> Service: SuperLink, SuperNode, flwr run ...  ──start──> Flower's own processes
       │                                                                          (in sessions of their own)
       ├── normal end, Ctrl-C:  Supervisor.stop: SIGTERM to services, then SIGKILL to everything below
       │                        the launcher and everything with the run's folder in its environment
       └── kill -9:             the kernel kills the services' groups (a pipe's end closes),
                                guard.py kills everything with the run's folder in its environment

Flower detaches some of its processes, and a process whose parent ends moves to another parent. The launcher
makes itself that other parent, so that all of them stay below it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from flower_gpu import trace
from flower_gpu.flower.programs import starter
from flower_gpu.launch import guard
from flower_gpu.workers.forkserver import control
from flower_gpu.workers.life import adopt_orphans, kill_group_at_end_of

if TYPE_CHECKING:
    import psutil

#: How long services may take to end in their own way.
GRACE_S: Final = 1.5
#: How long SIGKILL is tried: a process inside a driver call cannot be killed.
KILL_S: Final = 3.0
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How servers say that another process has their port: uvicorn, then flwr.
_PORT_TAKEN: Final = re.compile(r"address already in use|Port in server address \S+ is already in use")
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*", re.MULTILINE)


class LaunchStoppedError(Exception):
    """The user (or the system) asked the launcher to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class LaunchFailedError(Exception):
    """A part of the run has failed; the log of ``service`` shows why, where there is one."""

    def __init__(self, message: str, service: Service | None = None) -> None:
        super().__init__(message)
        self.service = service


class Service:
    """A process with a log file; it dies with the launcher."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log = log
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | starter.ProgramHandle | None = None
        self._life: int | None = None

    def start(self, programs: starter.Programs | None = None) -> None:
        """Start the process in a process group of its own, out of reach of a terminal's Ctrl-C.

        ``programs`` is asked for it first, if it is one of Flower's.
        """
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log.open("ab"))
            # In a locale without UTF-8, Python reads other characters of a command line as lone surrogates.
            log.write(f"$ {shlex.join(self.command)}\n".encode(errors="surrogateescape"))
            log.flush()
            read, self._life = os.pipe()  # both are closed in programs we start, unless passed on
            stack.callback(os.close, read)
            try:
                self._process = self._forked(programs, log.fileno(), read) or subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    process_group=0,
                    pass_fds=(read,),
                )
            except BaseException:
                self._close_life()
                raise
            if sys.platform == "linux":
                kill_group_at_end_of(read, self._process.pid)

    def _forked(self, programs: starter.Programs | None, log: int, life: int) -> starter.ProgramHandle | None:
        if programs is None or not starter.is_flowers(self.command[0]):
            return None
        with open(os.devnull, "rb") as stdin:
            started = programs.start(
                self.command, self._env, stdin=stdin.fileno(), stdout=log, stderr=log, kept=(life,)
            )
        return None if started is None else starter.ProgramHandle(self.command, *started)

    @property
    def end(self) -> starter.ProgramHandle | None:
        """What can be read when the process has ended, if no SIGCHLD tells of it."""
        process = self._process
        return process if isinstance(process, starter.ProgramHandle) and process.returncode is None else None

    @property
    def pid(self) -> int | None:
        """Pid of the process, None before its start."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """How the process ended; None while it runs or before it was started."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._close_life()
        return code

    @property
    def runs(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self.returncode is None

    @property
    def port_was_taken(self) -> bool:
        """Whether the process ended because another process listens on its port."""
        return bool(self.returncode) and _PORT_TAKEN.search(self.tail(60)) is not None

    def send(self, signum: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.runs and self._process is not None:
            self._process.send_signal(signum)

    def tail(self, lines: int = 20) -> str:
        """Last lines of its log, without colours."""
        return tail(self.log, lines)

    def describe_end(self) -> str:
        """Say which process ended and how."""
        code = self.returncode
        if code is None or code >= 0:
            return f"{self.name} ended with {'nothing' if code is None else f'exit code {code}'}"
        try:
            return f"{self.name} ended with {signal.Signals(-code).name} ({code})"
        except ValueError:
            return f"{self.name} ended with signal {-code}"

    def _close_life(self) -> None:
        if self._life is not None:
            os.close(self._life)
            self._life = None


class Supervisor:
    """Owns every process of a run; a context manager, from which nothing that was started comes out alive.

    Signals that ask to stop interrupt :meth:`wait` only, so they never hit the middle of something else.
    ``marker`` is an entry ``NAME=value`` in the environment of every process of this run and of no other.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._services: list[Service] = []
        self._received: list[int] = []
        self._not_ours: set[psutil.Process] = set()
        self._stack = contextlib.ExitStack()
        self._wakeup = -1
        self._is_parent = False  # also of what the run's processes leave behind
        self._programs: starter.Programs | None = None
        #: Pids of processes that could not be ended.
        self.left: list[int] = []

    def __enter__(self) -> Supervisor:
        import psutil  # here, as in the other places of this package: workers and fork servers do without

        with contextlib.ExitStack() as stack:
            self._is_parent = adopt_orphans()
            if self._is_parent:
                stack.callback(adopt_orphans, False)
            stack.enter_context(_guard(self._marker))
            # Children of before the run are not the run's to end. The guard is one: it must outlive us.
            self._not_ours = set(psutil.Process().children())
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

    def fork_programs(self, env: Mapping[str, str], log: Path) -> None:
        """Have Flower's programs forked from a process with Flower imported, where that is possible.

        ``env`` has what all of them start with, ``log`` is that process's own.
        """
        if self._is_parent:
            self._programs = starter.start_server(env, log)
        else:
            starter.say_slow("this system lets no process adopt what others leave behind")

    def start(self, *services: Service) -> None:
        """Start services, and take over their supervision."""
        for service in services:
            self._services.append(service)  # first, so that nothing comes between start and list
            service.start(self._programs)

    def wait(self, timeout_s: float) -> None:
        """Wait until a child ends, but not longer than asked.

        Raises LaunchStoppedError if the launcher was asked to stop, now or before.
        """
        self._raise_if_stopped()
        if self._sleep(timeout_s):
            self._raise_if_stopped()
            self._below()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End services and all that they have started; by force after a while, or on a second Ctrl-C."""
        asked_before = len(self._received)
        for service in self._services:
            service.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(service.runs for service in self._services):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or len(self._received) > asked_before:
                break
            self._sleep(remaining)
        if self._programs is not None:
            self._programs.close()
        self.left = self._kill_all()
        if self._programs is not None:
            self._programs.reap()
        deadline = time.monotonic() + KILL_S
        for service in self._services:  # without /proc none of them was found
            service.send(signal.SIGKILL)
            while service.runs and service.pid not in self.left and time.monotonic() < deadline:
                time.sleep(0.01)

    def _kill_all(self) -> list[int]:
        """Kill everything of the run again and again, until nothing is left; return the pids of the rest."""
        # Fork servers serve other runs, too, also one that has a successor and only finishes its calls. The
        # workers in them that are this run's end with their callers.
        shared = _running(control.family())
        marker = os.fsencode(self._marker)
        deadline = time.monotonic() + KILL_S
        while True:
            left = self._below(shared).union(guard.marked(marker))
            if not left or time.monotonic() > deadline:
                return sorted(left)
            for pid in left:  # what was just forked is not in the list yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _below(self, without: Collection[psutil.Process] = ()) -> set[int]:
        """Return the pids of this run's processes below this one, and reap those that have ended.

        ``without`` are processes to leave out, with everything below them.
        """
        import psutil

        services = {service.pid for service in self._services}
        left_out: set[int] = set()
        found: set[int] = set()
        for process in psutil.Process().children(recursive=True):  # parents before their children
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.ppid()
                if process in self._not_ours or process in without or parent in left_out:
                    left_out.add(process.pid)
                elif process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found.add(process.pid)
                elif parent == os.getpid() and process.pid not in services:
                    with contextlib.suppress(ChildProcessError):  # adopted: nobody else asks for its status
                        os.waitpid(process.pid, os.WNOHANG)
        return found

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if signum != signal.SIGCHLD:
            self._received.append(signum)

    def _raise_if_stopped(self) -> None:
        if self._received:
            raise LaunchStoppedError(self._received[0])

    def _sleep(self, seconds: float) -> bool:
        """Wait for a signal, or the end of a service; tell whether there was one."""
        poll = select.poll()  # not select(): there may be thousands of descriptors
        poll.register(self._wakeup, select.POLLIN)
        for end in filter(None, (each.end for each in self._services)):
            poll.register(end, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]
        if self._wakeup in found:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wakeup, 4096):
                    pass
        for service in self._services:
            service.returncode  # noqa: B018 - what has ended is not waited for again
        return bool(found)


def _running(pids: Collection[int]) -> set[psutil.Process]:
    import psutil

    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return found


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


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a text file that are not empty, without colours."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Without the lines by which a traceback underlines its code: they leave no room for the rest.
    kept = [line.rstrip() for line in without_colours(text).splitlines() if line.strip(" ^~")]
    return "\n".join(kept[-lines:])


def without_colours(text: str) -> str:
    """Return a text of a log without a terminal's sequences for colours."""
    return _ANSI.sub("", text)


def last_traceback(path: Path) -> str:
    """Return the last traceback in a log; empty where there is none."""
    try:
        found = _TRACEBACK.findall(path.read_text(errors="replace"))
    except OSError:
        return ""
    return found[-1] if found else ""


def new_lines(log: trace.Follower) -> list[str]:
    """Return the lines that were added to a log since the last time, without colours."""
    return [without_colours(line.decode(errors="replace")).rstrip("\r") for line in log.read_lines()]
