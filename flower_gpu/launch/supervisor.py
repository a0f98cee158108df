"""The processes of a run: how they are started, watched and always ended.

The problem: Flower starts processes in sessions of their own, users press Ctrl-C or kill the launcher, and no
process of a run may stay behind, least of all with memory of a GPU.

::

    launcher ──starts──> Service: SuperLink, SuperNode, flwr run ...  ──start──> Flower's own processes
       │                                                                          (in sessions of their own)
       ├── normal end, Ctrl-C:  Supervisor.stop: SIGTERM to services, then SIGKILL to all descendants of
       │                        the launcher and all processes with the run's folder in their environment
       └── kill -9:             the kernel kills the services' groups (a pipe's end closes),
                                guard.py kills all processes with the run's folder in their environment

The objects: a :class:`Service` is one process with a log. The :class:`Supervisor` owns all services of a run
and is used from one thread. The guard is a small process that outlives a killed launcher (:func:`_guard`).

Flower detaches some of its processes, and an orphan gets another parent. The launcher makes itself that
parent (``adopt_orphans``), so that all of these processes stay its descendants.

Races:

- A signal may arrive between a check and a ``poll``. So each signal also writes to a pipe that ``poll`` waits
  for (:func:`_wakeup_pipe`). Only :meth:`Supervisor.wait` turns a signal into an exception.
- A process may fork while all processes of the run are being killed. So the kill is repeated until a look at
  ``/proc`` no longer finds any.
- Fork servers are descendants of the launcher that started them, but also serve other runs. They are spared.
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
from flower_gpu.launch import guard
from flower_gpu.programs import starter
from flower_gpu.workers.forkserver import control
from flower_gpu.workers.life import adopt_orphans, kill_group_at_end_of

if TYPE_CHECKING:
    import psutil

#: Seconds that services get to end after SIGTERM.
GRACE_S: Final = 1.5
#: Seconds for which SIGKILL is repeated. A process inside a driver call cannot be killed.
KILL_S: Final = 3.0
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Messages of servers whose port is taken by another process: uvicorn, then flwr.
_PORT_TAKEN: Final = re.compile(r"address already in use|Port in server address \S+ is already in use")
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*", re.MULTILINE)


class LaunchStoppedError(Exception):
    """The launcher got a signal to stop, from the user or the system."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class LaunchFailedError(Exception):
    """A part of the run has failed. The log of ``service`` shows the reason, unless it is None."""

    def __init__(self, message: str, service: Service | None = None) -> None:
        super().__init__(message)
        self.service = service


