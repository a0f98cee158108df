"""Memory of processes, from /proc."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from benchmarks.shared.processes import descendants
from benchmarks.shared.weights import MB

_INTERVAL_S = 0.2
#: Share of one core that samples may take, because each of them reads much of /proc.
_MAX_CORE_SHARE = 0.05


def proportional_mb(pids: Iterable[int]) -> float:
    """Return the sum of the processes' PSS, which counts each shared page once."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += _proportional(pid)[0]
    return total / MB


def tree_mb(pids: Iterable[int]) -> float:
    """Return the memory of several processes together: their PSS and all pages of their memory files.

    PSS counts only pages that a process has mapped and touched. A memory file may hold more, after a
    ``write``, or after the exit of a process. So PSS without shared memory is added to the allocated size
    of each memory file.
    """
    total = shared = 0
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):  # The process has just exited.
            pss, pss_shmem = _proportional(pid)
            total += pss
            shared += pss_shmem
            files |= _open_memory_files(pid)
    return (total + max(0, sum(files.values()) - shared)) / MB


def _open_memory_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the allocated bytes of each memory file, by device and inode."""
    files = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # The file was closed meanwhile.
            if str(link.readlink()).startswith(("/memfd:", "/dev/shm/")):
                status = link.stat()
                files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return files


def _proportional(pid: int) -> tuple[int, int]:
    """Return the PSS of a process, and the shared memory in it, in bytes."""
    sizes = {"Pss": 0, "Pss_Shmem": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes["Pss"], sizes["Pss_Shmem"]


class Sampler:
    """A thread that samples the memory of all processes below this one, while it is entered."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        cost_s = 0.0
        while not self._done.wait(max(_INTERVAL_S, cost_s / _MAX_CORE_SHARE)):
            began_s = time.thread_time()
            self.peak_mb = max(self.peak_mb, tree_mb(descendants(os.getpid())))
            cost_s = time.thread_time() - began_s
