"""Arguments and results between processes, in memory files.

Small values are pickled. The bytes of arrays lie next to the pickle, in the same layout as in memory.

The caller writes the request, and the worker maps it. The file is for this worker only. If the worker changes
an array in place, it changes in the file. If the worker returns such an array, only its offset is sent back.
Once the worker is gone, the caller seals the file and maps it as the result.

The caller must never use bytes that another process can still change. A process that the worker has left
behind could change the file after its checksum was verified. So the caller maps a reply only once it is
sealed; otherwise it copies the bytes. After the reply is written, the worker's map of the request becomes
private (``_leave_request``). So later writes into the arguments do not reach the caller.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from flower_gpu.errors import WorkerError
from flower_gpu.workers import memory_files
from flower_gpu.workers.memory_files import create as create
from flower_gpu.workers.memory_files import sharing
from flower_gpu.workers.transport import regions
from flower_gpu.workers.transport.regions import (
    BUFFER,
    IMMUTABLE,
    IN_REQUEST,
    IN_SHARED,
    IN_THIS_FILE,
    Parts,
    Region,
)

# The file begins with the header: magic, size of the file, bytes of the pickle, number of regions. Then come
# a checksum of the header, table and pickle; the table of regions; the pickle; and the bytes of the regions.
_HEADER = struct.Struct("<8sQQQ")
_CHECKSUM = struct.Struct("<Q")
_REGION = struct.Struct("<QQQQ")  # where it is, kind, offset, size
_MAGIC = b"flwrgpu3"

_ALIGNMENT = 64  # a cache line
# Results with fewer bytes besides their pickle are copied, because that is cheaper than a map.
_MAPPED_BYTES = 1 << 20
# The checksum covers this much of the pickle, which is rarely longer.
_CHECKED_BYTES = 1 << 20
# Bytes of the first read. The part before the arrays is rarely longer.
_INDEX_BYTES = 8192

_NAMES = ("task", "args", "kwargs")  # first parts of a request, named in errors
_FOREIGN = "a memory file between worker and caller holds something else"
_SHORT = "a memory file between worker and caller ends too early"


def write_request(value: Any, descriptor: int, note: Callable[[Any], None] | None = None) -> int:
    """Write ``value`` into an empty memory file for one worker, and return the descriptor of a shared file.

    The shared file holds a model that several calls use; the descriptor is -1 if there is no such file. The
    worker gets both descriptors with the call, because under the GPU guard it cannot open files of this
    process.

    ``note``: called with each function and each class in the value.
    Raises TypeError for an array of objects.
    """
    named = isinstance(value, tuple)
    parts = Parts(list(zip(_NAMES, value, strict=False)) if named else [("argument", value)])
    head = regions.dumps_by_value(value, parts, note)
    shared = sharing.place([part.shareable for part in parts.all if part.shareable is not None])
    if shared is not None:
        parts.refer_to(shared)
    _write_file(descriptor, head, parts)
    memory_files.seal_size(descriptor)
    return -1 if shared is None else os.dup(shared.descriptor)


def read_request(descriptor: int, shared: int = -1) -> Any:
    """Return the value of a request, in its worker and without a copy; WorkerError if it is incomplete.

    ``shared``: the descriptor that :func:`write_request` returned in the caller. It is closed here.
    """
    head, index = _read_index(descriptor)
    try:
        files = _files(index, {IN_THIS_FILE: descriptor, IN_SHARED: shared}, shared=IN_THIS_FILE)
        request_map = files[IN_THIS_FILE].map if IN_THIS_FILE in files else None
        _current.request = _GivenRequest(descriptor, memory_files.identity(descriptor), request_map)
        return _load(head, index, files)
    finally:
        if shared >= 0:
            os.close(shared)


def write_reply(value: Any, descriptor: int) -> None:
    """Write ``value`` into an empty memory file for the caller of this worker.

    Later writes of this process into its arguments stay in this process.
    """
    request = _current.request
    parts = Parts([("result", getattr(value, "value", value))], None if request is None else request.map)
    # Classes are pickled by name if possible. A fork has the caller's __main__, so the caller gets its own
    # classes back. A spawned worker got the contents of __main__ by value, and returns them by value.
    try:
        head = regions.dumps_by_name(value, parts)
    except OSError:
        raise
    except Exception:
        head = regions.dumps_by_value(value, parts)
    parts.copy_what_would_hold_too_much()
    _write_file(descriptor, head, parts)
    memory_files.seal(descriptor)
    _leave_request()


def read_reply(descriptor: int, request: int = -1) -> Any:
    """Return the value that a worker wrote, in its caller; WorkerError if it is incomplete.

    Call it once the worker can no longer write.

    ``request``: descriptor of the request, -1 if the worker inherited its request by fork.
    """
    head, index = _read_index(descriptor)
    return _load(head, index, _files(index, {IN_THIS_FILE: descriptor, IN_REQUEST: request}))


def _write_file(
    descriptor: int,
    head: bytes,
    parts: Parts,
) -> None:
    offset = _HEADER.size + _CHECKSUM.size + _REGION.size * len(parts.all) + len(head)
    for part in parts.all:
        if part.file_kind == IN_THIS_FILE:
            part.offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            offset = part.offset + part.view.nbytes
    table = b"".join(
        _REGION.pack(part.file_kind, part.kind, part.offset, part.view.nbytes) for part in parts.all
    )
    header = _HEADER.pack(_MAGIC, offset, len(head), len(parts.all))
    checksum = _CHECKSUM.pack(_checksum(header, table, head))
    start = b"".join((header, checksum, table, head))
    in_this_file = [part for part in parts.all if part.file_kind == IN_THIS_FILE]
    if offset > _MAPPED_BYTES:
        memory_files.write(descriptor, start, 0)
        for part in in_this_file:
            memory_files.write(descriptor, part.view, part.offset)
        return
    # Small files are written at once, because each system call takes as long as the copy.
    pieces: list[bytes | memoryview] = [start]
    end = len(start)
    for part in in_this_file:
        pieces += [bytes(part.offset - end), part.view]
        end = part.offset + part.view.nbytes
    memory_files.write(descriptor, b"".join(pieces), 0)


def _checksum(header: bytes, table: bytes, head: bytes) -> int:
    return zlib.crc32(memoryview(head)[:_CHECKED_BYTES], zlib.crc32(table, zlib.crc32(header)))


class _IndexEntry(NamedTuple):
    file_kind: int
    kind: int
    offset: int
    size: int


def _read_index(descriptor: int) -> tuple[bytes, list[_IndexEntry]]:
    """Return the pickle of a memory file and its table of regions, once the checksum is verified."""
    start = os.pread(descriptor, _INDEX_BYTES, 0)  # mostly enough for all of it
    try:
        header = start[: _HEADER.size]
        magic, size, head_size, count = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise WorkerError(_FOREIGN)
        if size != os.fstat(descriptor).st_size:
            raise EOFError
        table_end = _HEADER.size + _CHECKSUM.size + count * _REGION.size
        if table_end + head_size > len(start):
            start = bytes(memory_files.read(descriptor, table_end + head_size, 0))
    except (EOFError, struct.error):
        raise WorkerError(_SHORT) from None
    (checksum,) = _CHECKSUM.unpack_from(start, _HEADER.size)
    table = start[_HEADER.size + _CHECKSUM.size : table_end]
    head = start[table_end : table_end + head_size]
    if checksum != _checksum(header, table, head):
        raise WorkerError(_FOREIGN)
    return head, list(map(_IndexEntry._make, _REGION.iter_unpack(table)))


class _File:
    """A file with regions of one request or reply, mapped where possible."""

    def __init__(
        self, descriptor: int, index: Sequence[_IndexEntry], file_kind: int, shared: bool = False
    ) -> None:
        self._descriptor = descriptor
        self.map: memory_files.Map | None = None
        self._writable: memory_files.Map | None = None
        entries = [entry for entry in index if entry.file_kind == file_kind]
        # A request belongs to the caller, which does not change it. A reply must be sealed. Otherwise a
        # process that the worker left behind could change it after the check.
        trusted = shared or file_kind == IN_SHARED
        large = sum(entry.size for entry in entries) >= _MAPPED_BYTES
        can_map = memory_files.SEALS and (trusted or (large and memory_files.seal(descriptor)))
        size = os.fstat(descriptor).st_size  # The seal keeps the size from changing.
        if any(entry.offset + entry.size > size for entry in entries):
            raise WorkerError(_SHORT)
        # A small file is read at once, because a system call for each region would take longer.
        self._all: memoryview | None = None
        if not can_map:
            if size <= _MAPPED_BYTES and len(entries) > 1:
                self._all = memoryview(memory_files.read(descriptor, size, 0))
            return
        try:
            self.map = memory_files.Map(descriptor, size, shared)
            if any(entry.kind == IMMUTABLE for entry in entries):
                self._writable = memory_files.Map(descriptor, size)
        except OSError:  # too many maps
            self.map = None

    def region(self, entry: _IndexEntry) -> Region:
        place = slice(entry.offset, entry.offset + entry.size)
        if self.map is None:
            # Each array gets its own memory, so that keeping one array does not keep the others.
            if self._all is None:
                view = memoryview(memory_files.read(self._descriptor, entry.size, entry.offset))
            else:
                view = memoryview(bytearray(self._all[place]))
            return Region(view.toreadonly() if entry.kind == IMMUTABLE else view)
        if entry.kind != IMMUTABLE:
            return Region(self.map.view[place])
        assert self._writable is not None
        return Region(self.map.view[place].toreadonly(), self._writable.view[place])


def _files(index: Sequence[_IndexEntry], descriptors: dict[int, int], shared: int = -1) -> dict[int, _File]:
    """Return the files that hold regions of a request or reply. Writes go to the file ``shared`` only."""
    used = {entry.file_kind for entry in index}
    return {
        file_kind: _File(file, index, file_kind, file_kind == shared)
        for file_kind, file in descriptors.items()
        if file_kind in used and file >= 0
    }


def _load(head: bytes, index: Sequence[_IndexEntry], files: dict[int, _File]) -> Any:
    if any(entry.file_kind not in files or entry.kind > IMMUTABLE for entry in index):
        raise WorkerError(_FOREIGN)
    loaded = [files[entry.file_kind].region(entry) for entry in index]
    buffers = [region.memory for region, entry in zip(loaded, index, strict=True) if entry.kind == BUFFER]
    return regions.loads(head, loaded, buffers)


@dataclass(frozen=True)
class _GivenRequest:
    """A request that came in a memory file."""

    descriptor: int
    identity: tuple[int, int, int]
    map: memory_files.Map | None


class _CurrentCall:
    """The request of the current call in this worker, or None."""

    request: _GivenRequest | None = None


_current: Final = _CurrentCall()


def _leave_request() -> None:
    """Make later writes into the arguments private to this process."""
    request, _current.request = _current.request, None
    if request is None or request.map is None:
        return
    try:
        if memory_files.identity(request.descriptor) == request.identity:  # the task may have closed it
            request.map.leave_file(request.descriptor)
    except OSError:
        return


# A process that the worker forks must not change the worker's arrays or its result. In pages that it has not
# written to itself, it still sees later writes of the worker.
os.register_at_fork(after_in_child=_leave_request)
