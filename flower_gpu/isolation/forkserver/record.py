"""What is said between a caller and its fork server that is too long for a message."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

_MAX_BYTES = 1 << 26
_MAX_TEXT = 4000  # of an error, in bytes: a pipe takes it without a reader

#: What a server that can be connected to writes to the process that started it; anything else is an error.
READY = b"ready"


@dataclass(frozen=True)
class Start:
    """How a fork server was asked for.

    Parameters
    ----------
    name : str
        Its socket's name.
    idle_s : float
        Seconds after which it ends when nobody uses it.
    without : list of str
        Libraries that it must not have.
    preload : list of [str, dict]
        Functions of the user's to call once, with their keyword arguments.
    """

    name: str
    idle_s: float
    without: list[str]
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

    Raises
    ------
    ValueError
        If it is something else.
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
