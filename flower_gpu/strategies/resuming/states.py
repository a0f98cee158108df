"""The states that virtual nodes keep between messages: bytes in memory up to a limit, the rest in files.

A simulation may have thousands of virtual nodes, and their states need not fit into memory. Each state is in
one of four places:

- nowhere, if it is empty;
- in memory, as bytes (``_memory``, in the order of the last use);
- in a file of its own in the store's folder, if it had to leave the memory or is larger than the limit;
- in a file of the checkpoint. After each round :class:`.Checkpoints` reports where it has written the states
  (:meth:`StateStore.saved`), and files of the store are deleted.

A state may be in memory and in a file at the same time. Then it can leave the memory without another write.

The threads that handle messages read and put states, while the thread of the ServerApp may be writing a
checkpoint. One reentrant lock guards the store. :meth:`StateStore.hold_changes` holds it during a checkpoint,
so the checkpoint has the states of a single moment. Messages that need a state wait for that time.

A file never changes. A new version of a state gets a new file, and the old file is deleted only after that.
So if a write fails, the earlier state is still there.

The module begins with :class:`FilePlace` and :func:`disk_error`, which all files of a run use.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import shutil
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flower_gpu.errors import DiskError, FlowerGPUError
from flower_gpu.printable import format_bytes, path_text


@dataclass(frozen=True)
class FilePlace:
    """The place of a state's or model's bytes in a file that never changes."""

    path: Path
    offset_bytes: int
    size_bytes: int
    checksum: int  # CRC-32

    def read(self) -> bytes:
        """Return the bytes; raises an OSError, or a ValueError if the file was changed."""
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes)
            data = file.read(self.size_bytes)
        if len(data) != self.size_bytes or zlib.crc32(data) != self.checksum:
            raise ValueError(f"{self.size_bytes} bytes from {self.offset_bytes} on are not what was written")
        return data


def disk_error(error: OSError, folder: Path, size_bytes: int, next_step: str) -> DiskError:
    """Return the error for a failed write into a folder."""
    where = path_text(folder)
    needed = format_bytes(size_bytes)
    if error.errno == errno.EDQUOT:  # with a quota, the free space of the disk does not matter
        return DiskError(f"no quota is left: {where} needs {needed} more ({error.strerror}). {next_step}")
    if error.errno != errno.ENOSPC:
        return DiskError(f"cannot write {needed} into {where}: {error.strerror}. {next_step}")
    free = ""
    with contextlib.suppress(OSError):
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        free = f", and {format_bytes(shutil.disk_usage(nearest).free)} are free"
    return DiskError(
        f"the disk is full: {where} has no room for {needed} more{free} ({error.strerror}). {next_step}"
    )


_FILE: Final = re.compile(r"\d+-\d+\.state")


class StateStore:
    """The states of virtual nodes, by partition; several threads may use it.

    A state is kept as a copy of its bytes. A worker's reply is a single memory map that also has the model.
    A view of a few bytes would keep all of it mapped, and a process can have only some 65,000 maps.

    Without a folder all states stay in memory. With a folder, the least recently used states leave the memory
    when its limit is reached. A state in the checkpoint is then read from there. Any other state gets a file
    of its own, which is deleted with the state.
    """

    def __init__(self, folder: Path | None = None, memory_limit_bytes: int = 0) -> None:
        self._folder = folder  # created when the first state is written to it
        self._has_folder = False
        self._limit_bytes = memory_limit_bytes
        self._lock = threading.RLock()
        self._memory: OrderedDict[int, bytes] = OrderedDict()  # the least recently used state first
        self._places: dict[int, FilePlace] = {}  # has the same bytes as the memory if a state is in both
        self._changed: set[int] = set()
        self._versions = itertools.count(1)
        self.memory_bytes = 0

    def put(self, partition: int, data: bytes) -> None:
        """Store a state. If that fails, the earlier state stays."""
        with self._lock:
            if self._is_stored(partition, data):  # most messages do not change the state
                return
            place = None
            if self._folder is not None and len(data) > self._limit_bytes:
                place = self._write(self._folder, partition, data)
            elif self._folder is not None:
                self._make_room(self._folder, partition, len(data))
            self._forget(partition)
            if place is not None:
                self._places[partition] = place
            elif data:
                self._memory[partition] = data
                self.memory_bytes += len(data)
            self._changed.add(partition)

    @contextlib.contextmanager
    def hold_changes(self) -> Iterator[Set[int]]:
        """Prevent changes of states inside the block; yields the partitions changed since the last save."""
        with self._lock:
            yield self._changed

    def read(self, partition: int) -> bytes:
        """Return a state; empty bytes if the node has none."""
        with self._lock:
            data, place = self._memory.get(partition), self._places.get(partition)
            if data is not None:
                self._memory.move_to_end(partition)
            if data is not None or place is None:
                return data or b""
            where = path_text(place.path)
            next_step = (
                "It holds states of virtual nodes, which are lost without it: restore it from a copy if "
                "there is one; otherwise, run the simulation again from its start, and check the disk"
            )
            try:
                return place.read()
            except OSError as error:
                raise FlowerGPUError(f"{where} cannot be read: {error.strerror}. {next_step}") from error
            except ValueError as error:
                raise FlowerGPUError(f"{where} is damaged: {error}. {next_step}") from error

    def size_bytes(self, partition: int) -> int:
        """Return the size of a state in bytes; 0 if it is empty."""
        place = self._places.get(partition)
        return place.size_bytes if place is not None else len(self._memory.get(partition, b""))

    def saved(self, places: Mapping[int, FilePlace]) -> None:
        """Record the places of states in the checkpoint, which now has all states."""
        with self._lock:
            for partition, place in places.items():
                self._delete_file(partition)
                self._places[partition] = place
            self._changed.clear()

    def close(self) -> None:
        """Forget all states, and delete the store's files."""
        with self._lock:
            for partition in [*self._places, *self._memory]:
                self._forget(partition)
        if self._has_folder and self._folder is not None:
            with contextlib.suppress(OSError):  # the folder may have files of others
                self._folder.rmdir()

    def _is_stored(self, partition: int, data: bytes) -> bool:
        place = None if partition in self._memory else self._places.get(partition)
        if place is not None and (place.size_bytes, place.checksum) != (len(data), zlib.crc32(data)):
            return False
        try:
            return self.read(partition) == data
        except FlowerGPUError:  # the stored state is damaged, so the new one must be stored
            return False

    def _make_room(self, folder: Path, newcomer: int, size: int) -> None:
        """Move states out of memory until there is room for a new state of this partition."""
        limit = self._limit_bytes - size + len(self._memory.get(newcomer, b""))
        while self.memory_bytes > limit:
            oldest = next(partition for partition in self._memory if partition != newcomer)
            if oldest not in self._places:
                self._places[oldest] = self._write(folder, oldest, self._memory[oldest])
            self.memory_bytes -= len(self._memory.pop(oldest))

    def _forget(self, partition: int) -> None:
        self.memory_bytes -= len(self._memory.pop(partition, b""))
        self._delete_file(partition)
        self._places.pop(partition, None)

    def _delete_file(self, partition: int) -> None:
        place = self._places.get(partition)
        if place is not None and place.path.parent == self._folder:  # not in the checkpoint
            with contextlib.suppress(OSError):
                place.path.unlink()

    def _write(self, folder: Path, partition: int, data: bytes) -> FilePlace:
        # Each version gets a new file. If it cannot be written, the earlier version is still there.
        path = folder / f"{partition}-{next(self._versions)}.state"
        try:
            if not self._has_folder:
                folder.mkdir(parents=True, exist_ok=True)
                for stale in folder.iterdir():
                    if _FILE.fullmatch(stale.name):  # left by a run that was killed
                        stale.unlink(missing_ok=True)
                self._has_folder = True
            with path.open("xb") as file:
                file.write(data)
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
        return FilePlace(path, 0, len(data), zlib.crc32(data))
