"""Where in a file the bytes of records are, and errors of the disk that has them."""

from __future__ import annotations

import contextlib
import errno
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from flower_gpu.errors import DiskError
from flower_gpu.printable import format_bytes, path_text


@dataclass(frozen=True)
class FilePlace:
    """Where in a file, which never changes, the bytes of a state or a model are."""

    path: Path
    offset_bytes: int
    size_bytes: int
    checksum: int  # CRC-32

    def read(self) -> bytes:
        """Return the bytes; raises an OSError, or a ValueError if they are not what was written."""
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
    if error.errno == errno.EDQUOT:  # what is free on the disk says nothing
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
