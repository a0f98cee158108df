"""Processes as the kernel lists them (Linux), and the calls of a test as its trace lists them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from live_processes import is_running as is_running
from waiting import until

from flower_gpu import trace
from flower_gpu.workers.forkserver import control

T = TypeVar("T")

#: Folder with the POSIX shared memory and semaphores of all processes of the host.
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Status:
    pid: int
    state: str
    parent: int
    group: int


def all_processes() -> Iterator[Status]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:  # The process has ended meanwhile.
            continue
        state, parent, group = text.rpartition(")")[2].split()[:3]
        yield Status(int(folder.name), state, int(parent), int(group))


def running_in_groups(*groups: int) -> list[int]:
    """Return the processes of these groups that have not ended. Zombies count as ended."""
    return [status.pid for status in all_processes() if status.group in groups and status.state not in "ZX"]


def zombies_of(parent: int) -> list[int]:
    return [status.pid for status in all_processes() if status.parent == parent and status.state == "Z"]


def children_of(parent: int) -> list[int]:
    return [status.pid for status in all_processes() if status.parent == parent]


def new_in_shared_memory(before: set[Path]) -> set[Path]:
    """Return the new files in :data:`SHARED_MEMORY` that no unrelated process uses.

    A file that a worker leaves there is unused, or used by its caller or its fork server. Tests that run at
    the same time have files there, too.
    """
    new = set(SHARED_MEMORY.iterdir()) - before
    return {path for path in new if not any(map(_is_other, _users_of(path)))}


def _users_of(path: Path) -> Iterator[int]:
    """Yield the processes that have a file open or mapped. A semaphore is only mapped."""
    for status in all_processes():
        process = Path(f"/proc/{status.pid}")
        with suppress(OSError):  # The process has ended meanwhile, or belongs to another account.
            if f"{path}\n" in (process / "maps").read_text(errors="replace") or any(
                str(path) == str(link.readlink()) for link in (process / "fd").iterdir()
            ):
                yield status.pid


def _is_other(pid: int) -> bool:
    """Return True if a process runs that is not related to this process or its fork servers."""
    parents = {status.pid: status.parent for status in all_processes()}
    if pid not in parents:
        return False
    related = {os.getpid(), *(server.pid for server in control.status())}
    while pid in parents:
        if pid in related:
            return False
        pid = parents[pid]
    return True


def descriptors() -> dict[str, str]:
    """Return the targets of this process's open descriptors, by number."""
    targets = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets[link.name] = str(link.readlink())
        except OSError:  # This descriptor listed the folder and is closed now.
            continue
    return targets


def wait_until(condition: Callable[[], bool], timeout_s: float = 90.0) -> bool:
    """Wait until a condition holds. Return False if it does not hold in time."""
    with suppress(AssertionError):
        return until(condition, timeout_s=timeout_s)
    return False


def settled(look: Callable[[], T]) -> T:
    """Return a value once it has stopped to change, for example after the end of earlier calls."""
    readings = [look()]

    def is_settled() -> bool:
        time.sleep(0.05)
        readings.append(look())
        return readings[-1] == readings[-2]

    assert wait_until(is_settled)
    return readings[-1]


#: The start methods whose workers are separate processes.
SUPERVISED = ("forkserver", "spawn", "fork")


@dataclass
class Run:
    """The calls of one test and what they may leave behind."""

    folder: Path
    temporary: Path

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in trace.read(self.folder / trace.FILE_NAME) if line["event"] == event]

    def pids(self) -> list[int]:
        return [line["pid"] for line in self.events("worker_started")]
