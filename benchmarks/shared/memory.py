"""How much memory processes hold, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from benchmarks.shared.weights import MB

_SIGNS = {"Size:": 1, "Rss:": 1, "Anonymous:": -1}


def resident_mb(pid: int) -> float:
    """Return a process's RSS; 0 when it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    return 0.0


def proportional_mb(pids: Iterable[int]) -> float:
    """Return the sum of PSS: what processes share is counted once among them."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024 / MB
    return total


def hidden_files_mb(pids: Iterable[int]) -> float:
    """Return the memory that memory files hold beyond what RSS and PSS of these processes show.

    Those count pages of a memory file once a process has mapped and touched them, the others in nothing.
    """
    held: dict[int, int] = {}
    shown: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):  # it ends meanwhile
            for inode, size in _open_memory_files(pid):
                held[inode] = max(held.get(inode, 0), size)
            for inode, (size, resident) in _mapped_memory_files(pid).items():
                held[inode] = max(held.get(inode, 0), size)
                shown[inode] = max(shown.get(inode, 0), resident)
    return sum(max(0, size - shown.get(inode, 0)) for inode, size in held.items()) / MB


def _open_memory_files(pid: int) -> Iterable[tuple[int, int]]:
    """Yield inode and allocated size."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(link.readlink()).startswith("/memfd:"):
                status = link.stat()
                yield status.st_ino, status.st_blocks * 512


def _mapped_memory_files(pid: int) -> dict[int, tuple[int, int]]:
    """Return per inode the size that is mapped and what RSS shows of the file (not of private copies)."""
    if "/memfd:" not in Path(f"/proc/{pid}/maps").read_text():
        return {}  # smaps takes much longer
    found: dict[int, tuple[int, int]] = {}
    inode: int | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):  # the line of a mapping: range, rights, offset, device, inode, name
            inode = int(fields[4]) if len(fields) == 6 and fields[5].startswith("/memfd:") else None
        elif inode is not None and fields[0] in _SIGNS:
            size, resident = found.get(inode, (0, 0))
            amount = int(fields[1]) * 1024
            if fields[0] == "Size:":
                found[inode] = size + amount, resident
            else:
                found[inode] = size, resident + _SIGNS[fields[0]] * amount
    return found
