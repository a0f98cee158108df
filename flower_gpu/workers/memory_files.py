"""Memory files: create, write, read, seal, map; and the memory file that several calls share.

A memory file has no name. The kernel frees it when the last descriptor and the last map are gone, so nothing
can be left behind. macOS has neither memory files nor seals. There, an unlinked temporary file takes the
place of a memory file. It is copied instead of mapped, because without a seal another process could change
data that this process has already checked.

:class:`Sharing` saves copies of the global model. In a round, many calls carry the same bytes objects. If
bytes are sent for the second time, they go into one sealed file, and later requests refer to this file.
Calls run in several threads, so a lock protects the current file. A fork gets a new lock, because another
thread may hold the inherited one forever.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import tempfile
import threading
import weakref
import zlib
from collections.abc import Sequence
from functools import cache

#: True if memory files can be sealed, and therefore mapped instead of copied.
SEALS = hasattr(fcntl, "F_ADD_SEALS") and hasattr(os, "memfd_create")

_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10  # MAP_FIXED, which the mmap module lacks; the same on every architecture of Linux


def create(name: str) -> int:
    """Return the descriptor of a new, empty memory file. Other programs do not inherit it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if SEALS else 0))
    with tempfile.TemporaryFile(prefix=name) as file:  # macOS: already unlinked
        return os.dup(file.fileno())


