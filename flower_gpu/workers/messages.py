"""Messages over a socket between callers, workers and fork servers: JSON, with descriptors."""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flower_gpu.polling import readable
from flower_gpu.workers import memory_files

_MAX_MESSAGE = 65536  # bytes
_MAX_PACKET = 32768  # what is larger travels in a memory file: environments may be long
#: Of a message in a memory file. Nested JSON takes 22 times as much of the reader's memory.
MOST_FILE_BYTES = 8 << 20
_IN_FILE = {"in_file": True}
_encode = json.JSONEncoder(default=str).encode  # made once: json.dumps makes a new one for each message
_SPACE = socket.CMSG_SPACE(16 * 4)  # for so many descriptors
# As numbers: each operation on the flags themselves takes a microsecond, and each message has some.
_CLOEXEC, _CUT = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0)), int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
#: What a server tells callers that wait in line: it does not hang, it serves other callers first.
BUSY: dict[str, Any] = {"busy": True}


class Gone(Exception):  # noqa: N818 - not an error: another server is found or started
    """The other end is not there any more, or does not answer."""


class NotAMessage(Gone):
    """The other end has sent something else."""


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end; of the listening process, for a client."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for messages."""
    kind = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
    return socket.socketpair(socket.AF_UNIX, kind)


def is_closed(connection: socket.socket) -> bool:
    """Tell whether the other end is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    return bool(poll.poll(0))


def can_be_read(descriptor: int, timeout_s: float | None) -> bool:
    """Wait for something to read, or the other end's end; None: as long as it takes."""
    return bool(readable([descriptor], timeout_s))


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message, with descriptors for the other end; what JSON has not becomes text.

    Raises Gone if the other end has closed, or takes nothing.
    """
    data = _encode(message).encode()
    if len(data) <= _MAX_PACKET:
        _send_packet(connection, data, descriptors)
        return
    file = _written(data)
    try:
        _send_packet(connection, _encode(_IN_FILE).encode(), [*descriptors, file])
    finally:
        os.close(file)


def memory_file(message: Mapping[str, Any]) -> int:
    """Write something into a new memory file, for :func:`read_memory_file`; return its descriptor."""
    return _written(_encode(message).encode())


def _written(data: bytes) -> int:
    file = memory_files.create("flower-gpu-message")
    try:
        memory_files.write(file, data, 0)
    except BaseException:
        os.close(file)
        raise
    return file


def _send_packet(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        connection.sendmsg([data], rights if descriptors else [])
    except OSError as error:
        raise Gone(str(error)) from error


def receive(connection: socket.socket, most_bytes: int = MOST_FILE_BYTES) -> tuple[dict[str, Any], list[int]]:
    """Wait for one message, and the descriptors that came with it.

    ``most_bytes``: limit of a message that comes in a memory file.

    Raises Gone if the other end has closed, or does not answer in time; NotAMessage if it sends something
    else.
    """
    try:
        data, ancillary, flags, _ = connection.recvmsg(_MAX_MESSAGE, _SPACE, _CLOEXEC)
    except OSError as error:
        raise Gone(str(error) or type(error).__name__) from error
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    try:
        message = json.loads(data)
        if message == _IN_FILE:
            message = read_memory_file(descriptors.pop(), most_bytes)
        if not isinstance(message, dict) or flags & _CUT:
            raise ValueError
    except (ValueError, IndexError, OSError, RecursionError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise (NotAMessage("not a message") if data else Gone("the connection was closed")) from None
    return message, list(descriptors)


def read_memory_file(file: int, most_bytes: int = MOST_FILE_BYTES) -> Any:
    """Read a file of :func:`memory_file`, and close it."""
    try:
        size = os.fstat(file).st_size
        if size > most_bytes:
            raise ValueError(f"a message of {size} bytes")
        return json.loads(os.pread(file, size, 0))
    finally:
        os.close(file)


def receive_answer(connection: socket.socket, in_line: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Wait for the answer to a message, however many others the server answers before.

    ``in_line``: is called now and then while others have their turn; may raise.
    Raises Gone: as of :func:`receive`; it is the server's silence that counts, not the length of the line.
    """
    while True:
        message, descriptors = receive(connection)
        for descriptor in descriptors:
            os.close(descriptor)
        if message != BUSY:
            return message
        in_line()
