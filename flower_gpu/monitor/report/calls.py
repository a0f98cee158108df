"""The calls of a run, and which part of its time each has spent with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flower_gpu.monitor.report.clock import Clock
from flower_gpu.monitor.report.recorded import RunHistory
from flower_gpu.monitor.spans import EXITING, RUNNING, STARTING, WAITING, LeaseSpan, WorkerSpan

PHASES: Final = (WAITING, STARTING, RUNNING, EXITING)

#: How calls end that got no worker: the wait for a lease was over, or there was an error before.
NO_LEASE: Final = "no lease"
OK: Final = "ok"


@dataclass(frozen=True)
class Part:
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
    """A call, or one of several tries of it: the wait for a lease, and the worker.

    Parameters
    ----------
    call, client, task, round
        Which one.
    gpus : tuple of str
        UUIDs of the GPUs that it had a share of; empty on the CPU, and while it waits.
    has_worker : bool
        Whether a worker was started.
    process : str
        The same for all calls that one worker handles one after the other.
    parts : tuple of Part
        What it did, without gaps, in the order of :data:`PHASES`; phases that took no time are left out.
    outcome : str
        ``"ok"``, another outcome of a worker, :data:`NO_LEASE`; empty where the trace does not tell.
    error : str
        What was raised.
    peak_bytes : int or None
        The most memory it was seen to use on one GPU.
    """

    call: str
    client: str
    task: str
    round: int | None
    gpus: tuple[str, ...]
    has_worker: bool
    process: str
    parts: tuple[Part, ...]
    outcome: str
    error: str = ""
    peak_bytes: int | None = None

    @property
    def begin_s(self) -> float:
        """When it began."""
        return self.parts[0].begin_s if self.parts else 0.0

    @property
    def end_s(self) -> float:
        """When it ended, as far as the trace tells."""
        return self.parts[-1].end_s if self.parts else 0.0

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a result."""
        return self.outcome not in (OK, "")

    def seconds(self, phase: str) -> float:
        """Return how long a phase took."""
        return sum(part.seconds for part in self.parts if part.phase == phase)


def tries_of(history: RunHistory, clock: Clock) -> list[CallTry]:
    """Return all calls of a run and their tries, in the order in which they began."""
    with_worker = {worker.lease for worker in history.workers if worker.lease}
    found = [
        _of_worker(history, clock, worker, number) for number, worker in enumerate(history.workers, start=1)
    ]
    found += [
        _without_worker(history, clock, lease) for lease in history.leases if lease.id not in with_worker
    ]
    return sorted((one for one in found if one.parts), key=lambda one: (one.begin_s, one.end_s))


def _of_worker(history: RunHistory, clock: Clock, worker: WorkerSpan, number: int) -> CallTry:
    lease = history.lease_of(worker)
    is_first = lease is not None and lease.call == worker.call  # others find the lease with the worker
    end = worker.finished_at
    if end is None:
        end = history.over_at(worker.started_at, clock.end)
        if lease is not None and lease.released_at is not None:  # then all of it is over
            end = min(end, max(lease.released_at, worker.started_at))
    granted = lease.granted_at if lease is not None and is_first else None
    # A zygote's worker tells at its end when its task began; it takes milliseconds.
    unknown_task_at = (
        worker.started_at if worker.finished_at is None and worker.start_method == "zygote" else end
    )
    task_at = worker.task_at if worker.task_at is not None else unknown_task_at
    result_at = worker.result_at if worker.result_at is not None else end
    times = [worker.started_at if granted is None else granted, task_at, result_at, end]
    phases: Sequence[str] = PHASES[1:]
    if lease is not None and is_first and lease.requested_at is not None:
        times, phases = [lease.requested_at, *times], PHASES
    return CallTry(
        worker.call,
        worker.client,
        worker.task,
        worker.round,
        tuple(lease.memory_bytes) if lease is not None else (),
        True,
        worker.lease or f"{worker.call} {number}",
        _parts(clock, phases, times),
        worker.outcome,
        worker.error,
        max(worker.peak_bytes.values(), default=None),
    )


def _without_worker(history: RunHistory, clock: Clock, lease: LeaseSpan) -> CallTry:
    times = [time for time in (lease.requested_at, lease.granted_at) if time is not None]
    end = lease.refused_at if lease.granted_at is None else lease.released_at
    outcome = ""
    if end is None:
        end = history.over_at(times[0], clock.end)
    else:
        outcome = NO_LEASE if lease.granted_at is None else "no worker"
    phases = PHASES[:1] if lease.granted_at is None else PHASES[2 - len(times) : 2]
    return CallTry(
        lease.call,
        lease.client,
        lease.task,
        lease.round,
        tuple(lease.memory_bytes),
        False,
        f"{lease.call} {lease.id}",
        _parts(clock, phases, [*times, end]),
        outcome,
    )


def _parts(clock: Clock, phases: Sequence[str], times: Sequence[float]) -> tuple[Part, ...]:
    """Return what lies between times, in order also where processes have looked at the clock too early."""
    found: list[Part] = []
    at = clock.seconds(times[0])
    for phase, time in zip(phases, times[1:], strict=True):
        until = max(at, clock.seconds(time))
        if until > at:
            found.append(Part(phase, at, until))
        at = until
    # What is over in no time at all is there, too.
    return tuple(found) or (Part(phases[-1], at, at),)
