"""Figures of a run's GPUs and calls: the leases on each GPU over time, and totals."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from flower_gpu.watch.fields import SERVER
from flower_gpu.watch.folds.failures import reason_of
from flower_gpu.watch.folds.hosts import GPUInfo, GPUSample, HostSpan
from flower_gpu.watch.folds.worker_span import STARTING, WAITING
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import PHASES, CallTry, RunClock, highest_peak, processes

# Maximum delay between a release and its event in the trace, in seconds. In between another call may have got
# the memory. A killed process writes no release at all.
_LATE_S: Final = 5.0


@dataclass
class HeldPart:
    """A lease's memory on one GPU while it serves one client. Times are in seconds of the run."""

    client: str
    begin_s: float
    end_s: float
    memory_bytes: int
    is_released: bool = True  # the trace has the release
    turns: Sequence[tuple[float, str]] = ()  # later clients of the same worker, each with its begin

    def by_client(self) -> Iterator[HeldPart]:
        """Yield a part for each client in turn, because a worker may serve several clients."""
        turns = [(self.begin_s, self.client), *(turn for turn in self.turns if turn[0] < self.end_s)]
        ends = [*(begin_s for begin_s, _ in turns[1:]), self.end_s]
        for (begin_s, client), end_s in zip(turns, ends, strict=True):
            if begin_s < end_s or len(turns) == 1:
                yield HeldPart(client, begin_s, end_s, self.memory_bytes, self.is_released)


def holdings_of(history: History, clock: RunClock, uuid: str) -> list[HeldPart]:
    """Return the leases on a GPU by client, in the order of their begin.

    The ledger grants memory only when it is free. So if a lease needs the memory of an earlier lease, the
    earlier lease had already ended, even if its release was written later.
    """
    gpu = history.hosts.gpus.get(uuid)
    capacity = None if gpu is None else gpu.capacity_bytes
    holdings = []
    for lease in history.leases.spans:
        if lease.granted_at is not None and uuid in lease.memory_bytes:
            released_at = lease.released_at
            end = history.run.over_at(lease.granted_at, clock.end) if released_at is None else released_at
            begin_s, end_s = clock.seconds(lease.granted_at), clock.seconds(max(end, lease.granted_at))
            nbytes = lease.memory_bytes[uuid]
            turns = [(clock.seconds(time), client) for time, client in lease.turns]
            holdings.append(HeldPart(lease.client, begin_s, end_s, nbytes, released_at is not None, turns))
    holdings.sort(key=lambda holding: holding.begin_s)
    active: list[HeldPart] = []
    for new in holdings:
        active = [holding for holding in active if holding.end_s > new.begin_s]
        over = sum(holding.memory_bytes for holding in active) + new.memory_bytes - (capacity or 0)
        late = [
            holding for holding in active if not holding.is_released or holding.end_s - new.begin_s <= _LATE_S
        ]
        for holding in sorted(
            late, key=lambda holding: (not holding.is_released, holding.end_s, holding.begin_s)
        ):
            if capacity is None or over <= 0 or new.memory_bytes > capacity:
                break
            holding.end_s = new.begin_s
            over -= holding.memory_bytes
            active.remove(holding)
        active.append(new)
    parts = [part for holding in holdings for part in holding.by_client()]
    return sorted(parts, key=lambda part: part.begin_s)


