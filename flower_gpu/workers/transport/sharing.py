"""The caller's side of what several calls share: the global model of a round, written once.

In a process that runs many clients, all of them get the same immutable bytes (Flower's ``Array.data``). When
bytes are sent for the second time they are written into a sealed memory file of their own, which each worker
from then on maps; the next model then goes into one at once. A process that sends every model once, as a
client of its own does, keeps nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence

from flower_gpu.workers.transport import memory

_ALIGNMENT = 64
_MIN_BYTES = 1 << 20  # less is written faster than it is looked up and mapped
_REMEMBERED = 10_000


class SharedFile:
    """A sealed memory file with the bytes objects of one model."""

    def __init__(self, buffers: Sequence[bytes], calls: int) -> None:
        self.descriptor = memory.create("flower-gpu-shared")
        weakref.finalize(self, os.close, self.descriptor)
        self.buffers = tuple(buffers)
        self.calls = calls
        self._offsets: dict[int, int] = {}
        offset = 0
        for buffer in self.buffers:
            self._offsets[id(buffer)] = offset
            offset = memory.write(self.descriptor, buffer, offset)
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        memory.seal(self.descriptor)
        self.identity = memory.identity(self.descriptor)

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

    A worker opens the file by the number of the caller's descriptor, since it is started with a fixed set of
    its own. Each worker tells in its reply whether it could; nothing is shared before one could.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: SharedFile | None = None
        self._seen: dict[int, int] = {}
        # By the descriptor of the request, with that file's identity: the number is used again.
        self._calls: dict[int, tuple[tuple[int, int, int], SharedFile]] = {}
        self._reachable = False
        self._expected = False  # the last model was sent more than once: the next one will be

    def place(self, buffers: Sequence[bytes]) -> SharedFile | None:
        """Return a file with (some of) these large parts of a request, if others may want them too.

        Follow with :meth:`hold` when the request is written.
        """
        if not memory.SEALS:
            return None
        with self._lock:
            self._let_go()
            repeated = self._repeated(buffers)
            if not self._reachable:
                return None
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

    def hold(self, shared: SharedFile, request: int) -> None:
        """Keep the file open until the call of this (complete) request is over."""
        with self._lock:
            self._calls[request] = memory.identity(request), shared

    def finished(self, request: int, reached: bool) -> None:
        """Take note that a worker is gone, and whether it could reach the caller's descriptors."""
        with self._lock:
            self._reachable = reached
            self._calls.pop(request, None)
            self._let_go()

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

    def _let_go(self) -> None:
        for request, (identity, _) in list(self._calls.items()):
            if not _is_open(request, identity):  # its call failed
                del self._calls[request]
        if self._current is not None and not self._current.in_use():
            self._drop()

    def _drop(self) -> None:
        if self._current is not None:
            self._expected = self._current.calls > 1
        self._current = None


def _is_open(descriptor: int, identity: tuple[int, int, int]) -> bool:
    try:
        return memory.identity(descriptor) == identity
    except OSError:
        return False


#: This process's own.
sharing = Sharing()


def _after_fork_in_child() -> None:
    sharing.__init__()  # type: ignore[misc]  # other pid, other descriptors; the lock may be held for ever


os.register_at_fork(after_in_child=_after_fork_in_child)
