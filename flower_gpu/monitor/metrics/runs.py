"""Follows the traces of all runs of this user that go on."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flower_gpu import trace
from flower_gpu.monitor.metrics.counts import RunCounts, Totals
from flower_gpu.run import registry
from flower_gpu.run.registry import RunningRun

_PIECE_BYTES: Final = 1 << 20  # of a trace that is taken in at once: parsed, it is some times as large
_MOST_ENDED: Final = 1000


@dataclass
class FollowedRun:
    """A run, and what its trace has told so far.

    Parameters
    ----------
    label : str
        Names it: its folder without what is in front, or all of that where another one is called so.
    run : RunningRun
        What the registry says of it.
    counts : RunCounts
        What its trace says.
    goes_on : bool
        False once it is over.
    """

    label: str
    run: RunningRun
    counts: RunCounts
    goes_on: bool = True


@dataclass
class _Ended:
    """Where to go on if a run is resumed in the same folder: what was counted is not counted again."""

    follower: trace.Follower
    highest_round: int


class Runs:
    """All runs that go on, and the sums over them and those that have ended meanwhile.

    Parameters
    ----------
    running : callable
        Returns the runs that go on.
    """

    def __init__(self, running: Callable[[], list[RunningRun]] = registry.running) -> None:
        self.totals = Totals()
        self._running = running
        self._followed: dict[str, tuple[FollowedRun, trace.Follower]] = {}
        self._ended: dict[str, _Ended] = {}

    def notice(self) -> None:
        """Remember the runs that there are: one may be over before anybody looks, and its trace stays."""
        for run in self._running():
            if run.folder not in self._followed:
                self._follow(run)

    def look(self) -> list[FollowedRun]:
        """Read what is new, and return the runs; one that has just ended is there once more."""
        going_on = {run.folder: run for run in self._running()}
        for folder in [folder for folder, (followed, _) in self._followed.items() if not followed.goes_on]:
            self._forget(folder)
        for folder, run in going_on.items():
            if folder not in self._followed:
                self._follow(run)
        # A run ends in its trace before it does in the registry, so nothing comes after this look at it.
        for folder, (followed, follower) in self._followed.items():
            followed.goes_on = folder in going_on
            _read_on(follower, followed.counts)
            _drop_killed(followed)
        return [followed for followed, _ in self._followed.values()]

    def _follow(self, run: RunningRun) -> None:
        before = self._ended.pop(run.folder, None)
        if before is None:
            before = _Ended(trace.Follower(Path(run.folder, trace.FILE_NAME)), 0)
        labels = {followed.label for followed, _ in self._followed.values()}
        name = Path(run.folder).name
        label = run.folder if name in labels else name
        counts = RunCounts(self.totals, before.highest_round)
        self._followed[run.folder] = FollowedRun(label, run, counts), before.follower

    def _forget(self, folder: str) -> None:
        followed, follower = self._followed.pop(folder)
        self._ended[folder] = _Ended(follower, followed.counts.highest_round)
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]


def _read_on(follower: trace.Follower, counts: RunCounts) -> None:
    while True:
        before = follower.position
        for event in follower.read_new(_PIECE_BYTES):
            counts.feed(event)
        if follower.position == before:
            return


def _drop_killed(followed: FollowedRun) -> None:
    """Drop workers whose end nobody could write down, because who started them was killed, too."""
    counts, run = followed.counts, followed.run
    if not followed.goes_on:
        counts.workers.clear()
    # Pids mean something only on the host, and in the namespace of pids, that they are from.
    elif counts.host == platform.node() and _is_there(run.pid):
        for key in [key for key, worker in counts.workers.items() if not _is_there(worker.pid)]:
            del counts.workers[key]


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid > 0
