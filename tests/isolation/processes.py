"""What the kernel says about processes (Linux)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


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
        except OSError:  # it went meanwhile
            continue
        state, parent, group = text.rpartition(")")[2].split()[:3]
        yield Status(int(folder.name), state, int(parent), int(group))


def running_in_group(group: int) -> list[int]:
    """Return the processes of a group that are not dead, whoever has to reap them."""
    return [status.pid for status in all_processes() if status.group == group and status.state not in "ZX"]


def is_running(pid: int) -> bool:
    return any(status.pid == pid and status.state not in "ZX" for status in all_processes())


def zombies_of(parent: int) -> list[int]:
    return [status.pid for status in all_processes() if status.parent == parent and status.state == "Z"]


def children_of(parent: int) -> list[int]:
    return [status.pid for status in all_processes() if status.parent == parent]


def descriptors() -> dict[str, str]:
    """Return this process's open descriptors, and what each one is."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[link.name] = str(link.readlink())
        except OSError:  # the one that listed the folder
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Wait for what happens soon, but in another process; the limit only ends a broken test."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
