"""Messages over a socket between callers, workers and fork servers: JSON, with descriptors.

Each message is one packet, which the kernel sends as a whole, so several threads may send without a lock. A
long message travels in a memory file, whose descriptor goes with the packet. If a socket breaks, the
reader gets :class:`Gone`, and finds or starts another process.
"""

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
# Longer messages travel in a memory file, because environments may be long.
_MAX_PACKET = 32768
#: Limit of a message in a memory file. Nested JSON takes 22 times as much memory in the reader.
MOST_FILE_BYTES = 8 << 20
_IN_FILE = {"in_file": True}
# The encoder is made once, because json.dumps makes a new one for each message.
_encode = json.JSONEncoder(default=str).encode
_SPACE = socket.CMSG_SPACE(16 * 4)  # space for 16 descriptors
# Plain numbers, because an operation on the flags takes a microsecond, and each message has several.
_CLOEXEC, _CUT = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0)), int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
#: Message of a server to callers that wait in line. The server does not hang, but serves other callers first.
BUSY: dict[str, Any] = {"busy": True}


class Gone(Exception):  # noqa: N818 - not an error: another server is found or started
    """The other end has closed the connection, or does not answer."""


class NotAMessage(Gone):
    """The other end has sent data that is not a message."""


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end. For a client, this is the listening process."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for messages."""
    kind = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
    return socket.socketpair(socket.AF_UNIX, kind)


def is_closed(connection: socket.socket) -> bool:
    """Return True if the other end is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    return bool(poll.poll(0))


def can_be_read(descriptor: int, timeout_s: float | None) -> bool:
    """Return True once there is data or the other end closes; False after ``timeout_s`` (None: no limit)."""
    return bool(readable([descriptor], timeout_s))


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message, with descriptors for the other end. Values that JSON lacks become strings.

    Raises Gone if the other end has closed, or accepts no data.
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
    """Write a message into a new memory file for :func:`read_memory_file`, and return its descriptor."""
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
    """Wait for one message, and return it with the descriptors that came with it.

    ``most_bytes``: limit for a message in a memory file, in bytes.

    Raises Gone if the other end has closed, or does not answer in time.
    Raises NotAMessage if it sends other data.
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
    """Return the message in a file from :func:`memory_file`, and close the file."""
    try:
        size = os.fstat(file).st_size
        if size > most_bytes:
            raise ValueError(f"a message of {size} bytes")
        return json.loads(os.pread(file, size, 0))
    finally:
        os.close(file)


def receive_answer(connection: socket.socket, in_line: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Wait for the answer to a message while the server serves other callers first, and return it.

    ``in_line``: called at intervals while other callers are served; may raise an exception.
    Raises Gone if the server has closed or is silent for too long. The length of the line does not count.
    """
    while True:
        message, descriptors = receive(connection)
        for descriptor in descriptors:
            os.close(descriptor)
        if message != BUSY:
            return message
        in_line()
