"""Memory files: create, write, read, seal, map; and the one that several calls share.

A memory file has no name, so nothing can be left behind: the kernel frees it with its last holder. Where
the kernel has no seals (macOS) a temporary file that is already unlinked takes its place, and is copied
instead of mapped: without a seal another process could change what this one has checked.
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

#: Whether a file can be sealed, and so be mapped instead of copied.
SEALS = hasattr(fcntl, "F_ADD_SEALS") and hasattr(os, "memfd_create")

_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10  # MAP_FIXED, which the mmap module lacks; the same on every architecture of Linux


def create(name: str) -> int:
    """Return the descriptor of a new, empty memory file; not inherited by other programs."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if SEALS else 0))
    with tempfile.TemporaryFile(prefix=name) as file:  # macOS: already unlinked
        return os.dup(file.fileno())


def write(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write all of ``data`` at ``offset`` and return where it ends."""
    # A write is faster than a copy into a map: the kernel need not clear the pages first, nor take a page
    # fault for each. More threads gain nothing: they take turns at the file's lock.
    view = memoryview(data)
    while view.nbytes:  # one call writes at most just under 2 GiB
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
    return offset


def read(descriptor: int, size: int, offset: int) -> bytearray:
    """Return ``size`` bytes from ``offset``; EOFError if the file ends before."""
    if offset + size > os.fstat(descriptor).st_size:  # before so much memory is taken
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
    """Let nobody change the size: a process that has mapped the file would die of it."""
    if SEALS:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def seal(descriptor: int) -> bool:
    """Let nobody change size or content any more; False where somebody has a map of it, or without seals."""
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
    """Return the identity of a file: device, inode, size."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size


class Map:
    """A map of a whole file, unmapped when the last view of it is gone.

    Holds no descriptor (the mmap module's maps do): a process may keep thousands of results.

    ``shared``: whether what is written goes to the file. Otherwise it stays here, and only pages that are
    written to are copied.
    Raises OSError if the kernel refuses (too many maps, no memory).
    """

    def __init__(self, descriptor: int, size: int, shared: bool = False) -> None:
        self.size = size
        self.address = _mmap(None, size, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, descriptor)
        memory = (ctypes.c_ubyte * size).from_address(self.address)
        # Not at exit: arrays are still used then. The kernel unmaps it with the process.
        weakref.finalize(memory, _libc().munmap, self.address, size).atexit = False
        self.view = memoryview(memory).cast("B")

    def leave_file(self, descriptor: int) -> None:
        """Make later writes private to this process, at the same addresses."""
        _mmap(self.address, self.size, mmap.MAP_PRIVATE | _FIXED, descriptor)

    def offset_of(self, address: int, size: int) -> int | None:
        """Return where in the file this memory is, or None if it is elsewhere."""
        offset = address - self.address
        return offset if 0 <= offset <= self.size - size else None


def _mmap(address: int | None, size: int, flags: int, descriptor: int) -> int:
    found: int | None = _libc().mmap(
        address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, ctypes.c_long(0)
    )
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return found


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    numbers = [ctypes.c_int, ctypes.c_int, ctypes.c_int]
    # off_t is as long as a pointer on every 64-bit Linux
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


_ALIGNMENT = 64
_MIN_BYTES = 1 << 20  # less is written faster than it is looked up and mapped
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
        """Return where ``buffer`` begins, or None if it is not here."""
        return self._offsets.get(id(buffer))

    def in_use(self) -> bool:
        """Whether anybody but this object holds one of the bytes objects."""
        nobody_else_has_it = bytes(bytearray(16))
        counts = [sys.getrefcount(buffer) for buffer in (*self.buffers, nobody_else_has_it)]
        return any(count > counts[-1] for count in counts[:-1])


class Sharing:
    """What this process shares with its workers: the model of one round.

    Nothing is shared before it is sent for the second time.
    """

    def __init__(self) -> None:
        self._begin()
        # A fork has other calls; the lock may be held there for ever.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._current: SharedFile | None = None
        self._seen: dict[int, int] = {}
        self._expected = False  # the last model was sent more than once: the next one will be

    def place(self, buffers: Sequence[bytes]) -> SharedFile | None:
        """Return a file with (some of) these large parts of a request, if others may want them too."""
        if not SEALS:
            return None
        with self._lock:
            self._drop_unused()
            repeated = self._repeated(buffers)
            current = self._current
            if current is not None and any(current.offset_of(buffer) is not None for buffer in buffers):
                # What else is in the request is this client's own, unless it comes again as well.
                missing = [buffer for buffer in repeated if current.offset_of(buffer) is None]
                wanted = repeated if sum(map(len, missing)) >= _MIN_BYTES else []
            else:
                wanted, current = list(buffers) if self._expected else repeated, None
            if sum(map(len, wanted)) >= _MIN_BYTES:
                first = 0 if self._expected else 1  # it was sent before
                self._drop()  # before the next one takes as much memory
                current = self._current = SharedFile(wanted, first)
            if current is not None:
                current.calls += 1
            return current

    def let_go(self) -> None:
        """Let go of a model that nobody has any more."""
        with self._lock:
            self._drop_unused()

    def _repeated(self, buffers: Sequence[bytes]) -> list[bytes]:
        # Ids of objects that are gone are used again, so that a sample has to match as well. If it does by
        # chance, something is shared that is sent once: a waste, not an error.
        found = {}
        for buffer in buffers:
            step = len(buffer) // 256 | 1  # odd: every byte of a number has its turn
            key, sample = id(buffer), zlib.crc32(memoryview(buffer)[::step].tobytes())
            if self._seen.get(key) == sample:
                found[key] = buffer
            self._seen[key] = sample
        while len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return list(found.values())

    def _drop_unused(self) -> None:
        if self._current is not None and not self._current.in_use():
            self._drop()

    def _drop(self) -> None:
        if self._current is not None:
            self._expected = self._current.calls > 1
        self._current = None


#: This process's own.
sharing = Sharing()
