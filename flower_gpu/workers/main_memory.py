"""The main memory of one process, by kind.

Pages of mapped files belong to the page cache, which the kernel reclaims when memory is short. Examples are
data sets of Arrow, ``numpy.memmap``, safetensors, and libraries. So they do not count as memory that a call
needs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_LINE: Final = re.compile(rb"^Rss(Anon|File|Shmem):\s+(\d+) kB$", re.MULTILINE)


class MainMemory(NamedTuple):
    """The resident memory of a process: ``RssAnon``, ``RssFile`` and ``RssShmem`` of proc(5)."""

    anonymous_bytes: int = 0
    file_bytes: int = 0  # pages of mapped files
    shared_bytes: int = 0  # tmpfs and shared anonymous memory, which the kernel cannot reclaim

    @classmethod
    def of_process(cls, pid: int | str) -> MainMemory:
        """Return the memory of a process; zeros if it is unknown."""
        try:
            kib_by_kind = dict(_LINE.findall(Path(f"/proc/{pid}/status").read_bytes()))
        except OSError:  # the process has ended, or this is not Linux
            return cls()
        return cls(*(int(kib_by_kind.get(name, 0)) << 10 for name in (b"Anon", b"File", b"Shmem")))

    @property
    def resident_bytes(self) -> int:
        """Return the sum of all kinds."""
        return sum(self)
