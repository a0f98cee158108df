"""The state of a run, folded from the events of its trace: hosts, leases, workers, rounds and GPUs.

The problem: a trace is a list of events such as ``lease_granted`` or ``round_finished``. Displays, reports
and metrics need the state that results from these events. They must agree, so all of them read a history.

The object: a :class:`History` takes in one event after the other, and hands each to its folds, one for each
topic. It reads no files except in :meth:`History.read`, starts no threads and has no locks. Code that shares
it between threads has to serialize the calls.

Terms: a *fold* is the part of the history about one topic: see :mod:`flower_gpu.watch.folds`. A *span* is a
host, lease or worker with the times at which it began and ended. A *call* is the handling of one message by a
worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flower_gpu import trace
from flower_gpu.trace import Event
from flower_gpu.watch.fields import number
from flower_gpu.watch.folds.calls import CallFold
from flower_gpu.watch.folds.hosts import HostFold
from flower_gpu.watch.folds.leases import LeaseFold
from flower_gpu.watch.folds.rounds import RoundFold
from flower_gpu.watch.folds.run import RunFold
from flower_gpu.watch.folds.tally import Tally


class History:
    """The state of a run, according to the events received until now.

    All displays, reports and metrics of a run read its history. The events arrive one by one, so a run can be
    followed while it is in progress.

    With ``keep_finished=False``, the history drops finished items, so the memory of this process stays
    bounded during a long run. Of the rounds it then keeps many recent parts, or all with
    ``keep_rounds=True``.

    Counts go into ``tally`` and are never dropped. Several runs may share a tally.
    """

    def __init__(
        self, *, keep_finished: bool = True, keep_rounds: bool = False, tally: Tally | None = None
    ) -> None:
        self.tally = tally = Tally() if tally is None else tally
        self.cut_lines = 0  # number of incomplete lines in the trace, which are ignored
        self.run = RunFold(keep_finished=keep_finished)
        self.hosts = HostFold(self.run, tally, keep_finished=keep_finished)
        self.leases = LeaseFold(tally, keep_finished=keep_finished)
        self.rounds = RoundFold(self.run, tally, keep_all=keep_finished or keep_rounds)
        self.calls = CallFold(self.hosts, self.leases, self.rounds, tally, keep_finished=keep_finished)
        self._folds = (self.run, self.hosts, self.leases, self.calls, self.rounds)

    @classmethod
    def read(cls, path: Path, *, keep_finished: bool = True) -> History:
        """Return the history of a trace file, including all rounds."""
        history = cls(keep_finished=keep_finished, keep_rounds=True)

        def count() -> None:
            history.cut_lines += 1

        history.feed(trace.read(path, on_cut=count))
        return history

    def feed(self, events: Iterable[Event]) -> None:
        """Process events, oldest first.

        Unknown and malformed events are ignored, because a full disk may cut a trace at any place.
        """
        for event in events:
            if (time := number(event.get("time"))) is None:
                continue
            self.run.note_time(time)
            if not self.hosts.is_late(event):
                for fold in self._folds:
                    fold.fold(time, event)
