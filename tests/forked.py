"""Processes that start instantly, because they are forks of a process that has already imported everything.

A script calls :func:`serve` with the function that each of its processes runs. :class:`Forked` starts such a
process with its own environment variables, also on a stub host, and exchanges lines with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from flower_gpu.polling import readable

TESTS = Path(__file__).parent
#: Limit in seconds for operations that are usually instant, because the machine may be busy.
WAIT_S = 60


@cache
def _server(script: Path) -> socket.socket:
    """Start the process that the others are forked from. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    subprocess.Popen([sys.executable, str(script)], stdin=theirs, env={**os.environ, "PYTHONPATH": path})
    theirs.close()
    return ours


def serve(main: Callable[[], object]) -> None:
    """Fork a process for each message on the socket at stdin.

    A message has the environment variables of the process, and the descriptors of its stdin and stdout.
    """
    # With SIGCHLD ignored, a killed child disappears at once instead of becoming a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            variables, files, _, _ = socket.recv_fds(requests, 1 << 20, 2)
            if not variables:
                return
            pid = os.fork()
            if pid == 0:
                break
            for descriptor in files:
                os.close(descriptor)
            requests.send(b"%d" % pid)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(json.loads(variables))
    # Load the stub host's library here. Later loads by name then find the library that is already loaded.
    ctypes.CDLL(f"{os.environ['LD_LIBRARY_PATH'].partition(':')[0]}/libnvidia-ml.so.1")
    main()


class Forked:
    """A process that reads lines and writes lines."""

    def __init__(self, script: Path, env: Mapping[str, str]) -> None:
        stdin, self._in = os.pipe()
        self._out, stdout = os.pipe()
        server = _server(script)
        socket.send_fds(server, [json.dumps({**os.environ, **env}).encode()], [stdin, stdout])
        self.pid = int(server.recv(100))
        # A pidfd stays valid after the exit, while the pid may be reused.
        self._process = os.pidfd_open(self.pid)
        self._unread = b""
        os.close(stdin)
        os.close(stdout)

    def write(self, line: str) -> None:
        os.write(self._in, f"{line}\n".encode())

    def has_answer(self) -> bool:
        """Return True if the process has written output that was not read yet."""
        return bool(self._unread or readable([self._out], 0))

    def read(self) -> str:
        """Wait for the next line of output, and return it."""
        deadline = time.monotonic() + WAIT_S
        while b"\n" not in self._unread:
            ready = readable([self._out], max(0.0, deadline - time.monotonic()))
            data = os.read(self._out, 65536) if ready else b""
            if not data:
                raise AssertionError("the process ended" if ready else "no line within the limit")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """Kill the process, and wait until it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        readable([self._process], WAIT_S)

    def close(self) -> None:
        self.kill()
        for descriptor in (self._process, self._in, self._out):
            os.close(descriptor)
