"""Arguments and results between processes, in memory files.

A memory file has no name, so nothing can be left behind: the kernel frees it with its last holder.
Small things travel as a pickle, arrays beside it as they lie in memory (pickle protocol 5, out of band).
"""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from typing import Any

import cloudpickle

from flower_gpu.errors import WorkerError

# magic, bytes of the pickle, number of arrays; then the arrays' sizes, the pickle, the arrays
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"flwrgpu1"
_ALIGNMENT = 4096  # a page, so that an array can be mapped where it lies


def create(name: str) -> int:
    """Return the descriptor of a new, empty memory file; not inherited by other programs."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:  # macOS: already unlinked
        return os.dup(file.fileno())


def dump(value: Any, descriptor: int) -> None:
    """Write ``value`` into an empty memory file."""
    buffers: list[pickle.PickleBuffer] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    offset = _write(descriptor, _HEADER.pack(_MAGIC, len(head), len(views)) + sizes + head, 0)
    for view in views:
        offset = _write(descriptor, view, _aligned(offset))


def load(descriptor: int) -> Any:
    """Read what :func:`dump` wrote; arrays come back writable.

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
