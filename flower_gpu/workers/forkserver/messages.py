"""What callers, fork servers and workers send each other, and what a server keeps of a connection."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.workers.forkserver import sockets

_MAX_BYTES = 1 << 26
_MAX_TEXT = 4000  # of an error, in bytes: a pipe takes it without a reader

#: What a server that can be connected to writes to the process that started it; anything else is an error.
READY = b"ready"


@dataclass(frozen=True)
class Start:
    """How a fork server was asked for."""

    name: str  # its socket's name
    idle_s: float  # seconds after which it ends when nobody uses it
    without: list[str]  # libraries that it must not have
    # Functions of the user's to call once, with their keyword arguments
    preload: list[Any] = field(default_factory=list)


def write_record(record: dict[str, Any]) -> int:
    """Return the descriptor of a memory file with ``record``: environments may be long, and are secret."""
    descriptor = os.memfd_create("flower-gpu-record", os.MFD_CLOEXEC)
    try:
        data = memoryview(json.dumps(record).encode())
        while data:
            data = data[os.write(descriptor, data) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_record(descriptor: int) -> dict[str, Any]:
    """Read what :func:`write_record` wrote.

    Raises ValueError if it is something else.
    """
    size = os.fstat(descriptor).st_size
    if size > _MAX_BYTES:
        raise ValueError(f"a record of {size} bytes")
    record = json.loads(os.pread(descriptor, size, 0))
    if not isinstance(record, dict):
        raise ValueError("not a record")
    return record


def describe(error: BaseException) -> bytes:
    """Return the text of an error for the process that wanted the server."""
    return f"{type(error).__name__}: {error}".encode(errors="replace")[:_MAX_TEXT]


@dataclass
class Session:
    """One connection: a call, or a process that says it may have more of them."""

    connection: socket.socket  # to the caller
    caller: int  # the process at its other end
    # What the caller wants; empty before it has said so
    record: dict[str, Any] = field(default_factory=dict)
    folder: int = -1  # descriptor of the caller's working directory, or -1
    pid: int = -1  # the worker, or -1
    imported: int = -1  # memory file in which the worker tells what it had to import, or -1
    stays: bool = False  # whether this is no call, but a process that may have some

    def close(self) -> None:
        """Let go of all descriptors."""
        self.connection.close()
        for descriptor in (self.folder, self.imported):
            if descriptor >= 0:
                os.close(descriptor)
        self.folder = self.imported = -1


_MAX_PACKET = 32768  # bytes
_IN_FILE = {"in_file": True}


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; what JSON has not becomes text.

    Raises Gone if the other end has closed.
    """
    data = json.dumps(message, default=str).encode()
    if len(data) <= _MAX_PACKET:
        sockets.send_bytes(connection, data, descriptors)
        return
    file = os.memfd_create("flower-gpu-message", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        sockets.send_bytes(connection, json.dumps(_IN_FILE).encode(), [*descriptors, file])
    finally:
        os.close(file)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for one message, and the descriptors that came with it.

    Raises Gone if the other end has closed, or sends something else.
    """
    message, descriptors = sockets.receive(connection)
    if message != _IN_FILE:
        return message, descriptors
    file = descriptors.pop()
    try:
        with open(file, "rb", buffering=0, closefd=False) as content:
            content.seek(0)
            found = json.loads(content.read())
    finally:
        os.close(file)
    return found, descriptors