class Service:
    """A process with a log file. The kernel kills it when the launcher ends."""

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
        """Start the process in its own process group, so that Ctrl-C in the terminal does not reach it.

        ``programs``: forks the process if it is one of Flower's programs, and if it can.
        """
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log.open("ab"))
            # In a locale without UTF-8, Python reads other characters of a command line as lone surrogates.
            log.write(f"$ {shlex.join(self.command)}\n".encode(errors="surrogateescape"))
            log.flush()
            # Programs that we start close both ends, except an end that is passed to them.
            read, self._life = os.pipe()
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
        """Object that becomes readable when the process exits, or None if SIGCHLD reports the exit."""
        process = self._process
        return process if isinstance(process, starter.ProgramHandle) and process.returncode is None else None

    @property
    def pid(self) -> int | None:
        """Pid of the process, or None before its start."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the process, or None while it runs and before its start."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._close_life()
        return code

    @property
    def runs(self) -> bool:
        """True if the process was started and has not exited."""
        return self._process is not None and self.returncode is None

    @property
    def port_was_taken(self) -> bool:
        """True if the process exited because another process listens on its port."""
        return bool(self.returncode) and _PORT_TAKEN.search(self.tail(60)) is not None

    def send(self, signum: int) -> None:
        """Send a signal to the process if it is running."""
        if self.runs and self._process is not None:
            self._process.send_signal(signum)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log, without colours."""
        return tail(self.log, lines)

    def describe_end(self) -> str:
        """Return a clause with the name of the process and its exit status."""
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
    """The owner of all processes of a run. A context manager that kills them all at its exit.

    Signals to stop interrupt only :meth:`wait`, so they cannot interrupt other code.

    ``marker``: an entry ``NAME=value`` in the environment of all processes of this run and of no others.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._services: list[Service] = []
        self._received: list[int] = []
        self._not_ours: set[psutil.Process] = set()
        self._stack = contextlib.ExitStack()
        self._wakeup = -1
        self._is_parent = False  # whether orphans of the run's processes become our children
        self._programs: starter.Programs | None = None
        #: Pids of processes that could not be ended.
        self.unkilled: list[int] = []

    def __enter__(self) -> Supervisor:
        # psutil is imported late in this package, because workers and fork servers do not need it.
        import psutil

        with contextlib.ExitStack() as stack:
            self._is_parent = adopt_orphans()
            if self._is_parent:
                stack.callback(adopt_orphans, False)
            stack.enter_context(_guard(self._marker))
            # Children from before the run must not be killed. The guard is one of them, and must outlive us.
            self._not_ours = set(psutil.Process().children())
            self._wakeup = stack.enter_context(_wakeup_pipe())
            for signum in (*_STOP_SIGNALS, signal.SIGCHLD):
                previous = signal.getsignal(signum)
                if signum == signal.SIGHUP and previous == signal.SIG_IGN:
                    continue  # The launcher was started with nohup.
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
        """Fork Flower's programs from a process that has imported Flower, if possible.

        ``env``: environment that all programs have in common.
        ``log``: log of that process.
        """
        if self._is_parent:
            self._programs = starter.start_server(env, log)
        else:
            starter.say_slow("this system does not let a process adopt orphaned processes")

    def start(self, *services: Service) -> None:
        """Start services and supervise them."""
        for service in services:
            # Listed before its start, so that an exception in between cannot hide a running service.
            self._services.append(service)
            service.start(self._programs)

    def wait(self, timeout_s: float) -> None:
        """Wait until a child exits, for at most ``timeout_s`` seconds.

        Raises LaunchStoppedError if the launcher gets a signal to stop, or got one before.
        """
        self._raise_if_stopped()
        if self._sleep(timeout_s):
            self._raise_if_stopped()
            self._below()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End all processes of the run. Kill them after ``grace_s`` seconds, or on a second Ctrl-C."""
        received_before = len(self._received)
        for service in self._services:
            service.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(service.runs for service in self._services):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or len(self._received) > received_before:
                break
            self._sleep(remaining)
        if self._programs is not None:
            self._programs.close()
        self.unkilled = self._kill_all()
        if self._programs is not None:
            self._programs.reap()
        deadline = time.monotonic() + KILL_S
        # On a system without /proc, _kill_all() has not found all processes.
        for service in self._services:
            service.send(signal.SIGKILL)
            while service.runs and service.pid not in self.unkilled and time.monotonic() < deadline:
                time.sleep(0.01)

    def _kill_all(self) -> list[int]:
        """Kill all processes of the run repeatedly, and return the pids of processes that did not end."""
        # Fork servers are spared, including draining servers, because they also serve other runs. The workers
        # of this run end with their callers.
        shared = _running(control.family())
        marker = os.fsencode(self._marker)
        deadline = time.monotonic() + KILL_S
        while True:
            left = self._below(shared).union(guard.marked(marker))
            if not left or time.monotonic() > deadline:
                return sorted(left)
            # A process that was just forked is not in the list yet, so the loop looks again.
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _below(self, without: Collection[psutil.Process] = ()) -> set[int]:
        """Return the pids of this run's descendants of this process, and reap adopted zombies.

        ``without``: processes to leave out, with their descendants.
        """
        import psutil

        services = {service.pid for service in self._services}
        left_out: set[int] = set()
        running: set[int] = set()
        # Parents come before their children.
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.ppid()
                if process in self._not_ours or process in without or parent in left_out:
                    left_out.add(process.pid)
                elif process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    running.add(process.pid)
                elif parent == os.getpid() and process.pid not in services:
                    # An adopted zombie. No other code asks for its exit status.
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
        return running

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if signum != signal.SIGCHLD:
            self._received.append(signum)

    def _raise_if_stopped(self) -> None:
        if self._received:
            raise LaunchStoppedError(self._received[0])

    def _sleep(self, seconds: float) -> bool:
        """Wait for a signal or the exit of a service. Return False if ``seconds`` have passed first."""
        # select() cannot wait for descriptors above 1023, and there may be thousands.
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        for end in filter(None, (service.end for service in self._services)):
            poll.register(end, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]
        if self._wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wakeup, 4096):
                    pass
        for service in self._services:
            service.returncode  # noqa: B018 - reaps the service, so that the next poll does not return for it
        return bool(ready)


def _running(pids: Collection[int]) -> set[psutil.Process]:
    import psutil

    processes = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.add(psutil.Process(pid))
    return processes


@contextlib.contextmanager
def _guard(marker: str) -> Iterator[None]:
    """Run the guard within the block. It ends the run if this process is killed."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, marker],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={key: value for key, value in os.environ.items() if f"{key}={value}" != marker},
        # Signals to the launcher's process group or terminal must not reach the guard.
        start_new_session=True,
    ):
        yield  # Afterwards, the guard's standard input is closed, and the guard ends.


@contextlib.contextmanager
def _wakeup_pipe() -> Iterator[int]:
    """Yield a descriptor that becomes readable on each signal. It wakes a ``poll`` that begins just after."""
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
    """Return the last non-empty lines of a text file, without colours."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Lines that underline code in a traceback are left out, because they leave too little room for the rest.
    kept = [line.rstrip() for line in without_colours(text).splitlines() if line.strip(" ^~")]
    return "\n".join(kept[-lines:])


def without_colours(text: str) -> str:
    """Return ``text`` without the escape sequences for colours."""
    return _ANSI.sub("", text)


def last_traceback(path: Path) -> str:
    """Return the last traceback in a log, or an empty text."""
    try:
        tracebacks = _TRACEBACK.findall(path.read_text(errors="replace"))
    except OSError:
        return ""
    return tracebacks[-1] if tracebacks else ""


def new_lines(log: trace.Follower) -> list[str]:
    """Return the lines that were added to a log since the last call, without colours."""
    return [without_colours(line.decode(errors="replace")).rstrip("\r") for line in log.read_lines()]
