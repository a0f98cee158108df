"""Bytes in files that never change: where they are, and errors of the disk that has them."""

from __future__ import annotations

import contextlib
import errno
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flower_gpu.errors import FlowerGPUError
from flower_gpu.leases.request import format_bytes
from flower_gpu.printable import path_text

_NEXT = (
    "It holds states of virtual nodes, which are lost without it: bring it back from a copy if there is one, "
    "else run the simulation again from its start, and look after the disk"
)


@dataclass(frozen=True)
class Place:
    """Where in a file the bytes of a state or a model are."""

    path: Path
    offset_bytes: int
    size_bytes: int
    checksum: int  # CRC-32

    def open(self) -> BinaryIO:
        """Open the file, for :meth:`read_from`."""
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise FlowerGPUError(
                f"{path_text(self.path)} cannot be opened: {error.strerror}. {_NEXT}"
            ) from error

    def read_from(self, file: BinaryIO) -> bytes:
        """Return the bytes; raises a FlowerGPUError if they are not what was written."""
        try:
            file.seek(self.offset_bytes)
            data = _read(file, self.size_bytes)
        except OSError as error:
            raise FlowerGPUError(
                f"{path_text(self.path)} cannot be read: {error.strerror}. {_NEXT}"
            ) from error
        if len(data) != self.size_bytes or zlib.crc32(data) != self.checksum:
            raise FlowerGPUError(
                f"{path_text(self.path)} is damaged: {self.size_bytes} bytes from {self.offset_bytes} on are "
                f"not what was written. {_NEXT}"
            )
        return data

    def read(self) -> bytes:
        """Return the bytes; opens the file for that."""
        with self.open() as file:
            return self.read_from(file)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of ``data`` into a file without a buffer: one call writes at most just under 2 GiB."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def disk_error(error: OSError, folder: Path, size_bytes: int, next_step: str) -> FlowerGPUError:
    """Return the error for what could not be written into a folder."""
    where = path_text(folder)
    needed = format_bytes(size_bytes)
    if error.errno == errno.EDQUOT:  # what is free on the disk says nothing
        return FlowerGPUError(
            f"no quota is left: {where} needs {needed} more ({error.strerror}). {next_step}"
        )
    if error.errno != errno.ENOSPC:
        return FlowerGPUError(f"cannot write {needed} into {where}: {error.strerror}. {next_step}")
    free = ""
    with contextlib.suppress(OSError):
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        free = f", and {format_bytes(shutil.disk_usage(nearest).free)} are free"
    return FlowerGPUError(
        f"the disk is full: {where} has no room for {needed} more{free} ({error.strerror}). {next_step}"
    )


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) == size or not data:
        return data
    parts = [data]  # one call reads at most just under 2 GiB
    while size > (found := sum(map(len, parts))) and (more := file.read(size - found)):
        parts.append(more)
    return b"".join(parts)
