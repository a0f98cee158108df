"""Runs, followed by their traces while they go on."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.apps.recording import RunningRun, running_runs
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import Tally, WorkerSpan, drop_oldest

_MOST_GONE: Final = 1000
_CHUNK_BYTES: Final = 256 << 10  # takes about ten milliseconds
#: Clocks may have been set meanwhile; a process number is not given out again this soon.
_SLACK_S: Final = 10.0


class FollowedRun:
    """A run and its history, as far as its trace has been read; ``run`` is None for an unregistered run."""

    def __init__(self, folder: Path, run: RunningRun | None = None, tally: Tally | None = None) -> None:
        self.folder = folder
        self.run = run
        self.is_registered = run is not None  # now
        self.label = ""  # names it among the other runs
        self.history = History(keep_finished=False, tally=tally)
        self._is_all_read = False
        self._follower = trace.Follower(RunFolder(folder).trace)

    @property
    def name(self) -> str:
        """The app's name, or the folder's where the app's is not known."""
        return (self.run.name if self.run else "") or self.history.name or self.folder.name

    @property
    def pid(self) -> int | None:
        """The process that has started the run."""
        return self.run.pid if self.run else self.history.pid

    @property
    def read_part(self) -> float:
        """How much of the trace has been read, from 0 to 1; without what is new since it was read last."""
        size = self._follower.size
        return 1.0 if self._is_all_read or not size else min(1.0, self._follower.position / size)

    def read_on(self, until: float) -> bool:
        """Read what is new, until a moment of ``time.monotonic`` at the latest; tell whether that was all."""
        while True:
            before = self._follower.position
            self.history.feed(self._follower.read_new(_CHUNK_BYTES))
            self._is_all_read = self._follower.position - before < _CHUNK_BYTES
            if self._is_all_read:
                return True
            if time.monotonic() >= until:
                return False

    @property
    def is_of_this_host(self) -> bool:
        """Whether pids in the trace are of this host, and of this namespace of pids."""
        if self.history.host not in ("", platform.node()):
            return False  # in a shared folder
        # A registered run's process lives: if there is none with its number, numbers are another namespace's.
        return not (self.run and self.is_registered) or is_there(self.run.pid, self.run.since)

    def workers(self) -> list[WorkerSpan]:
        """Return the workers that are there, the oldest first: a killed run leaves some open in its trace."""
        found = self.history.running
        if not self.is_of_this_host:
            return [] if self.is_over else found
        is_over = self.is_over
        # Of other hosts' processes the trace alone can tell, whatever has their numbers here.
        return [one for one in found if (not is_over if one.host else is_there(one.pid, one.started_at))]

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, or was killed, as far as that can be told here."""
        return self.history.finished_at is not None or bool(self.outcome())

    def outcome(self) -> str:
        """Return how the run ended: ``"gone"`` where it was killed, empty while it goes on or is unknown."""
        if self.is_registered or self.history.outcome:
            return "" if self.is_registered else self.history.outcome
        began = self.history.started_at
        if self.run is not None:
            return "gone"
        if self.pid is None or began is None or not self.is_of_this_host:
            return ""
        return "" if is_there(self.pid, began) else "gone"


class FollowedRuns:
    """The runs of this account, as the registry names them, each followed by its trace.

    One that has ended is shown for ``ended_s`` seconds more, in one look at least. A run may be resumed in
    the same folder: it goes on with its history, and what its trace has told is not counted again.
    ``running`` returns what is registered. With ``only`` it is the run of that folder alone, as long as
    somebody looks.
    """

    def __init__(
        self,
        ended_s: float,
        tally: Tally | None = None,
        running: Callable[[], list[RunningRun]] = running_runs,
        only: Path | None = None,
    ) -> None:
        self.tally = tally
        self.are_all = only is None
        self._ended_s = ended_s if only is None else math.inf
        self._running: Callable[[], list[RunningRun]] = running if only is None else list
        self._runs: dict[str, FollowedRun] = {}  # by folder
        if only is not None:
            self._runs[str(only)] = FollowedRun(only.absolute())
        self._ended_at: dict[str, float] = {}
        self._gone: dict[str, FollowedRun] = {}

    def notice(self) -> set[str]:
        """Return the folders of the runs that go on; a run that ends before anybody looks is remembered."""
        found = self._running()
        for run in found:
            if run.folder not in self._runs:
                gone = self._gone.pop(run.folder, None)
                self._runs[run.folder] = gone or FollowedRun(Path(run.folder), tally=self.tally)
            self._runs[run.folder].run, self._runs[run.folder].is_registered = run, True
        return {run.folder for run in found}

    def look(self) -> list[FollowedRun]:
        """See which runs have begun, and which have ended; return all that are shown."""
        now = time.monotonic()
        for folder in [folder for folder, at in self._ended_at.items() if now >= at + self._ended_s]:
            del self._ended_at[folder]
            self._gone[folder] = self._runs.pop(folder)
        drop_oldest(self._gone, _MOST_GONE)
        going_on = self.notice()
        for folder, followed in self._runs.items():
            followed.is_registered = folder in going_on
            if followed.is_registered:
                self._ended_at.pop(folder, None)
            else:
                self._ended_at.setdefault(folder, now)
        return list(self._runs.values())

    def read_on(self, until: float) -> bool:
        """Read what is new, each run for a moment at least; tell whether that was all."""
        return not [run for run in self._runs.values() if not run.read_on(until)]


def is_there(pid: int, since: float) -> bool:
    """Tell whether the process that had this number at this time (Unix seconds) lives on this host."""
    import psutil  # here: most commands do without

    try:
        process = psutil.Process(pid)
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return pid > 0 and not has_ended and process.create_time() <= since + _SLACK_S
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
