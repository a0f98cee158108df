"""Follows the traces of all runs of this user that go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flower_gpu.apps import registry
from flower_gpu.apps.registry import RunningRun
from flower_gpu.watch.followed_run import FollowedRun
from flower_gpu.watch.tally import Tally

_MOST_ENDED: Final = 1000


class Runs:
    """All runs that go on, and one tally over them and those that have ended meanwhile."""

    def __init__(self, running: Callable[[], list[RunningRun]] = registry.running) -> None:
        self.tally = Tally()
        self._running = running
        self._followed: dict[str, FollowedRun] = {}  # by folder
        # A run may be resumed in the same folder: what its trace has told is not counted again.
        self._ended: dict[str, FollowedRun] = {}

    def notice(self) -> set[str]:
        """Return the folders of the runs that go on; a run that ends before anybody looks is remembered."""
        found = self._running()
        for run in found:
            if run.folder not in self._followed:
                self._follow(run)
        return {run.folder for run in found}

    def look(self) -> list[FollowedRun]:
        """Read what is new, and return the runs; one that has just ended is there once more."""
        for folder in [folder for folder, one in self._followed.items() if not one.is_registered]:
            self._ended[folder] = self._followed.pop(folder)
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        going_on = self.notice()
        # A run ends in its trace before it does in the registry, so nothing comes after this look at it.
        for folder, followed in self._followed.items():
            followed.is_registered = folder in going_on
            followed.read_on(math.inf)
        return list(self._followed.values())

    def _follow(self, run: RunningRun) -> None:
        folder = Path(run.folder)
        followed = self._ended.pop(run.folder, None) or FollowedRun(folder, tally=self.tally)
        followed.run, followed.is_registered = run, True
        # Its folder's name, or the whole path where another run's folder has the same name.
        has_namesake = any(one.label == folder.name for one in self._followed.values())
        followed.label = run.folder if has_namesake else folder.name
        self._followed[run.folder] = followed
