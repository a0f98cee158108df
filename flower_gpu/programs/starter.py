"""The requests of a process that starts Flower's programs: to a server that forks them, otherwise by Popen.

A process requests programs by :class:`Programs`, which has a connection to the server. For Flower's own code,
:class:`Subprocess` takes the place of the module ``subprocess``, and :class:`ProgramHandle` that of a
``Popen`` object.

Any thread may call ``Programs.start``. A lock covers the request and its answer, because all threads share
one connection. Each request has a socket pair of its own. The server sends the process id over it at once,
and the exit status when the program has ended. The program keeps the server's end open as well.

The server may be killed while its programs run. Then a handle reads the end of the file instead of a status.
From there on it watches the program itself, by a pidfd. The exit status is then known only if this process
has adopted the program; otherwise it is ``UNKNOWN``.

If the server refuses a request, does not answer in time or has ended, ``start`` returns None and the caller
starts the program by Popen. The reason of the first such case is printed.
"""

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

# An additional argument of the server. Its forks write their titles over the memory of the server's
# arguments, and their own command lines may be longer.
_TITLE: Final = " " * 4000
# Limit for an answer. The server answers after its imports, which take long on a busy machine.
_ANSWER_S: Final = 120.0
# Options of Popen that a request supports.
_OPTIONS: Final = {"start_new_session", "stdout", "stderr"}


def say_slow(reason: str) -> None:
    """Print that Flower's programs are started without a server, and why."""
    standard_streams.tell(f"flower-gpu: Flower's programs are started one by one, which is slower: {reason}")


def is_flowers(name: str) -> bool:
    """Return True if a command belongs to Flower, judged by its name."""
    return name == "flwr" or name.startswith(("flower-super", "flwr-"))


class ProgramHandle:
    """A program that a server has forked, with the parts of :class:`subprocess.Popen` that Flower uses."""

    def __init__(self, argv: Sequence[str], pid: int, reply_socket: socket.socket) -> None:
        self.args = argv
        self.pid = pid
        self.returncode: int | None = None
        self._reply_socket = reply_socket
        # Descriptor of the program, if the server has ended and so cannot report the program's end.
        self._pidfd = -1

    def fileno(self) -> int:
        """Return a descriptor that is readable when the program has ended; -1 after its end was noticed."""
        return self._reply_socket.fileno() if self._pidfd < 0 else self._pidfd

    def poll(self) -> int | None:
        """Return the exit status (``-n`` for signal ``n``), or None while the program runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the program's end and return its exit status; raises TimeoutExpired."""
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the program a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the program to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the program (SIGKILL)."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and self._pidfd < 0 and messages.can_be_read(self.fileno(), timeout_s):
            try:
                self.returncode = int(messages.receive(self._reply_socket)[0]["status"])
            except messages.Gone:
                self._watch_itself()
            self._reply_socket.close()
        if self.returncode is None and self._pidfd >= 0 and messages.can_be_read(self._pidfd, timeout_s):
            # If this process has adopted the server's children, it can read their exit statuses.
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self.returncode = UNKNOWN
            os.close(self._pidfd)
            self._pidfd = -1
        return self.returncode

    def _watch_itself(self) -> None:
        """Watch the program in place of its server. It may run on, or it may be impossible to kill."""
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # the program has ended, too, and another process has read its status
            self.returncode = UNKNOWN


class Programs:
    """A connection to a server that starts programs.

    ``process``: the server, if it is a child of this process.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._connection: socket.socket | None = connection
        self._process = process
        self._lock = threading.Lock()
        #: Why the last request was refused. The reason of the first refusal is printed.
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
        """Start a program; return its process id, and the socket that will receive its exit status.

        Returns None if the caller has to start the program in another way.
        ``argv``: name of the program, which is looked up on the ``PATH`` of ``env``, and its arguments.
        ``group``: process group; 0 for a new group, None for a new session.
        ``kept``: descriptors that stay open in the program.
        """
        with self._lock, ExitStack() as stack:
            if self._connection is None:
                return None
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            reply_socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            message = {"argv": list(argv), "env": dict(env), "group": group}
            try:
                with end:
                    descriptors = [stdin, stdout, stderr, folder, end.fileno(), *kept]
                    messages.send(self._connection, message, descriptors)
                if not messages.can_be_read(reply_socket.fileno(), _ANSWER_S):
                    raise messages.Gone(f"no answer within {_ANSWER_S:g} s")
                result = messages.receive(reply_socket)[0]
            except messages.Gone as error:
                result = {"refused": str(error)}
                self._connection.close()
                self._connection = None
            if "pid" in result:
                return result["pid"], reply_socket
            reply_socket.close()
            is_first = not self.reason
            self.reason = result["refused"]
            if is_first:
                say_slow(self.reason)
            return None

    def close(self) -> None:
        """Close the connection. A server ends when its first connection is closed. Its programs run on."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def reap(self) -> None:
        """Reap the server if it has ended. Code that killed the server may have reaped it before."""
        if self._process is not None:
            self._process.poll()


def start_server(env: Mapping[str, str], log: Path) -> Programs:
    """Start a server as a child of this process. The first request waits until it has imported Flower.

    ``env``: all environment variables of the server. Variables that Python and Flower read when they start
    must be the same for each program.
    ``log``: file to which its output is appended.
    """
    command = fresh_interpreter("flower_gpu.programs.server:main", [entry for entry in sys.path if entry])
    our_end, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with their_end, log.open("ab") as output:
        process = subprocess.Popen(
            [*command, _TITLE],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**env, **ONE_THREAD, CONNECTION_VARIABLE: str(their_end.fileno())},
            process_group=0,  # out of reach of a terminal's Ctrl-C
            pass_fds=(their_end.fileno(),),
        )
    return Programs(our_end, process)


class Subprocess:
    """A replacement for the module ``subprocess`` in those modules of Flower that start Flower's programs."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def Popen(self, args: Sequence[str], **options: Any) -> Any:  # noqa: N802 - its name there
        """Start a program by the server, otherwise by Popen."""
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
            with suppress(AttributeError, ValueError):  # the stream is None or closed
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
