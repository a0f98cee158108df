"""Processes that start in an instant: forks of one that has imported what they need.

A script calls :func:`serve` with what each of its processes does. :class:`Forked` starts such a process with
variables of its own, on a stub host too, and talks to it in lines.
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
WAIT_S = 60  # for what should take an instant; the machine may be busy


@cache
def _server(script: Path) -> socket.socket:
    """Start what processes are forked from; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    subprocess.Popen([sys.executable, str(script)], stdin=theirs, env={**os.environ, "PYTHONPATH": path})
    theirs.close()
    return ours


def serve(main: Callable[[], object]) -> None:
    """Fork a process for each message on the socket that is stdin: its variables, stdin and stdout."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever is killed is gone at once, and no zombie
    with socket.socket(fileno=os.dup(0)) as asked:
        while True:
            variables, files, _, _ = socket.recv_fds(asked, 1 << 20, 2)
            if not variables:
                return
            pid = os.fork()
            if pid == 0:
                break
            for descriptor in files:
                os.close(descriptor)
            asked.send(b"%d" % pid)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(json.loads(variables))
    # Of the stub host: a library that is loaded is found by its name.
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
        self._process = os.pidfd_open(self.pid)  # its number may be another one's when it is gone
        self._left = b""
        os.close(stdin)
        os.close(stdout)

    def write(self, line: str) -> None:
        os.write(self._in, f"{line}\n".encode())

    def has_answer(self) -> bool:
        """Tell whether there is something to read."""
        return bool(self._left or readable([self._out], 0))

    def read(self) -> str:
        """Wait for a line."""
        deadline = time.monotonic() + WAIT_S
        while b"\n" not in self._left:
            ready = readable([self._out], max(0.0, deadline - time.monotonic()))
            data = os.read(self._out, 65536) if ready else b""
            if not data:
                raise AssertionError("it ended" if ready else "no answer")
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        readable([self._process], WAIT_S)

    def close(self) -> None:
        self.kill()
        for descriptor in (self._process, self._in, self._out):
            os.close(descriptor)
