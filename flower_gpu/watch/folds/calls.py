"""Folds the events of workers and of their calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

from flower_gpu.trace import Event
from flower_gpu.watch.fields import SERVER, mapping, number, owner_fields, text, whole_number
from flower_gpu.watch.folds.hosts import HostFold
from flower_gpu.watch.folds.leases import LeaseFold, LeaseSpan
from flower_gpu.watch.folds.limits import KEPT_ENTRIES, MOST_OPEN, drop_oldest
from flower_gpu.watch.folds.rounds import RoundFold
from flower_gpu.watch.folds.tally import (
    CANCELLED,
    CONSEQUENCES,
    HOST_LOST,
    OTHER,
    OUT_OF_MEMORY,
    OUTCOMES,
    Tally,
)
from flower_gpu.watch.folds.worker_span import WorkerSpan


@dataclass
class OutOfMemory:
    """A call that ran out of GPU memory. ``then`` is ``"again"``, ``"on the CPU"`` or ``"failed"``."""

    time: float
    uuid: str
    then: str


class CallFold:
    """The workers of a run, and their calls."""

    def __init__(
        self, hosts: HostFold, leases: LeaseFold, rounds: RoundFold, tally: Tally, *, keep_finished: bool
    ) -> None:
        self._hosts = hosts
        self._leases = leases
        self._rounds = rounds
        self._tally = tally
        self._keep_finished = keep_finished
        self._all: list[WorkerSpan] = []  # in the order of their starts; empty if finished items are not kept
        self._running: dict[tuple[str, int], WorkerSpan] = {}  # by call and pid
        #: The last calls that ran out of memory, or all of them if the history keeps finished items.
        self.out_of_memory: list[OutOfMemory] = []
        self._processes: dict[tuple[str, int], int] = {}  # number of each worker process, by host and pid
        self._processes_started = 0
        self._last_round: int | None = None  # round of the last worker that had a round
        self._done_round: int | None = None  # round of _done
        self._done: Counter[str] = Counter()  # finished calls by task
        self._worked_at = 0.0  # time at which the last worker finished

    @property
    def workers(self) -> list[WorkerSpan]:
        """All workers if the history keeps finished items, otherwise the unfinished ones."""
        return self._all if self._keep_finished else self.running

    @property
    def running(self) -> list[WorkerSpan]:
        """Unfinished workers, oldest first."""
        return list(self._running.values())

    @property
    def stuck_since(self) -> float | None:
        """Time since which calls have been waiting for a lease with no worker running.

        It is None if a worker is running or no call is waiting.
        """
        if self._running:
            return None
        waiting = [span.requested_at for span in self._leases.waiting if span.requested_at is not None]
        return max(min(waiting), self._worked_at) if waiting else None

    def in_flight(self, host: str) -> int:
        """Return the number of messages on a host of a Ray cluster, running or waiting for a lease."""
        running = sum(worker.host == host for worker in self.running)
        return running + sum(request.host == host for request in self._leases.waiting)

    def lease_of(self, worker: WorkerSpan) -> LeaseSpan | None:
        """Return the lease of a worker, or None."""
        return self._leases.by_id(worker.lease)

    @property
    def current_round(self) -> int | None:
        """The round with messages in flight.

        If no message is in flight, the highest round of recent workers and of the newest part of a round.
        """
        open_round = self._rounds.open_round
        if open_round is not None and open_round.round is not None:
            return open_round.round
        rounds = [self._last_round, *(worker.round for worker in self.running)]
        rounds += [part.round for part in islice(self._rounds.newest_parts(), 1)]
        return max((number for number in rounds if number is not None), default=None)

    @property
    def done_in_round(self) -> dict[str, int]:
        """Number of finished calls of the current round, by task. Calls without a round do not count."""
        is_current = self._done_round is not None and self._done_round == self.current_round
        return dict(self._done) if is_current else {}

    def fold(self, time: float, event: Event) -> None:
        """Take in an event."""
        match event.get("event"):
            case "worker_started":
                self._begin(time, event)
            case "task_started" if (worker := self._running_of(event)) is not None:
                worker.task_at = time
            case "worker_result" if (worker := self._running_of(event)) is not None:
                worker.result_at = time
            case "progress" if (worker := self._running_of(event)) is not None:
                worker.task_at = worker.task_at or time
                done, total = whole_number(event.get("n")) or 0, whole_number(event.get("total"))
                worker.progress = text(event.get("desc")), done, total
            case "worker_finished":
                self._finish(time, event)
            case "out_of_memory":
                then = text(event.get("then"))
                self._tally.out_of_memory[then if then in CONSEQUENCES else OTHER] += 1
                self.out_of_memory.append(OutOfMemory(time, text(event.get("uuid")), then))
                if not self._keep_finished:
                    del self.out_of_memory[:-KEPT_ENTRIES]
            case "host_lost":
                self._lose_host(time, text(event.get("host")))
            case "run_started" if not self._keep_finished:
                # Workers that the previous process left open were killed with it.
                self._running = {}

    def _begin(self, time: float, event: Event) -> WorkerSpan:
        worker = WorkerSpan(
            **owner_fields(event),
            pid=whole_number(event.get("pid")) or 0,
            start_method=text(event.get("start_method")),
            lease=text(event.get("lease")) or text(event.get("cores_lease")),
            started_at=time,
            client_overrides=mapping(event.get("own")),
        )
        process = (worker.host, worker.pid)
        if event.get("used_again") is not True or process not in self._processes:
            self._processes_started += 1
            self._tally.workers_started += 1
            self._processes[process] = self._processes_started
        worker.process = self._processes[process]
        self._running[worker.call, worker.pid] = worker
        if (lease := self.lease_of(worker)) is not None and worker.call != lease.call:
            self._leases.add_turn(lease, time, worker.client)
        self._last_round = worker.round if worker.round is not None else self._last_round
        if self._keep_finished:
            self._all.append(worker)
        else:
            drop_oldest(self._running, MOST_OPEN)
            drop_oldest(self._processes, MOST_OPEN)
        return worker

    def _finish(self, time: float, event: Event) -> None:
        worker, outcome = self._running_of(event), text(event.get("outcome"))
        self._tally.workers_finished[outcome if outcome in OUTCOMES else OTHER] += 1
        if outcome != CANCELLED and text(event.get("client")) != SERVER:
            self._tally.calls_by_use[event.get("used_again") is True, outcome != "ok"] += 1
        # The line with the start may be missing from the trace.
        if worker is None:
            worker = self._begin(time - (number(event.get("seconds")) or 0.0), event)
        self._count_in_round(worker, outcome)
        if (lease := self.lease_of(worker)) is not None:
            lease.is_used = True
        del self._running[worker.call, worker.pid]
        self._worked_at = time
        worker.finish(time, event)
        self._count_on_host(worker)
        if (open_round := self._rounds.open_round) is not None and worker.round == open_round.round:
            open_round.calls.append(worker)

    def _count_in_round(self, worker: WorkerSpan, outcome: str) -> None:
        # With FedBuff, a worker may handle a message of an earlier round. Such a call does not count.
        if worker.round != (current := self.current_round):
            return
        if current != self._done_round:
            self._done_round = current
            self._done.clear()
        # A call that ran out of memory is normally retried. So only its retry counts as done.
        if outcome != OUT_OF_MEMORY:
            self._done[worker.task] += 1

    def _lose_host(self, time: float, host: str) -> None:
        """End the workers of a lost host, which writes no further events."""
        for worker in self.running:
            if host and worker.host == host:
                del self._running[worker.call, worker.pid]
                worker.finished_at, worker.outcome = time, HOST_LOST
                self._tally.workers_finished[HOST_LOST] += 1
                self._count_on_host(worker)

    def _count_on_host(self, worker: WorkerSpan) -> None:
        if worker.host in self._hosts.by_name:
            outcome = worker.outcome if worker.outcome in OUTCOMES else OTHER
            self._tally.calls_of(worker.host)[outcome] += 1

    def _running_of(self, event: Event) -> WorkerSpan | None:
        return self._running.get((text(event.get("call")), whole_number(event.get("pid")) or 0))