def write(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write all of ``data`` at ``offset`` and return the offset of its end."""
    # A write is faster than a copy into a map, because the kernel need not clear the pages first, nor handle
    # a page fault for each. Several threads would be no faster, because they take turns at the file's lock.
    view = memoryview(data)
    while view.nbytes:  # One call writes just under 2 GiB at most.
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
    return offset


def read(descriptor: int, size: int, offset: int) -> bytearray:
    """Return ``size`` bytes from ``offset``; EOFError if the file ends too early."""
    # This is checked before the memory is allocated.
    if offset + size > os.fstat(descriptor).st_size:
        raise EOFError
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise EOFError
        view = view[count:]
        offset += count
    return data


def seal_size(descriptor: int) -> None:
    """Seal the size of the file. If it shrank, the kernel would kill processes that have mapped it."""
    if SEALS:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def seal(descriptor: int) -> bool:
    """Seal size and content of the file, and return True if that worked.

    Returns False if a process has mapped the file for writing, or if the system has no seals.
    """
    if not SEALS:
        return False
    everything = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & everything != everything:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, everything)
    except OSError:  # EBUSY: mapped for writing; EINVAL: not a memory file
        return False
    return True


def identity(descriptor: int) -> tuple[int, int, int]:
    """Return device, inode and size of a file, which identify it."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size


class Map:
    """A map of a whole file, which is unmapped when its last view is gone.

    It holds no descriptor, unlike a map of the mmap module, because a process may keep thousands of results.

    ``shared``: True if writes go to the file. Otherwise they stay in this process, and the kernel copies each
    page at its first write.
    Raises OSError if the kernel refuses the map (too many maps, no memory).
    """

    def __init__(self, descriptor: int, size: int, shared: bool = False) -> None:
        self.size = size
        self.address = _mmap(None, size, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, descriptor)
        memory = (ctypes.c_ubyte * size).from_address(self.address)
        # Do not unmap at exit, when arrays are still in use. The kernel does it when the process ends.
        weakref.finalize(memory, _libc().munmap, self.address, size).atexit = False
        self.view = memoryview(memory).cast("B")

    def leave_file(self, descriptor: int) -> None:
        """Make later writes private to this process. The addresses stay the same."""
        _mmap(self.address, self.size, mmap.MAP_PRIVATE | _FIXED, descriptor)

    def offset_of(self, address: int, size: int) -> int | None:
        """Return the offset of this memory in the file, or None if it lies outside the map."""
        offset = address - self.address
        return offset if 0 <= offset <= self.size - size else None


def _mmap(address: int | None, size: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _libc().mmap(
        address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, ctypes.c_long(0)
    )
    if mapped is None or mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return mapped


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    numbers = [ctypes.c_int, ctypes.c_int, ctypes.c_int]
    # On every 64-bit Linux, off_t has the size of a pointer.
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


_ALIGNMENT = 64
# Smaller models are not shared, because writing them takes less time than looking them up and mapping them.
_MIN_BYTES = 1 << 20
# Number of remembered bytes objects.
_REMEMBERED = 10_000


class SharedFile:
    """A sealed memory file with the bytes objects of one model."""

    def __init__(self, buffers: Sequence[bytes], calls: int) -> None:
        self.descriptor = create("flower-gpu-shared")
        weakref.finalize(self, os.close, self.descriptor)
        self.buffers = tuple(buffers)
        self.calls = calls
        self._offsets: dict[int, int] = {}
        offset = 0
        for buffer in self.buffers:
            self._offsets[id(buffer)] = offset
            offset = write(self.descriptor, buffer, offset)
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        seal(self.descriptor)

    def offset_of(self, buffer: bytes) -> int | None:
        """Return the offset of ``buffer`` in the file, or None if the file does not hold it."""
        return self._offsets.get(id(buffer))

    def in_use(self) -> bool:
        """Return True if other code still holds any of the bytes objects."""
        # This object has no references from other code. So a higher count of a buffer shows such a reference.
        unreferenced = bytes(bytearray(16))
        counts = [sys.getrefcount(buffer) for buffer in (*self.buffers, unreferenced)]
        return any(count > counts[-1] for count in counts[:-1])


class Sharing:
    """The model of one round, which this process shares with its workers.

    Bytes are shared when they are sent for the second time. If a model was sent repeatedly, the next
    model is shared at once.
    """

    def __init__(self) -> None:
        self._begin()
        # A fork has its own calls, and its copy of the lock may be held forever.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._current: SharedFile | None = None
        self._seen: dict[int, int] = {}
        # True if the previous model was sent repeatedly. Then the next model is expected to be, too.
        self._expected = False

    def place(self, buffers: Sequence[bytes]) -> SharedFile | None:
        """Return a file with some or all of these large parts of a request, or None.

        Parts are shared if other calls may send them as well.
        """
        if not SEALS:
            return None
        with self._lock:
            self._drop_unused()
            repeated = self._repeated(buffers)
            current = self._current
            if current is not None and any(current.offset_of(buffer) is not None for buffer in buffers):
                # The request carries the current model. Its other parts belong to one client, unless they
                # were sent before. A new file is made only if it would hold enough of such repeated parts.
                missing = [buffer for buffer in repeated if current.offset_of(buffer) is None]
                wanted = repeated if sum(map(len, missing)) >= _MIN_BYTES else []
            else:
                wanted, current = list(buffers) if self._expected else repeated, None
            if sum(map(len, wanted)) >= _MIN_BYTES:
                earlier_calls = 0 if self._expected else 1
                self._drop()  # The old file must be freed before the new one takes as much memory.
                current = self._current = SharedFile(wanted, earlier_calls)
            if current is not None:
                current.calls += 1
            return current

    def release(self) -> None:
        """Release the shared model if it is no longer in use."""
        with self._lock:
            self._drop_unused()

    def _repeated(self, buffers: Sequence[bytes]) -> list[bytes]:
        # Python reuses the ids of freed objects, so a sample of the bytes has to match as well. If it matches
        # by chance, bytes are shared that are sent only once. That is a waste, but no error.
        repeated = {}
        for buffer in buffers:
            # With an odd step, the sample has bytes from every position within a number.
            step = len(buffer) // 256 | 1
            key, sample = id(buffer), zlib.crc32(memoryview(buffer)[::step].tobytes())
            if self._seen.get(key) == sample:
                repeated[key] = buffer
            self._seen[key] = sample
        while len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return list(repeated.values())

    def _drop_unused(self) -> None:
        if self._current is not None and not self._current.in_use():
            self._drop()

    def _drop(self) -> None:
        if self._current is not None:
            self._expected = self._current.calls > 1
        self._current = None


#: The shared model of this process.
sharing = Sharing()
