"""Looking at this user's fork servers, having them stay, and ending them."""

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

_PROGRAM = b"flower_gpu.workers.forkserver"  # in the command line of each
_ANSWER_S = 5.0
_TRIES = 3
_END_POLL_S = 0.02


@dataclass(frozen=True)
class Status:
    """What a fork server says of itself."""

    name: str  # its name; two servers differ in what a fork inherits from them
    pid: int  # its process
    version: str  # of this package
    python: str  # the interpreter
    uptime_s: float  # seconds since it was started
    calls: int  # workers it has forked
    workers: list[str]  # the calls that run now
    users: int  # processes that have used it and may again
    libraries: list[str]  # what it has learned to import
    refused: list[str]  # what it must not import
    preload: list[str]  # the functions whose data it holds
    memory_bytes: int  # its proportional share (PSS) of the memory it uses, or 0 where that is unknown


def status() -> list[Status]:
    """Ask all running fork servers of this user."""
    found = []
    for name in _names():
        answer = _ask(name, {"op": "status"})
        if answer is not None:
            found.append(Status(name=name, memory_bytes=_pss_bytes(answer["pid"]), **answer))
    return found


def stop(*, if_unused: bool = False, wait_s: float = 0.0) -> list[int]:
    """Have fork servers of this user end, once their workers have; return their process ids."""
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
    """Return those of these processes that have not ended."""
    return [pid for pid in pids if is_running(pid)]


def family() -> set[int]:
    """Return the pids of fork servers and their forks, as far as this user may see them."""
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if is_forked(int(path.name))}


def is_forked(pid: int) -> bool:
    """Tell whether this is a fork server, or a fork of one."""
    try:
        return _PROGRAM in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _names() -> list[str]:
    try:
        return sockets.names()
    except (ConfigError, OSError):  # no folder that could be trusted: then no server is started either
        return []


def _ask(name: str, message: dict[str, Any]) -> dict[str, Any] | None:
    for _ in range(_TRIES):
        try:
            connection = sockets.connect(name, _ANSWER_S)
        except Gone:
            return None
        with connection, suppress(Gone):  # another server takes its place at this moment
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
    """The fork servers that this process has asked to stay; each does until this process is gone.

    ``connections``: by the server's name; open as long as it is to stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connections: dict[str, socket.socket] = {}

    def ask(self, name: str) -> None:
        """Ask server ``name``, where it runs, unless it has been asked."""
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
        """Ask the one that a process with this environment uses first."""
        self.ask(identity.server_name(os.environ, (), ()))

    def close(self) -> None:
        """Let go of them."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
