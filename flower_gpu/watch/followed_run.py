"""Follows runs in progress by reading the new lines of their traces.

The problem: ``flower-gpu top`` and ``flower-gpu metrics`` show runs that other processes carry out. A run may
start, finish, be killed or be resumed between two looks. A killed run leaves workers without an end in its
trace.

The objects: a :class:`FollowedRun` has the folder of a run, its history, and a reader that remembers its
position in the trace. :class:`FollowedRuns` has the runs of this account. It compares them with the registry,
and shows a finished run in at least one more look.

Who calls what: a view calls :meth:`FollowedRuns.look` for the runs to show. Then it calls
:meth:`FollowedRuns.read_on` with a time limit, so that a long trace does not block the view. A thread may
call :meth:`FollowedRuns.notice` more often, because a short run could start and finish between two looks. The
classes have no locks, so callers with several threads hold a lock of their own.

Which processes exist: a pid is valid only in its pid namespace. So this module checks processes only if the
trace comes from this host and the process of a registered run is visible. In all other cases it trusts the
trace.
"""

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
from flower_gpu.watch.folds.limits import drop_oldest
from flower_gpu.watch.folds.tally import Tally
from flower_gpu.watch.folds.worker_span import WorkerSpan
from flower_gpu.watch.history import History

# Number of finished runs with a history in memory. It is used if the run is resumed.
_MOST_GONE: Final = 1000
_CHUNK_BYTES: Final = 256 << 10  # takes about ten milliseconds to process
#: A process may appear to have started this much after its recorded start, because a clock may have been set
#: in the meantime. The kernel does not reuse a pid this soon.
_SLACK_S: Final = 10.0


class FollowedRun:
    """A run, with a history of its trace up to the current read position.

    ``run`` is None for an unregistered run.
    """

    def __init__(self, folder: Path, run: RunningRun | None = None, tally: Tally | None = None) -> None:
        self.folder = folder
        self.run = run
        self.is_registered = run is not None  # True while the registry lists the run
        self.label = ""  # unique name among the followed runs
        self.history = History(keep_finished=False, tally=tally)
        self._is_all_read = False
        self._follower = trace.Follower(RunFolder(folder).trace)

    @property
    def name(self) -> str:
        """Name of the app, or of the folder if the app is unknown."""
        return (self.run.name if self.run else "") or self.history.run.name or self.folder.name

    @property
    def pid(self) -> int | None:
        """Pid of the process that started the run."""
        return self.run.pid if self.run else self.history.run.pid

    @property
    def read_part(self) -> float:
        """Fraction of the trace that has been read, from 0 to 1. Ignores lines added since the last read."""
        size = self._follower.size
        return 1.0 if self._is_all_read or not size else min(1.0, self._follower.position / size)

    def read_on(self, until: float) -> bool:
        """Read new events, and return True if the end of the trace was reached.

        Reads at least a chunk, and stops after the first chunk that ends after ``until``, a time of
        ``time.monotonic``.
        """
        while True:
            previous_position = self._follower.position
            self.history.feed(self._follower.read_new(_CHUNK_BYTES))
            self._is_all_read = self._follower.position - previous_position < _CHUNK_BYTES
            if self._is_all_read:
                return True
            if time.monotonic() >= until:
                return False

    @property
    def is_of_this_host(self) -> bool:
        """True if the pids in the trace belong to this host and this pid namespace."""
        # Another host may write to the folder if the file system is shared.
        if self.history.run.host not in ("", platform.node()):
            return False
        # The process of a registered run is alive. If its pid does not exist here, the pids belong to another
        # namespace.
        return not (self.run and self.is_registered) or is_there(self.run.pid, self.run.since)

    def workers(self) -> list[WorkerSpan]:
        """Return the workers that exist, oldest first.

        The trace of a killed run may contain further workers without an end.
        """
        workers = self.history.calls.running
        if not self.is_of_this_host:
            return [] if self.is_over else workers
        is_over = self.is_over
        # Processes of other hosts are known only from the trace. On this host, their pids may belong to other
        # processes.
        return [
            worker
            for worker in workers
            if (not is_over if worker.host else is_there(worker.pid, worker.started_at))
        ]

    @property
    def is_over(self) -> bool:
        """True if the run is known to have finished or to have been killed."""
        return self.history.run.finished_at is not None or bool(self.outcome())

    def outcome(self) -> str:
        """Return the outcome of the run: ``"gone"`` if killed, or empty while it is running or unknown."""
        if self.is_registered or self.history.run.outcome:
            return "" if self.is_registered else self.history.run.outcome
        began = self.history.run.started_at
        if self.run is not None:
            return "gone"
        if self.pid is None or began is None or not self.is_of_this_host:
            return ""
        return "" if is_there(self.pid, began) else "gone"


class FollowedRuns:
    """The registered runs of this account, each with its history.

    A finished run stays in the list for ``ended_s`` seconds, and appears in at least one look. A run may be
    resumed in the same folder. Then it keeps its history, so its earlier events are not counted again.

    ``running``: function that returns the registered runs.
    ``only``: folder of the only run to follow. This run stays in the list for ever.
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
        self._ended_at: dict[str, float] = {}  # by folder
        self._gone: dict[str, FollowedRun] = {}  # finished runs that are no longer shown, by folder

    def notice(self) -> set[str]:
        """Add new runs from the registry, and return the folders of all registered runs.

        A run that finishes before the next look is still shown in that look.
        """
        registered = self._running()
        for run in registered:
            if run.folder not in self._runs:
                gone = self._gone.pop(run.folder, None)
                self._runs[run.folder] = gone or FollowedRun(Path(run.folder), tally=self.tally)
            self._runs[run.folder].run, self._runs[run.folder].is_registered = run, True
        return {run.folder for run in registered}

    def look(self) -> list[FollowedRun]:
        """Compare the runs with the registry, and return the runs to show."""
        now = time.monotonic()
        for folder in [folder for folder, at in self._ended_at.items() if now >= at + self._ended_s]:
            del self._ended_at[folder]
            self._gone[folder] = self._runs.pop(folder)
        drop_oldest(self._gone, _MOST_GONE)
        registered = self.notice()
        for folder, followed in self._runs.items():
            followed.is_registered = folder in registered
            if followed.is_registered:
                self._ended_at.pop(folder, None)
            else:
                self._ended_at.setdefault(folder, now)
        return list(self._runs.values())

    def read_on(self, until: float) -> bool:
        """Read new events of each run, and return True if all traces were read to the end.

        Reads at least a chunk of each trace, even after ``until``.
        """
        return not [run for run in self._runs.values() if not run.read_on(until)]


def is_there(pid: int, since: float) -> bool:
    """Return True if the process with this pid at this time (Unix seconds) is still alive on this host."""
    # Imported here because most commands do not need it.
    import psutil

    try:
        process = psutil.Process(pid)
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return pid > 0 and not has_ended and process.create_time() <= since + _SLACK_S
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
