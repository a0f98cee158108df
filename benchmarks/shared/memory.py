"""How much memory processes hold, from /proc."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from benchmarks.shared.processes import descendants
from benchmarks.shared.weights import MB

_SIGNS = {"Size:": 1, "Rss:": 1, "Anonymous:": -1}
_INTERVAL_S = 0.2  # between samples
_SHARE = 0.05  # of one core, at most: a sample reads much of /proc
_MEMFD, _FILES = ("/memfd:",), ("/memfd:", "/dev/shm/")


def resident_mb(pid: int) -> float:
    """Return a process's RSS; 0 when it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    return 0.0


def proportional_mb(pids: Iterable[int]) -> float:
    """Return the sum of PSS: what processes share is counted once among them."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += _proportional(pid)[0]
    return total / MB


def hidden_files_mb(pids: Iterable[int]) -> float:
    """Return the memory that memory files hold beyond what RSS and PSS of these processes show.

    Those count pages of a memory file once a process has mapped and touched them, the others in nothing.
    """
    held: dict[int, int] = {}
    shown: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):  # it ends meanwhile
            for (_, inode), size in _open_memory_files(pid, _MEMFD):
                held[inode] = max(held.get(inode, 0), size)
            for inode, (size, resident) in _mapped_memory_files(pid).items():
                held[inode] = max(held.get(inode, 0), size)
                shown[inode] = max(shown.get(inode, 0), resident)
    return sum(max(0, size - shown.get(inode, 0)) for inode, size in held.items()) / MB


def _open_memory_files(pid: int, kinds: tuple[str, ...]) -> Iterable[tuple[tuple[int, int], int]]:
    """Yield device and inode of each, and how many bytes are allocated."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(link.readlink()).startswith(kinds):
                status = link.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * 512


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


class Sampler:
    """Looks at everything below this process, again and again, in a thread.

    Attributes
    ----------
    samples : list of (float, float)
        When, as ``time.time()`` gives it, and how many MB.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    @property
    def peak_mb(self) -> float:
        return max(mb for _, mb in self.samples)

    def at(self, moment: float) -> float:
        """Return how many MB there were at a moment."""
        return min(self.samples, key=lambda sample: abs(sample[0] - moment))[1]

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        cost_s = 0.0
        while not self._done.wait(max(_INTERVAL_S, cost_s / _SHARE)):
            began_s = time.thread_time()
            self.samples.append((time.time(), tree_mb(descendants(os.getpid()))))
            cost_s = time.thread_time() - began_s


def tree_mb(pids: Iterable[int]) -> float:
    """Return what processes hold together: their PSS, and what nobody has mapped of their memory files.

    PSS counts each page once among those who have mapped and touched it. Memory files hold more: what was
    written by ``write``, or touched by somebody who has ended. Those are counted by what is allocated for
    them, once, in the place of what PSS shows of shared memory.
    """
    total = shared = 0
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):  # it ends meanwhile
            pss, shmem = _proportional(pid)
            total += pss
            shared += shmem
            for inode, size in _open_memory_files(pid, _FILES):
                files[inode] = size
    return (total + max(0, sum(files.values()) - shared)) / MB


def _proportional(pid: int) -> tuple[int, int]:
    """Return the PSS of a process, and how much of that is shared memory, in bytes."""
    found = {"Pss": 0, "Pss_Shmem": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * 1024
    return found["Pss"], found["Pss_Shmem"]
