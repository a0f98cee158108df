"""What virtual nodes keep between messages: in memory up to a limit, the rest in files."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flwr.app import RecordDict

from flower_gpu.errors import FlowerGPUError
from flower_gpu.gpu.request import format_bytes
from flower_gpu.simulation import record_bytes
from flower_gpu.simulation.places import Place, disk_error, write_all

_FILE: Final = re.compile(r"\d+-\d+\.state")


@dataclass(frozen=True)
class StoredState:
    """The state of a node at one moment.

    Parameters
    ----------
    version : int
        Another one whenever the state is another one.
    size_bytes : int
        How much it takes.
    memory : bytes or None
        The state, if it is in memory.
    place : Place or None
        Where it is, if it is in a file.
    """

    version: int
    size_bytes: int
    memory: bytes | None
    place: Place | None

    def read(self) -> bytes:
        """Return the state as bytes."""
        if self.memory is not None:
            return self.memory
        assert self.place is not None
        return self.place.read()


@dataclass
class _Entry:
    version: int
    size_bytes: int
    memory: bytes | None
    place: Place | None = None
    is_own_file: bool = False  # and goes with the state
    is_leaving: bool = False  # is being written


class StateStore:
    """The states of virtual nodes, by partition; several threads may use it.

    A state is kept as bytes of its own: what a worker returns is a map of a whole reply, with the model in
    it, and would stay mapped for a state of a few bytes; and a process can have some 65,000 maps only. The
    price is one copy of the state.

    Parameters
    ----------
    folder : Path, optional
        Where states go that have no room in memory; made when the first one does. What an earlier store left
        there is deleted then. None: all stay in memory.
    memory_limit_bytes : int
        How much the states in memory may take together; those that were used least recently leave it
        first. What a checkpoint has is not written once more for that.

    Attributes
    ----------
    memory_bytes : int
        How much they take now.
    """

    def __init__(self, folder: Path | None = None, memory_limit_bytes: int = 0) -> None:
        self._folder = folder
        self._limit_bytes = memory_limit_bytes
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._recent: OrderedDict[int, None] = OrderedDict()  # in memory and to stay; the oldest first
        self.memory_bytes = 0
        self._leaving_bytes = 0  # of these: being written, and gone from memory after that
        self._versions = itertools.count(1)
        self._readers = 0  # of files that must not go yet
        self._garbage: list[Path] = []
        self._has_folder = False

    def get(self, partition: int) -> RecordDict:
        """Return a state, which may be changed without changing what is stored.

        Raises
        ------
        FlowerGPUError
            If its file cannot be read.
        """
        with self._lock:
            entry = self._entries.get(partition)
            if entry is None:
                return RecordDict()
            data, place = entry.memory, entry.place
            if data is not None:
                if partition in self._recent:
                    self._recent.move_to_end(partition)
            else:
                assert place is not None
                # Only opened here: once open it may be replaced or deleted.
                file = place.open()
        if data is None:
            assert place is not None
            with file:
                data = place.read_from(file)
        return record_bytes.decode(data)

    def put(self, partition: int, state: RecordDict) -> None:
        """Store a state. If that fails, the earlier one stays.

        Raises
        ------
        FlowerGPUError
            If states have to go to the disk, and it is full.
        """
        data = record_bytes.encode(state) if state else b""
        with self._lock:
            old = self._entries.get(partition)
        if old is not None and _is_same(old, data):
            return
        size = len(data)
        if self._folder is not None and size > self._limit_bytes:
            version = next(self._versions)
            place = self._write(partition, version, data)
            with self._lock:
                self._replace(partition, _Entry(version, size, None, place, is_own_file=True))
        else:
            self._make_room(partition, size)
            with self._lock:
                self.memory_bytes -= size  # reserved until here
                self._replace(partition, _Entry(next(self._versions), size, data) if data else None)
        self._sweep()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[dict[int, StoredState]]:
        """Return all states as they are at this moment; readable inside the ``with`` block."""
        with self._lock:
            self._readers += 1
            found = {
                partition: StoredState(entry.version, entry.size_bytes, entry.memory, entry.place)
                for partition, entry in self._entries.items()
            }
        try:
            yield found
        finally:
            with self._lock:
                self._readers -= 1
            self._sweep()

    def saved(self, partition: int, version: int, place: Place) -> None:
        """Take note of a copy in a file, which stays until another one is told of or the state changes."""
        with self._lock:
            entry = self._entries.get(partition)
            if entry is not None and entry.version == version:
                self._discard_file(entry)
                entry.place = place
        self._sweep()

    def adopt(self, partition: int, place: Place) -> int:
        """Take over a state from a file, which is read when it is needed; returns its version."""
        version = next(self._versions)
        with self._lock:
            self._replace(partition, _Entry(version, place.size_bytes, None, place))
        self._sweep()
        return version

    def close(self) -> None:
        """Forget all states, and delete the files that were made for them."""
        with self._lock:
            for partition in list(self._entries):
                self._replace(partition, None)
        self._sweep()
        if self._has_folder and self._folder is not None:
            with contextlib.suppress(OSError):  # others may have put something there
                self._folder.rmdir()

    def _make_room(self, partition: int, size: int) -> None:
        """Reserve so much memory for a new state of this partition, and let others leave for it."""
        with self._lock:
            self.memory_bytes += size
        if self._folder is None:
            return
        try:
            while (victim := self._next_to_leave(partition)) is not None:
                self._move_to_file(*victim)
        except BaseException:
            with self._lock:
                self.memory_bytes -= size
            raise

    def _next_to_leave(self, newcomer: int) -> tuple[int, _Entry] | None:
        """Return the state to be written next, if memory is short."""
        with self._lock:
            old = self._entries.get(newcomer)
            replaced = old.size_bytes if old is not None and newcomer in self._recent else 0
            while self.memory_bytes - self._leaving_bytes - replaced > self._limit_bytes:
                partition = next((found for found in self._recent if found != newcomer), None)
                if partition is None:
                    return None  # others are on their way out
                del self._recent[partition]
                entry = self._entries[partition]
                if entry.place is None:
                    entry.is_leaving = True
                    self._leaving_bytes += entry.size_bytes
                    return partition, entry
                entry.memory = None
                self.memory_bytes -= entry.size_bytes
            return None

    def _move_to_file(self, partition: int, entry: _Entry) -> None:
        assert entry.memory is not None
        place: Place | None = None
        try:
            place = self._write(partition, entry.version, entry.memory)
        finally:
            with self._lock:
                if not entry.is_leaving:  # another state has replaced it in the meantime
                    if place is not None:
                        self._garbage.append(place.path)
                else:
                    entry.is_leaving = False
                    self._leaving_bytes -= entry.size_bytes
                    if place is None:
                        self._recent[partition] = None
                        self._recent.move_to_end(partition, last=False)
                    else:
                        entry.memory = None
                        self.memory_bytes -= entry.size_bytes
                        if entry.place is None:
                            entry.place, entry.is_own_file = place, True
                        else:  # a checkpoint has it by now
                            self._garbage.append(place.path)

    def _replace(self, partition: int, new: _Entry | None) -> None:
        # Called with the lock.
        old = self._entries.pop(partition, None)
        self._recent.pop(partition, None)
        if old is not None:
            if old.memory is not None:
                self.memory_bytes -= old.size_bytes
            if old.is_leaving:
                old.is_leaving = False
                self._leaving_bytes -= old.size_bytes
            self._discard_file(old)
        if new is not None:
            self._entries[partition] = new
            if new.memory is not None:
                self.memory_bytes += new.size_bytes
                self._recent[partition] = None

    def _discard_file(self, entry: _Entry) -> None:
        # Called with the lock.
        if entry.is_own_file and entry.place is not None:
            self._garbage.append(entry.place.path)
        entry.place, entry.is_own_file = None, False

    def _sweep(self) -> None:
        """Delete files that nobody needs any more."""
        with self._lock:
            if self._readers:
                return
            garbage, self._garbage = self._garbage, []
        for path in garbage:
            with contextlib.suppress(OSError):
                path.unlink()

    def _write(self, partition: int, version: int, data: bytes) -> Place:
        assert self._folder is not None
        # A file for each version: a new one never touches what somebody reads.
        path = self._folder / f"{partition}-{version}.state"
        try:
            self._make_folder(self._folder)
            with path.open("xb", buffering=0) as file:
                write_all(file, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise disk_error(
                error,
                self._folder,
                len(data),
                f"The states of virtual nodes take over {format_bytes(self._limit_bytes)} of memory, and the "
                "rest goes there. Free space, or give the states more memory (state_memory)",
            ) from error
        return Place(path, 0, len(data), zlib.crc32(data))

    def _make_folder(self, folder: Path) -> None:
        with self._lock:
            if not self._has_folder:
                folder.mkdir(parents=True, exist_ok=True)
                for path in folder.iterdir():
                    if _FILE.fullmatch(path.name):
                        path.unlink(missing_ok=True)
                self._has_folder = True


def _is_same(entry: _Entry, data: bytes) -> bool:
    """Whether a state has not changed: most messages leave it as it was."""
    memory, place = entry.memory, entry.place
    if entry.size_bytes != len(data):
        return False
    if memory is not None:
        return memory == data
    try:
        return place is not None and place.checksum == zlib.crc32(data) and place.read() == data
    except FlowerGPUError:  # replaced in the meantime, or damaged: then the new one is all there is
        return False
