"""Processes that are not our children: finding and ending everything a run has started.

Flower detaches some of its processes into sessions of their own, and a process whose parent ends moves to
another parent. The launcher makes itself that other parent, so that all of them stay below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from flower_gpu.launch.guard import marked

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class ProcessInfo(NamedTuple):
    """One process, as the kernel sees it now."""

    pid: int
    parent: int
    state: str
    started: int  # clock ticks since boot; with the pid it names a process for good

    @property
    def is_zombie(self) -> bool:
        """Ended, and kept only until its parent asks for its status."""
        return self.state in "ZX"


def adopt_orphans(enable: bool) -> bool:
    """Become, or no longer be, the parent of every descendant whose own parent ends.

    Returns
    -------
    bool
        False where the system has no such thing (it is Linux's "child subreaper").
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enable), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def all_processes() -> dict[int, ProcessInfo]:
    """Read every process of this machine; empty where there is no ``/proc``."""
    found: dict[int, ProcessInfo] = {}
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - Path.iterdir costs ten times as much
    except OSError:
        return found
    for name in names:
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    text = file.read()
            except OSError:
                continue  # it has ended
            # The command in parentheses may hold spaces and parentheses itself.
            fields = text[text.rindex(")") + 2 :].split()
            found[int(name)] = ProcessInfo(int(name), int(fields[1]), fields[0], int(fields[19]))
    return found


def descendants(root: int, without: Collection[tuple[int, int]] = ()) -> list[ProcessInfo]:
    """Find all processes below one.

    Parameters
    ----------
    root : int
        Pid of the process.
    without : collection of (int, int)
        Pid and start time of processes to leave out, with everything below them.

    Returns
    -------
    list of ProcessInfo
        Parents before their children.
    """
    by_parent: dict[int, list[ProcessInfo]] = {}
    for process in all_processes().values():
        by_parent.setdefault(process.parent, []).append(process)
    found: list[ProcessInfo] = []
    level = [root]
    while level:
        below = [
            process
            for parent in level
            for process in by_parent.get(parent, ())
            if (process.pid, process.started) not in without
        ]
        found += below
        level = [process.pid for process in below]
    return found


def children_now() -> set[tuple[int, int]]:
    """Pid and start time of our children: those of before a run are not the run's to end."""
    here = os.getpid()
    return {(p.pid, p.started) for p in all_processes().values() if p.parent == here}


def identities(pids: Collection[int]) -> set[tuple[int, int]]:
    """Pid and start time of processes, as far as they run."""
    return {(p.pid, p.started) for p in all_processes().values() if p.pid in pids}


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def reap_adopted(own: Collection[int], without: Collection[tuple[int, int]] = ()) -> None:
    """Collect the status of adopted children that have ended, so that no zombie stays.

    Parameters
    ----------
    own : collection of int
        Pids of children that somebody else waits for: their status must not be taken away.
    without : collection of (int, int)
        As for :func:`descendants`.
    """
    here = os.getpid()
    for process in all_processes().values():
        if (
            process.parent == here
            and process.is_zombie
            and process.pid not in own
            and (process.pid, process.started) not in without
        ):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def kill_all(
    marker: bytes,
    own: Collection[int],
    without: Collection[tuple[int, int]] = (),
    timeout_s: float = 3.0,
) -> list[int]:
    """Kill everything below this process or with a marker in its environment, until nothing is left.

    Parameters
    ----------
    marker : bytes
        As for :func:`flower_gpu.launch.guard.marked`.
    own, without
        As for :func:`reap_adopted`.
    timeout_s : float
        How long to try: a process inside a driver call cannot be killed.

    Returns
    -------
    list of int
        Pids of what is still there.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        reap_adopted(own, without)
        below = {p.pid for p in descendants(os.getpid(), without) if not p.is_zombie}
        left = below.union(marked(marker))
        if not left or time.monotonic() > deadline:
            return sorted(left)
        # Again and again: what was just forked is not in the list yet.
        send(left, signal.SIGKILL)
        time.sleep(0.02)


def describe_exit(returncode: int) -> str:
    """Say how a process ended, from its return code as :mod:`subprocess` gives it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"{signal.Signals(-returncode).name} ({returncode})"
    except ValueError:
        return f"signal {-returncode}"
