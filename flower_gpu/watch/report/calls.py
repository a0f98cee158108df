"""The calls of a run with the phases of each call, and figures by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from flower_gpu.watch.fields import client_key
from flower_gpu.watch.folds.leases import LeaseSpan
from flower_gpu.watch.folds.tally import CANCELLED, HOST_LOST
from flower_gpu.watch.folds.worker_span import EXITING, RUNNING, STARTING, WAITING, WorkerSpan
from flower_gpu.watch.history import History

PHASES: Final = (WAITING, STARTING, RUNNING, EXITING)

#: Outcome of a call that got no lease, because its wait timed out or an error came first.
NO_LEASE: Final = "no lease"
#: Outcomes that are not failures. The message of a cancelled call has the reason.
_NO_FAILURES: Final = ("ok", HOST_LOST, CANCELLED, "")


@dataclass(frozen=True)
class RunClock:
    """A conversion of Unix seconds into seconds of a run, without the pauses before it was resumed."""

    start: float  # start of the run, in Unix seconds
    end: float  # end of the run, or the last time in the trace
    pauses: tuple[tuple[float, float], ...] = ()  # begin and end of each pause before the run was resumed

    @classmethod
    def of(cls, history: History) -> RunClock:
        """Return the clock of a run."""
        start = history.run.started_at if history.run.started_at is not None else history.run.first_at
        if start is None:
            # The trace is empty.
            return cls(0.0, 0.0)
        end = history.run.finished_at if history.run.finished_at is not None else history.run.last_at
        end = max(start, start if end is None else end)
        pauses, free_from = [], start
        for begin, until in sorted(history.run.pauses):
            begin, until = max(begin, free_from), min(until, end)
            if begin < until:
                pauses.append((begin, until))
                free_from = until
        return cls(start, end, tuple(pauses))

    @property
    def duration_s(self) -> float:
        """Duration of the run in seconds, without pauses."""
        return self.end - self.start - sum(until - begin for begin, until in self.pauses)

    def seconds(self, time: float) -> float:
        """Return the seconds of the run at a time. Times outside the run are clipped to its start and end."""
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
        """Duration of the phase in seconds."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class CallTry:
    """An attempt to run a call: the wait for a lease and the worker. A retried call has several attempts."""

    span: WorkerSpan | LeaseSpan  # the worker, or the request for a lease if there was no worker
    gpus: tuple[str, ...]  # UUIDs of the leased GPUs; empty on the CPU and during the wait
    parts: tuple[CallPhase, ...]  # one or more phases without gaps, in the order of PHASES
    outcome: str  # outcome of the worker, NO_LEASE or HOST_LOST; empty if it is unknown

    @property
    def worker(self) -> WorkerSpan | None:
        """The worker of this attempt, or None if no worker started."""
        return self.span if isinstance(self.span, WorkerSpan) else None

    @property
    def begin_s(self) -> float:
        """Begin of the attempt, in seconds of the run."""
        return self.parts[0].begin_s

    @property
    def end_s(self) -> float:
        """End of the attempt, in seconds of the run, estimated if the trace has no end."""
        return self.parts[-1].end_s

    @property
    def has_failed(self) -> bool:
        """True if the attempt ended without a result, unless its host was lost or the call was cancelled."""
        return self.outcome not in _NO_FAILURES


def tries_of(history: History, clock: RunClock) -> list[CallTry]:
    """Return all attempts of all calls of a run, in the order of their begin."""
    with_worker = {worker.lease for worker in history.calls.workers if worker.lease}
    tries = [_worker_try(history, clock, worker) for worker in history.calls.workers]
    tries += [
        _lease_try(history, clock, lease) for lease in history.leases.spans if lease.id not in with_worker
    ]
    return sorted(tries, key=lambda attempt: (attempt.begin_s, attempt.end_s))


def _worker_try(history: History, clock: RunClock, worker: WorkerSpan) -> CallTry:
    lease = history.calls.lease_of(worker)
    # Only the first call of a worker waited for the lease. Later calls reuse the worker and its lease.
    is_first = lease is not None and lease.call == worker.call
    end = worker.finished_at
    if end is None:
        end = history.run.over_at(worker.started_at, clock.end)
        # The release of the lease ends the call at the latest.
        if lease is not None and lease.released_at is not None:
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


def _lease_try(history: History, clock: RunClock, lease: LeaseSpan) -> CallTry:
    times = [time for time in (lease.requested_at, lease.granted_at) if time is not None]
    end = lease.refused_at if lease.granted_at is None else lease.released_at
    outcome = ""
    if end is None:
        end = history.run.over_at(times[0], clock.end)
    elif lease.is_lost:
        outcome = HOST_LOST
    elif lease.is_given_up:
        outcome = CANCELLED
    else:
        outcome = NO_LEASE if lease.granted_at is None else "no worker"
    phases = PHASES[:1] if lease.granted_at is None else PHASES[2 - len(times) : 2]
    return CallTry(lease, tuple(lease.memory_bytes), _parts(clock, phases, [*times, end]), outcome)


def _parts(clock: RunClock, phases: Sequence[str], times: Sequence[float]) -> tuple[CallPhase, ...]:
    """Return the phases between consecutive times. Times that go backwards get a phase of length zero.

    Processes read the clock independently, so their times may be slightly out of order.
    """
    parts: list[CallPhase] = []
    at = clock.seconds(times[0])
    for phase, time in zip(phases, times[1:], strict=True):
        until = max(at, clock.seconds(time))
        if until > at:
            parts.append(CallPhase(phase, at, until))
        at = until
    # An attempt that took no measurable time still has one phase.
    return tuple(parts) or (CallPhase(phases[-1], at, at),)


def client_rows(tries: Sequence[CallTry]) -> list[dict[str, Any]]:
    """Return a row for each client, ordered by name. Phases that no call of the client had are None."""
    by_client: dict[str, list[CallTry]] = {}
    for attempt in tries:
        by_client.setdefault(attempt.span.client, []).append(attempt)
    rows = []
    for client in sorted(by_client, key=client_key):
        attempts = by_client[client]
        parts = [part for attempt in attempts for part in attempt.parts]
        seconds = {phase: [part.seconds for part in parts if part.phase == phase] for phase in PHASES}
        rows.append(
            {
                "client": client,
                "calls": len({attempt.span.call for attempt in attempts}),
                "median_s": {
                    phase: median(durations) if durations else None for phase, durations in seconds.items()
                },
                "max_s": {phase: max(durations, default=None) for phase, durations in seconds.items()},
                "peak_bytes": highest_peak(attempts),
                "own": next(
                    (attempt.worker.client_overrides for attempt in reversed(attempts) if attempt.worker), {}
                ),
                "failures": sum(attempt.has_failed for attempt in attempts),
            }
        )
    return rows


def highest_peak(tries: Iterable[CallTry]) -> int | None:
    """Return the highest memory in bytes that a single worker was seen to use on a single GPU, or None."""
    return max(
        (peak for attempt in tries if attempt.worker for peak in attempt.worker.peak_bytes.values()),
        default=None,
    )


def processes(tries: Iterable[CallTry]) -> int:
    """Return the number of worker processes. A worker may have handled several calls in turn."""
    return len({attempt.worker.process for attempt in tries if attempt.worker})
