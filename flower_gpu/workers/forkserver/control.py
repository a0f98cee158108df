"""Functions to list this user's fork servers, keep them running, and end them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_gpu.errors import ConfigError
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver import identity, sockets
from flower_gpu.workers.life import is_running
from flower_gpu.workers.messages import Gone

# Part of the command line of each fork server
_PROGRAM = b"flower_gpu.workers.forkserver"
_ANSWER_S = 5.0
_TRIES = 3
_END_POLL_S = 0.02


@dataclass(frozen=True)
class Status:
    """The state of a fork server, as reported by the server."""

    name: str  # hash of the identity, which is the same for all callers of the server
    pid: int  # process id
    version: str  # version of this package
    python: str  # path of the interpreter
    uptime_s: float  # seconds since its start
    calls: int  # number of workers forked so far
    workers: list[str]  # labels of the running calls
    users: int  # number of processes that keep it running for further calls
    libraries: list[str]  # top-level names of the libraries it has learned to import
    refused: list[str]  # top-level names of the libraries it does not import
    preload: list[str]  # names of the preload functions it has called
    memory_bytes: int  # proportional share (PSS) of its memory; 0 if unknown


def status() -> list[Status]:
    """Return the state of each running fork server of this user."""
    servers = []
    for name in _names():
        answer = _ask(name, {"op": "status"})
        if answer is not None:
            servers.append(Status(name=name, memory_bytes=_pss_bytes(answer["pid"]), **answer))
    return servers


def stop(*, if_unused: bool = False, wait_s: float = 0.0) -> list[int]:
    """Tell fork servers of this user to end when their workers have exited. Return their process ids.

    ``if_unused``: True spares servers that have callers.
    ``wait_s``: seconds to wait for the servers to end.
    """
    pids = []
    for name in _names():
        answer = _ask(name, {"op": "stop", "if_unused": if_unused})
        if answer is not None and answer["stopping"]:
            pids.append(answer["pid"])
    deadline = time.monotonic() + wait_s
    while still_running(pids) and time.monotonic() < deadline:
        time.sleep(_END_POLL_S)
    return pids


def still_running(pids: Iterable[int]) -> list[int]:
    """Return the processes in ``pids`` that have not exited."""
    return [pid for pid in pids if is_running(pid)]


def family() -> set[int]:
    """Return the pids of all fork servers and their forks that this user may see."""
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if is_forked(int(path.name))}


def is_forked(pid: int) -> bool:
    """Return True if the process is a fork server, or a fork of a fork server."""
    try:
        return _PROGRAM in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _names() -> list[str]:
    try:
        return sockets.names()
    except (ConfigError, OSError):
        # Without a safe folder, no server is started either.
        return []


def _ask(name: str, message: dict[str, Any]) -> dict[str, Any] | None:
    for _ in range(_TRIES):
        try:
            connection = sockets.connect(name, _ANSWER_S)
        except Gone:
            return None
        # A successor may be taking over at this moment. Then try again.
        with connection, suppress(Gone):
            messages.send(connection, message)
            return messages.receive_answer(connection)
    return None


def _pss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


_STAY_ANSWER_S = 20.0


class Stays:
    """The fork servers that this process has asked to keep running until this process ends.

    Any thread may call :meth:`ask`.

    ``connections``: open connections by the name of the server. A server keeps running while its connection
    is open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connections: dict[str, socket.socket] = {}

    def ask(self, name: str) -> None:
        """Ask the server ``name`` to keep running, unless it has ended or was already asked."""
        with self._lock:
            connection = self.connections.get(name)
            if connection is not None:
                if not messages.is_closed(connection):
                    return
                self.connections.pop(name).close()
            with suppress(Gone):
                connection = sockets.connect(name, _STAY_ANSWER_S)
                try:
                    messages.send(connection, {"op": "stay"})
                    messages.receive_answer(connection)
                except Gone:
                    connection.close()
                else:
                    self.connections[name] = connection

    def ask_own(self) -> None:
        """Ask the server to keep running that a process with this environment tries first."""
        self.ask(identity.server_name(os.environ, (), ()))

    def close(self) -> None:
        """Close all connections, so that the servers need not keep running."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
