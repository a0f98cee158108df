"""The memory of a tree of processes while it runs."""

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

_INTERVAL_S = 0.2
_SHARE = 0.05  # of one core, at most: a sample reads much of /proc
_FILES = ("/memfd:", "/dev/shm/")


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
            for inode, size in _open_memory_files(pid):
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


def _open_memory_files(pid: int) -> Iterable[tuple[tuple[int, int], int]]:
    """Yield device and inode of each, and how many bytes are allocated."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(link.readlink()).startswith(_FILES):
                status = link.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * 512
