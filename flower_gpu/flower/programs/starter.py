"""Who has programs started: by a request to a server, else by Popen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from flower_gpu import standard_streams
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver.identity import fresh_interpreter
from flower_gpu.workers.interpreter import UNKNOWN
from flower_gpu.workers.threads import ONE_THREAD

#: Environment variable with the descriptor of a server's first connection.
CONNECTION_VARIABLE: Final = "FLOWER_GPU_PROGRAMS"

# Its forks write what they are where their arguments were, and may have more of them.
_TITLE: Final = " " * 4000
#: What the server imports takes its time on a busy machine.
_ANSWER_S: Final = 120.0
_OPTIONS: Final = {"start_new_session", "stdout", "stderr"}  # of Popen, that a request can have


def say_slow(reason: str) -> None:
    """Say that a program of Flower's is started as without a server."""
    standard_streams.tell(f"flower-gpu: Flower's programs are started one by one, which is slower: {reason}")


def is_flowers(name: str) -> bool:
    """Tell whether a command is one of Flower's, by its name."""
    return name == "flwr" or name.startswith(("flower-super", "flwr-"))


class ProgramHandle:
    """A program that a server has forked, as far as Flower uses :class:`subprocess.Popen`."""

    def __init__(self, argv: Sequence[str], pid: int, answer: socket.socket) -> None:
        self.args = argv
        self.pid = pid
        self.returncode: int | None = None
        self._answer = answer
        self._pidfd = -1  # once the server is gone, which would have told the program's end

    def fileno(self) -> int:
        """Return a descriptor that can be read when it has ended; -1 once that was seen."""
        return self._answer.fileno() if self._pidfd < 0 else self._pidfd

    def poll(self) -> int | None:
        """Return the exit status (``-n`` for signal ``n``), None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises TimeoutExpired."""
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and self._pidfd < 0 and messages.can_be_read(self.fileno(), timeout_s):
            try:
                self.returncode = int(messages.receive(self._answer)[0]["status"])
            except messages.Gone:
                self._watch_itself()
            self._answer.close()
        if self.returncode is None and self._pidfd >= 0 and messages.can_be_read(self._pidfd, timeout_s):
            # Perhaps this process has adopted the server's children.
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self.returncode = UNKNOWN
            os.close(self._pidfd)
            self._pidfd = -1
        return self.returncode

    def _watch_itself(self) -> None:
        """Watch the program, which may run on, or be one that cannot be killed, in place of its server."""
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # it has ended, too, and somebody else has its status
            self.returncode = UNKNOWN


class Programs:
    """Has programs started by the server at the other end of a connection.

    ``process``: that server, if it is a child of this process.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._connection: socket.socket | None = connection
        self._process = process
        self._lock = threading.Lock()
        #: Why the last request was refused; that of the first is said.
        self.reason = ""

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
        group: int | None = 0,
        kept: Sequence[int] = (),
    ) -> tuple[int, socket.socket] | None:
        """Have a program started; return its process id, and the socket that tells its exit status.

        None where it has to be started in another way. ``argv``: its name, which is looked for on the
        ``PATH`` of ``env``, and its arguments. ``group``: its process group; 0 for one of its own, None for a
        session of its own. ``kept``: descriptors that stay open in it.
        """
        with self._lock, ExitStack() as stack:
            if self._connection is None:
                return None
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            answer, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            message = {"argv": list(argv), "env": dict(env), "group": group}
            try:
                with end:
                    given = [stdin, stdout, stderr, folder, end.fileno(), *kept]
                    messages.send(self._connection, message, given)
                if not messages.can_be_read(answer.fileno(), _ANSWER_S):
                    raise messages.Gone(f"no answer within {_ANSWER_S:g} s")
                said = messages.receive(answer)[0]
            except messages.Gone as error:
                said = {"refused": str(error)}
                self._connection.close()
                self._connection = None
            if "pid" in said:
                return said["pid"], answer
            answer.close()
            is_first = not self.reason
            self.reason = said["refused"]
            if is_first:
                say_slow(self.reason)
            return None

    def close(self) -> None:
        """Ask for no more. A server whose first connection this is ends; its programs go on."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def reap(self) -> None:
        """Take the exit status of a server that has ended. Whoever has killed it may have taken it before."""
        if self._process is not None:
            self._process.poll()


def start_server(env: Mapping[str, str], log: Path) -> Programs:
    """Start a server, a child of this process; the first request waits until it has imported Flower.

    ``env``: all its environment variables: what Python and Flower read of them when they start must be the
    same for each program.
    ``log``: where its output goes.
    """
    command = fresh_interpreter(
        "flower_gpu.flower.programs.server:main", [entry for entry in sys.path if entry]
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            [*command, _TITLE],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**env, **ONE_THREAD, CONNECTION_VARIABLE: str(theirs.fileno())},
            process_group=0,  # out of reach of a terminal's Ctrl-C
            pass_fds=(theirs.fileno(),),
        )
    return Programs(ours, process)


class Subprocess:
    """The module ``subprocess`` for modules of Flower's that start programs of Flower's."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def Popen(self, args: Sequence[str], **options: Any) -> Any:  # noqa: N802 - its name there
        """Have it started by the server, else start it."""
        started = self._forked(args, **options) if options.keys() <= _OPTIONS else None
        return subprocess.Popen(args, **options) if started is None else ProgramHandle(args, *started)

    def _forked(
        self,
        args: Sequence[str],
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
    ) -> tuple[int, socket.socket] | None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):  # there is none, or it is closed
                stream.flush()
        with open(os.devnull, "wb") as null:
            numbers = {None: None, subprocess.DEVNULL: null.fileno()}
            if stdout not in numbers or stderr not in numbers:
                return None
            return self._programs.start(
                args,
                os.environ,
                stdout=numbers[stdout] or 1,
                stderr=numbers[stderr] or 2,
                group=None if start_new_session else os.getpgrp(),
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)
