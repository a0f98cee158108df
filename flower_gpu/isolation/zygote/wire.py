"""Messages between caller, zygote and workers: short ones in a packet, long ones in a memory file."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from flower_gpu.isolation.forkserver import sockets

_MAX_PACKET = 32768  # bytes
_IN_FILE = {"in_file": True}


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; what JSON has not becomes text.

    Raises
    ------
    Gone
        If the other end has closed.
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

    Raises
    ------
    Gone
        If the other end has closed, or sends something else.
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
