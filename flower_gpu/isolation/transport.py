"""Arguments and results between processes, in memory files.

A memory file has no name, so nothing can be left behind: the kernel frees it with its last holder.
Small things travel as a pickle, arrays beside it as they lie in memory (pickle protocol 5, out of band).
"""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import cloudpickle

from flower_gpu.errors import WorkerError

# magic, bytes of the pickle, number of arrays; then the arrays' sizes, the pickle, the arrays
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"flwrgpu1"
_ALIGNMENT = 4096  # a page, so that an array can be mapped where it lies; smaller ones go into the pickle


def create(name: str) -> int:
    """Return the descriptor of a new, empty memory file; not inherited by other programs."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:  # macOS: already unlinked
        return os.dup(file.fileno())


def write_request(value: Any, descriptor: int) -> None:
    """Write ``value`` into an empty memory file for a worker."""
    _write_file(descriptor, *_pickled(cloudpickle.dumps, value))


def read_request(descriptor: int) -> Any:
    """Read, in a worker, what :func:`write_request` wrote."""
    return load(descriptor)


def write_reply(value: Any, descriptor: int) -> None:
    """Write ``value`` into an empty memory file for the caller of this worker."""
    _write_file(descriptor, *_pickled_to_caller(value))


def read_reply(descriptor: int, request: int = -1) -> Any:
    """Read, in the caller, what the worker wrote; ``request`` is the memory file that it was given."""
    return load(descriptor)


def _write_file(descriptor: int, head: bytes, views: list[memoryview]) -> None:
    sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    offset = _write(descriptor, _HEADER.pack(_MAGIC, len(head), len(views)) + sizes + head, 0)
    for view in views:
        offset = _write(descriptor, view, _aligned(offset))


def _pickled_to_caller(value: Any) -> tuple[bytes, list[memoryview]]:
    # By name where possible: a fork's __main__ is the caller's, which then gets its own classes back.
    # A spawned worker has what the caller's __main__ defines by value only, and so returns it.
    try:
        return _pickled(pickle.dumps, value)
    except OSError:
        raise
    except Exception:
        return _pickled(cloudpickle.dumps, value)


def _pickled(dumps: Callable[..., bytes], value: Any) -> tuple[bytes, list[memoryview]]:
    views: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _ALIGNMENT:
            return True  # keep it in the pickle
        views.append(view)
        return False

    return dumps(value, protocol=5, buffer_callback=take), views


def load(descriptor: int) -> Any:
    """Read what was written; arrays come back writable, except those that were read-only.

    Raises
    ------
    WorkerError
        If the file is empty or incomplete (the writer died while writing).
    """
    magic, head_size, count = _HEADER.unpack(_read(descriptor, _HEADER.size, 0))
    if magic != _MAGIC:
        raise WorkerError("a memory file between worker and caller holds something else")
    offset = _HEADER.size
    sizes = struct.unpack(f"<{count}Q", _read(descriptor, 8 * count, offset))
    offset += 8 * count
    head = _read(descriptor, head_size, offset)
    offset += head_size
    buffers = []
    for size in sizes:
        offset = _aligned(offset)
        buffers.append(_read(descriptor, size, offset))
        offset += size
    return pickle.loads(head, buffers=buffers)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    view = memoryview(data)
    while view:  # one call writes at most just under 2 GiB
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
    return offset


def _read(descriptor: int, size: int, offset: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise WorkerError("a memory file between worker and caller ends too early")
        view = view[count:]
        offset += count
    return data
