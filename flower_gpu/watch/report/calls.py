"""The calls of a run: the phases of each, and sums by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from flower_gpu.watch.fields import client_key
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import (
    CANCELLED,
    EXITING,
    HOST_LOST,
    RUNNING,
    STARTING,
    WAITING,
    LeaseSpan,
    WorkerSpan,
)

PHASES: Final = (WAITING, STARTING, RUNNING, EXITING)

#: How calls end that got no worker: the wait for a lease was over, or there was an error before.
NO_LEASE: Final = "no lease"
#: How calls end that have not failed; of one that is given up its message tells why.
_NO_FAILURES: Final = ("ok", HOST_LOST, CANCELLED, "")


@dataclass(frozen=True)
class RunClock:
    """Turns Unix seconds into seconds of a run."""

    start: float  # of the run
    end: float  # of the run, or of the trace
    pauses: tuple[tuple[float, float], ...] = ()  # between the runs of which each went on with the one before

    @classmethod
    def of(cls, history: History) -> RunClock:
        """Return the clock of a run."""
        start = history.started_at if history.started_at is not None else history.first_at
        if start is None:  # there is no event
            return cls(0.0, 0.0)
        end = history.finished_at if history.finished_at is not None else history.last_at
        end = max(start, start if end is None else end)
        pauses, free_from = [], start
        for begin, until in sorted(history.pauses):
            begin, until = max(begin, free_from), min(until, end)
            if begin < until:
                pauses.append((begin, until))
                free_from = until
        return cls(start, end, tuple(pauses))

    @property
    def duration_s(self) -> float:
        """How long the run took."""
        return self.end - self.start - sum(until - begin for begin, until in self.pauses)

    def seconds(self, time: float) -> float:
        """Return the seconds since the start; times outside of the run are its start and its end."""
        time = min(max(time, self.start), self.end)
        paused = sum(min(until, time) - begin for begin, until in self.pauses if begin < time)
        return max(0.0, time - self.start - paused)


@dataclass(frozen=True)
class CallPhase:
    """A phase of a call, in seconds of the run."""

    phase: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class CallTry:
    """A call, or one of several tries of it: the wait for a lease, and the worker."""

    whose: WorkerSpan | LeaseSpan  # the worker; where it got none, what it has asked for
    gpus: tuple[str, ...]  # UUIDs of the GPUs that it had a share of; empty on the CPU, and while it waits
    parts: tuple[CallPhase, ...]  # without gaps, in the order of PHASES, at least one
    outcome: str  # of the worker, or NO_LEASE, or HOST_LOST; empty where the trace does not tell

    @property
    def worker(self) -> WorkerSpan | None:
        """The worker that it came to."""
        return self.whose if isinstance(self.whose, WorkerSpan) else None

    @property
    def begin_s(self) -> float:
        """When it began."""
        return self.parts[0].begin_s

    @property
    def end_s(self) -> float:
        """When it ended, as far as the trace tells."""
        return self.parts[-1].end_s

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a result, and not only its host was lost."""
        return self.outcome not in _NO_FAILURES


def tries_of(history: History, clock: RunClock) -> list[CallTry]:
    """Return all calls of a run and their tries, in the order in which they began."""
    with_worker = {worker.lease for worker in history.workers if worker.lease}
    found = [_of_worker(history, clock, one) for one in history.workers]
    found += [_without_worker(history, clock, one) for one in history.leases if one.id not in with_worker]
    return sorted(found, key=lambda one: (one.begin_s, one.end_s))


def _of_worker(history: History, clock: RunClock, worker: WorkerSpan) -> CallTry:
    lease = history.lease_of(worker)
    is_first = lease is not None and lease.call == worker.call  # others find the lease with the worker
    end = worker.finished_at
    if end is None:
        end = history.over_at(worker.started_at, clock.end)
        if lease is not None and lease.released_at is not None:  # then all of it is over
            end = min(end, max(lease.released_at, worker.started_at))
    granted = lease.granted_at if lease is not None and is_first else None
    task_at = worker.task_at if worker.task_at is not None else end
    result_at = worker.result_at if worker.result_at is not None else end
    times = [worker.started_at if granted is None else granted, task_at, result_at, end]
    phases: Sequence[str] = PHASES[1:]
    if lease is not None and is_first and lease.requested_at is not None:
        times, phases = [lease.requested_at, *times], PHASES
    gpus = tuple(lease.memory_bytes) if lease is not None else ()
    return CallTry(worker, gpus, _parts(clock, phases, times), worker.outcome)


def _without_worker(history: History, clock: RunClock, lease: LeaseSpan) -> CallTry:
    times = [time for time in (lease.requested_at, lease.granted_at) if time is not None]
    end = lease.refused_at if lease.granted_at is None else lease.released_at
    outcome = ""
    if end is None:
        end = history.over_at(times[0], clock.end)
    elif lease.is_lost:
        outcome = HOST_LOST
    elif lease.is_given_up:
        outcome = CANCELLED
    else:
        outcome = NO_LEASE if lease.granted_at is None else "no worker"
    phases = PHASES[:1] if lease.granted_at is None else PHASES[2 - len(times) : 2]
    return CallTry(lease, tuple(lease.memory_bytes), _parts(clock, phases, [*times, end]), outcome)


def _parts(clock: RunClock, phases: Sequence[str], times: Sequence[float]) -> tuple[CallPhase, ...]:
    """Return what lies between times, in order also where processes have looked at the clock too early."""
    found: list[CallPhase] = []
    at = clock.seconds(times[0])
    for phase, time in zip(phases, times[1:], strict=True):
        until = max(at, clock.seconds(time))
        if until > at:
            found.append(CallPhase(phase, at, until))
        at = until
    # What is over in no time at all is there, too.
    return tuple(found) or (CallPhase(phases[-1], at, at),)


def client_rows(tries: Sequence[CallTry]) -> list[dict[str, Any]]:
    """Return a row for each client, in the order of their names; None for a phase that no call had."""
    by_client: dict[str, list[CallTry]] = {}
    for one in tries:
        by_client.setdefault(one.whose.client, []).append(one)
    rows = []
    for client in sorted(by_client, key=client_key):
        own = by_client[client]
        parts = [part for one in own for part in one.parts]
        seconds = {phase: [part.seconds for part in parts if part.phase == phase] for phase in PHASES}
        rows.append(
            {
                "client": client,
                "calls": len({one.whose.call for one in own}),
                "median_s": {phase: median(found) if found else None for phase, found in seconds.items()},
                "max_s": {phase: max(found, default=None) for phase, found in seconds.items()},
                "peak_bytes": highest_peak(own),
                "own": next((one.worker.own for one in reversed(own) if one.worker), {}),
                "failures": sum(one.has_failed for one in own),
            }
        )
    return rows


def highest_peak(tries: Iterable[CallTry]) -> int | None:
    """Return the most memory that one of the workers was seen to use on one GPU."""
    return max((peak for one in tries if one.worker for peak in one.worker.peak_bytes.values()), default=None)


def processes(tries: Iterable[CallTry]) -> int:
    """Return how many workers there were: one may handle several calls, one after the other."""
    return len({one.worker.process for one in tries if one.worker})
