"""What virtual nodes keep between messages: in memory up to a limit, the rest in files."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Final

from flwr.app import RecordDict

from flower_gpu.errors import FlowerGPUError
from flower_gpu.leases.request import format_bytes
from flower_gpu.simulation import record_bytes
from flower_gpu.simulation.places import Place, disk_error, write_all

_FILE: Final = re.compile(r"\d+-\d+\.state")


class StateStore:
    """The states of virtual nodes, by partition; several threads may use it.

    A state is kept as bytes of its own. A worker's reply is one map with the model in it, which would stay
    mapped for a state of a few bytes, and a process can have some 65,000 maps only.

    Without a folder all states stay in memory. With one, the states that were used least recently leave the
    memory when its limit is reached. A state that the checkpoint has is then read from there; any other
    gets a file of its own, which is deleted with the state.
    """

    def __init__(self, folder: Path | None = None, memory_limit_bytes: int = 0) -> None:
        self._folder = folder  # made when the first state goes there
        self._limit_bytes = memory_limit_bytes
        self._lock = threading.RLock()
        self._memory: OrderedDict[int, bytes] = OrderedDict()  # the least recently used state first
        self._places: dict[int, Place] = {}  # of the same bytes, where a state is in both
        self._changed: set[int] = set()
        self._versions = itertools.count(1)
        self._has_folder = False
        self.memory_bytes = 0
        self._reserved_bytes = 0  # for states that are about to be put
        self._leaving: dict[int, int] = {}  # sizes of states that a thread is writing to a file

    def get(self, partition: int) -> RecordDict:
        """Return a state, which may be changed without changing what is stored."""
        with self._lock:
            data, place = self._memory.get(partition), self._places.get(partition)
            if data is not None:
                self._memory.move_to_end(partition)
            elif place is not None:
                file = place.open()
        if data is None:
            if place is None:
                return RecordDict()
            with file:  # once open it may be replaced or deleted by another thread
                data = place.read_from(file)
        return record_bytes.decode(data)

    def put(self, partition: int, state: RecordDict) -> None:
        """Store a state. If that fails, the earlier one stays."""
        data = record_bytes.encode(state) if state else b""
        if self._is_stored(partition, data):  # most messages leave a state as it was
            return
        size, place = len(data), None
        if self._folder is not None and size > self._limit_bytes:
            place = self._write(self._folder, partition, data)
        else:
            self._make_room(partition, size)
        with self._lock:
            self._forget(partition)
            if place is not None:
                self._places[partition] = place
            else:
                self._reserved_bytes -= size
                self.memory_bytes += size
                if data:
                    self._memory[partition] = data
            self._changed.add(partition)

    @contextlib.contextmanager
    def held(self) -> Iterator[Set[int]]:
        """Let no state change inside the block; yields the partitions that changed after the last save."""
        with self._lock:
            yield self._changed

    def read(self, partition: int) -> bytes:
        """Return a state as bytes; none where it is empty."""
        with self._lock:
            data, place = self._memory.get(partition), self._places.get(partition)
            return place.read() if data is None and place is not None else data or b""

    def size_bytes(self, partition: int) -> int:
        """Return the size of a state; 0 where it is empty."""
        place = self._places.get(partition)
        return place.size_bytes if place is not None else len(self._memory.get(partition, b""))

    def saved(self, places: Mapping[int, Place]) -> None:
        """Take note of copies in the checkpoint, which now has all states."""
        with self._lock:
            for partition, place in places.items():
                self._delete_file(partition)
                self._places[partition] = place
            self._changed.clear()

    def close(self) -> None:
        """Forget all states, and delete the files that were made for them."""
        with self._lock:
            for partition in [*self._places, *self._memory]:
                self._forget(partition)
        if self._has_folder and self._folder is not None:
            with contextlib.suppress(OSError):  # somebody else may have put something there
                self._folder.rmdir()

    def _is_stored(self, partition: int, data: bytes) -> bool:
        with self._lock:
            memory, place = self._memory.get(partition), self._places.get(partition)
        if memory is not None or place is None:
            return data == (memory or b"")
        if place.size_bytes != len(data) or place.checksum != zlib.crc32(data):
            return False
        try:
            return place.read() == data
        except FlowerGPUError:  # replaced meanwhile, or damaged: then the new state is all there is
            return False

    def _make_room(self, partition: int, size: int) -> None:
        """Reserve memory for a new state of this partition, and let other states leave it."""
        with self._lock:
            self._reserved_bytes += size
        try:
            # Files are written without the lock, so that other threads go on.
            while self._folder is not None and (oldest := self._next_to_leave(partition)) is not None:
                self._move_to_file(self._folder, *oldest)
        except BaseException:
            with self._lock:
                self._reserved_bytes -= size
            raise

    def _next_to_leave(self, newcomer: int) -> tuple[int, bytes] | None:
        """Return the state to be written next, if memory is short."""
        with self._lock:
            limit = self._limit_bytes + len(self._memory.get(newcomer, b""))
            while self.memory_bytes + self._reserved_bytes - sum(self._leaving.values()) > limit:
                staying = (found for found in self._memory if found not in (newcomer, *self._leaving))
                if (oldest := next(staying, None)) is None:
                    return None
                if oldest not in self._places:
                    self._leaving[oldest] = len(self._memory[oldest])
                    return oldest, self._memory[oldest]
                self.memory_bytes -= len(self._memory.pop(oldest))
            return None

    def _move_to_file(self, folder: Path, partition: int, data: bytes) -> None:
        try:
            place = self._write(folder, partition, data)
        except BaseException:
            with self._lock:
                self._leaving.pop(partition, None)
            raise
        with self._lock:
            if self._memory.get(partition) is not data:  # another state has replaced it
                place.path.unlink(missing_ok=True)
                return
            del self._leaving[partition], self._memory[partition]
            self.memory_bytes -= len(data)
            if partition in self._places:  # a checkpoint has it by now
                place.path.unlink(missing_ok=True)
            else:
                self._places[partition] = place

    def _forget(self, partition: int) -> None:
        self.memory_bytes -= len(self._memory.pop(partition, b""))
        self._leaving.pop(partition, None)
        self._delete_file(partition)
        self._places.pop(partition, None)

    def _delete_file(self, partition: int) -> None:
        place = self._places.get(partition)
        if place is not None and place.path.parent == self._folder:  # not in the checkpoint
            with contextlib.suppress(OSError):
                place.path.unlink()

    def _write(self, folder: Path, partition: int, data: bytes) -> Place:
        # A file for each version: a new one never touches what another thread reads.
        path = folder / f"{partition}-{next(self._versions)}.state"
        try:
            self._make_folder(folder)
            with path.open("xb", buffering=0) as file:
                write_all(file, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise disk_error(
                error,
                folder,
                len(data),
                f"The states of virtual nodes take over {format_bytes(self._limit_bytes)} of memory, and the "
                "rest goes there. Free space, or give the states more memory (state_memory)",
            ) from error
        return Place(path, 0, len(data), zlib.crc32(data))

    def _make_folder(self, folder: Path) -> None:
        with self._lock:
            if self._has_folder:
                return
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.iterdir():
                if _FILE.fullmatch(left.name):  # by a run that was killed
                    left.unlink(missing_ok=True)
            self._has_folder = True
