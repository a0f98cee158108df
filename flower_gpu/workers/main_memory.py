"""The main memory of one process, by kinds.

Pages of mapped files are in the page cache, which the kernel takes back when memory is short: data sets of
Arrow, ``numpy.memmap`` and safetensors, and libraries. They are no memory that a call needs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_LINE: Final = re.compile(rb"^Rss(Anon|File|Shmem):\s+(\d+) kB$", re.MULTILINE)


class MainMemory(NamedTuple):
    """The resident memory of a process: ``RssAnon``, ``RssFile`` and ``RssShmem`` of proc(5)."""

    anonymous_bytes: int = 0
    file_bytes: int = 0  # of mapped files
    shared_bytes: int = 0  # tmpfs and shared anonymous memory, which the kernel cannot take back

    @classmethod
    def of_process(cls, pid: int | str) -> MainMemory:
        """Return the memory of a process; zeros where that is not known."""
        try:
            found = dict(_LINE.findall(Path(f"/proc/{pid}/status").read_bytes()))
        except OSError:  # it has ended, or this is not Linux
            return cls()
        return cls(*(int(found.get(name, 0)) << 10 for name in (b"Anon", b"File", b"Shmem")))

    @property
    def resident_bytes(self) -> int:
        """All three."""
        return sum(self)