def steps(spans: Iterable[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Return the times at which the sum over spans (begin, end, amount) changes, and the sum after each."""
    changes: dict[float, float] = {}
    for begin, end, amount in spans:
        changes[begin] = changes.get(begin, 0) + amount
        changes[end] = changes.get(end, 0) - amount
    seconds = sorted(changes)
    return seconds, list(itertools.accumulate(changes[at] for at in seconds))


def leased_steps(holdings: Sequence[HeldPart]) -> tuple[list[float], list[float]]:
    """Return the times at which the leased memory changed, and the leased bytes after each change."""
    return steps((holding.begin_s, holding.end_s, holding.memory_bytes) for holding in holdings)


class GPUTotals:
    """Totals of a GPU over a run. Sizes are in bytes. Figures that the driver does not report are None."""

    def __init__(self, gpu: GPUInfo, holdings: Sequence[HeldPart], samples: Sequence[GPUSample]) -> None:
        used = [sample.used_bytes for sample in samples if sample.used_bytes is not None]
        busy = [
            sample.utilization_percent / 100 for sample in samples if sample.utilization_percent is not None
        ]
        celsius = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
        at_s, sums = leased_steps(holdings)
        spans = zip(itertools.pairwise(at_s), sums, strict=False)
        self.gpu = gpu
        #: Seconds during which the GPU had a lease.
        self.leased_s = sum(end - at for (at, end), is_leased in spans if is_leased)
        #: Sum of bytes times seconds over all leases.
        self.leased_byte_s = sum(
            holding.memory_bytes * (holding.end_s - holding.begin_s) for holding in holdings
        )
        self.most_leased_bytes = max(sums, default=0)  # highest sum of concurrent leases
        self.used_first_bytes = used[0] if used else None  # memory in use before the first worker
        self.used_last_bytes = used[-1] if used else None
        self.used_most_bytes = max(used, default=None)
        self.busy = fmean(busy) if busy else None  # mean utilization, from 0 to 1
        self.hottest_c = max(celsius, default=None)

    def leased_share(self, duration_s: float) -> float | None:
        """Return the fraction of the time during which the GPU had a lease."""
        return _share(self.leased_s, duration_s)

    def capacity_share(self, duration_s: float) -> float | None:
        """Return the fraction of the GPU's memory for leases that was leased, averaged over the time."""
        return _share(self.leased_byte_s, (self.gpu.capacity_bytes or 0) * duration_s)


class HostTotals:
    """Totals of a host of a Ray cluster over a run, from the calls on this host."""

    def __init__(
        self, history: History, clock: RunClock, host: HostSpan, tries_of_host: Sequence[CallTry]
    ) -> None:
        gpus = [history.hosts.gpus[uuid] for uuid in host.gpus if uuid in history.hosts.gpus]
        self.host = host
        self.calls = len({attempt.span.call for attempt in tries_of_host})
        self.failed = sum(attempt.has_failed for attempt in tries_of_host)
        self.workers = processes(tries_of_host)
        #: Seconds of all workers on this host together.
        self.busy_s = sum(
            (part.seconds for attempt in tries_of_host for part in attempt.parts if part.phase != WAITING),
            0.0,
        )
        self.gpus = Counter(gpu.name or gpu.uuid for gpu in gpus)  # number of GPUs by model
        self.joined_s = None if host.joined_at is None else clock.seconds(host.joined_at)
        self.lost_s = None if host.lost_at is None else clock.seconds(host.lost_at)  # last loss of the host


@dataclass
class AlikeFailures:
    """Failures of calls with the same outcome and the same error."""

    description: str  # outcome and first line of the error
    details: str = ""  # the first traceback of these failures
    count: int = 0
    clients: set[str] = field(default_factory=set)

    @classmethod
    def all_of(cls, tries: Sequence[CallTry]) -> list[AlikeFailures]:
        """Return the failures grouped by outcome and error, most frequent first."""
        failures: dict[str, AlikeFailures] = {}
        for attempt in tries:
            if attempt.has_failed:
                error, traceback = (
                    (attempt.worker.error, attempt.worker.traceback) if attempt.worker else ("", "")
                )
                description = ": ".join(filter(None, (attempt.outcome, reason_of(error))))
                alike = failures.setdefault(description, cls(description))
                alike.details = alike.details or traceback
                alike.count += 1
                alike.clients.add(attempt.span.client)
        return sorted(failures.values(), key=lambda failure: -failure.count)


class Totals:
    """Totals of a run. Times are in seconds. ``holdings``: leases on each GPU by its UUID."""

    def __init__(
        self,
        history: History,
        clock: RunClock,
        tries: Sequence[CallTry],
        holdings: Mapping[str, Sequence[HeldPart]],
    ) -> None:
        self.duration_s = clock.duration_s
        #: The GPUs that the run could use.
        self.gpus = [
            GPUTotals(gpu, holdings[gpu.uuid], history.hosts.samples.get(gpu.uuid, ()))
            for gpu in history.hosts.gpus_of_run
        ]
        self.phase_s = dict.fromkeys(PHASES, 0.0)  # sums over all calls
        for part in (part for attempt in tries for part in attempt.parts):
            self.phase_s[part.phase] += part.seconds
        self.calls = len({attempt.span.call for attempt in tries})  # a retried call counts once
        self.workers = processes(attempt for attempt in tries if attempt.span.client != SERVER)
        self.server_workers = processes(attempt for attempt in tries if attempt.span.client == SERVER)
        self.unfinished = sum(not attempt.outcome for attempt in tries)
        #: Number of attempts by outcome, most frequent first. ``failures`` has only the outcomes of failures.
        self.outcomes = dict(Counter(attempt.outcome for attempt in tries if attempt.outcome).most_common())
        self.failures = dict(
            Counter(attempt.outcome for attempt in tries if attempt.has_failed).most_common()
        )
        self.errors = AlikeFailures.all_of(tries)
        #: Highest memory that a single worker was seen to use on a single GPU.
        self.peak_bytes = highest_peak(tries)
        on_host: dict[str, list[CallTry]] = {}
        for attempt in tries:
            on_host.setdefault(attempt.span.host, []).append(attempt)
        #: The hosts of a Ray cluster.
        self.hosts = [
            HostTotals(history, clock, host, on_host.get(name, ()))
            for name, host in history.hosts.by_name.items()
        ]

    @property
    def gpu_s(self) -> float:
        """Seconds of the run multiplied by the number of its GPUs."""
        return len(self.gpus) * self.duration_s

    @property
    def leased_s(self) -> float:
        """Seconds of all GPUs together during which they had a lease."""
        return sum(gpu.leased_s for gpu in self.gpus)

    @property
    def idle_share(self) -> float | None:
        """Fraction of the GPUs' time without a lease."""
        leased = _share(self.leased_s, self.gpu_s)
        return None if leased is None else 1 - leased

    @property
    def capacity_share(self) -> float | None:
        """Fraction of all memory for leases that was leased, averaged over the run."""
        capacity = sum(totals.gpu.capacity_bytes or 0 for totals in self.gpus) * self.duration_s
        return _share(sum(totals.leased_byte_s for totals in self.gpus), capacity)

    def phase_share(self, phase: str) -> float | None:
        """Return the fraction of the calls' time that was spent in a phase."""
        return _share(self.phase_s[phase], sum(self.phase_s.values()))

    @property
    def lost_s(self) -> float:
        """Seconds that calls spent on waiting for a lease and on starting a worker."""
        return self.phase_s[WAITING] + self.phase_s[STARTING]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
