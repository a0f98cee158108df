"""One run, followed by its trace while it goes on."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.monitor.history import History
from flower_gpu.monitor.spans import Evaluation, LeaseSpan, WorkerSpan
from flower_gpu.monitor.top import processes
from flower_gpu.monitor.top.snapshot import RunRow
from flower_gpu.run.registry import RunningRun

_CHUNK_BYTES: Final = 256 << 10  # takes about ten milliseconds


class RunWatch:
    """Follows a run.

    Parameters
    ----------
    folder : Path
        Where its trace is.
    run : RunningRun, optional
        What the registry says of it; None for one that is not registered.

    Attributes
    ----------
    is_registered : bool
        Whether the registry has it now.
    history : History
        What is under way, as far as the trace has been read.
    used_leases : set of str
        Those held now, of which a worker has done a call already.
    """

    def __init__(self, folder: Path, run: RunningRun | None = None) -> None:
        self.folder = folder
        self.run = run
        self.is_registered = run is not None
        self.history = History(keep_finished=False)
        self.used_leases: set[str] = set()
        self._calls_done: Counter[str] = Counter()
        self._calls_round: int | None = None
        self._path = folder / trace.FILE_NAME
        self._follower = trace.Follower(self._path)

    @property
    def name(self) -> str:
        """The app's name, or the folder's where it is not told."""
        return (self.run.name if self.run else "") or self.history.name or self.folder.name

    @property
    def pid(self) -> int | None:
        """The process that has started it."""
        return self.run.pid if self.run else self.history.pid

    @property
    def read_part(self) -> float:
        """How much of the trace has been read, from 0 to 1."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return 1.0
        return min(1.0, self._follower.position / size) if size else 1.0

    def read_on(self, until: float) -> bool:
        """Read what is new, no longer than until ``until`` on the clock of ``time.monotonic``.

        Returns
        -------
        bool
            Whether that was all.
        """
        while True:
            before = self._follower.position
            events = self._follower.read_new(_CHUNK_BYTES)
            for event in events:
                self._count(event)
            self.history.feed(events)
            if self._follower.position - before < _CHUNK_BYTES:
                return True
            if time.monotonic() >= until:
                return False

    def _count(self, event: Mapping[str, Any]) -> None:
        """Note what a history without an end to it would have to keep."""
        kind, lease = event.get("event"), event.get("lease")
        if kind == "worker_finished":
            if isinstance(lease, str):
                self.used_leases.add(lease)
            number = event.get("round")
            if number != self._calls_round:
                self._calls_round = number if type(number) is int else None
                self._calls_done.clear()
            if event.get("outcome") != "out of memory":  # most are tried again
                self._calls_done[str(event.get("task"))] += 1
        elif kind == "lease_released" and isinstance(lease, str):
            self.used_leases.discard(lease)
        elif kind == "run_started":
            self.used_leases.clear()

    @property
    def is_of_this_host(self) -> bool:
        """Whether its processes are this host's; a shared folder may have another one's run."""
        return self.history.host in ("", platform.node())

    def workers(self) -> list[WorkerSpan]:
        """Return the workers that are there, the oldest first: a killed run leaves some open in its trace."""
        found = self.history.running
        if not self.is_of_this_host:
            return [] if self.history.finished_at is not None else found
        return [one for one in found if processes.is_there(one.pid, one.started_at)]

    def leases(self) -> dict[str, LeaseSpan]:
        """Return the leases that are held, by id, as far as the trace tells."""
        return {span.id: span for span in self.history.leases if span.id}

    def requests(self) -> list[LeaseSpan]:
        """Return the requests that wait, as far as the trace tells."""
        return self.history.waiting

    def outcome(self) -> str:
        """Tell how it ended; empty while it goes on, or where nobody knows."""
        if self.is_registered:
            return ""
        if self.history.outcome:
            return self.history.outcome
        pid, began = self.pid, self.history.started_at
        if self.run is not None:
            return "gone"
        if pid is None or began is None or not self.is_of_this_host or processes.is_there(pid, began):
            return ""
        return "gone"

    def row(self, label: str, now: float) -> RunRow:
        """Return what is shown of it."""
        history, open_round = self.history, self.history.open_round
        began = self.run.since if self.run else history.started_at
        until = now if history.finished_at is None else history.finished_at
        last = _last_evaluation(history)
        # What is of no round is no message: initial weights, for example.
        is_counted = self._calls_round is not None and self._calls_round == history.current_round
        return RunRow(
            run=label,
            kind=self.run.kind if self.run else history.kind,
            folder=str(self.folder),
            pid=self.pid,
            seconds=None if began is None else max(0.0, until - began),
            round=history.current_round,
            num_rounds=history.num_rounds,
            task=open_round.task if open_round else "",
            messages_done=open_round.finished if open_round else None,
            messages=open_round.messages if open_round else None,
            calls_done=dict(self._calls_done) if is_counted else {},
            metrics=dict(last.metrics) if last else {},
            metrics_round=last.round if last else None,
            metrics_task=last.task if last else "",
            outcome=self.outcome(),
            read_part=self.read_part,
        )


def _last_evaluation(history: History) -> Evaluation | None:
    """Return the last metrics of an evaluation, or of training where nothing else has any."""
    told = [one for one in history.evaluations if one.metrics]
    return next((one for one in reversed(told) if one.task != "train"), told[-1] if told else None)
