"""What the GPUs of a run and its calls did with their time: who held how much and when, and sums."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from flower_gpu.watch.fields import SERVER
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import PHASES, CallTry, RunClock, highest_peak, processes
from flower_gpu.watch.spans import STARTING, WAITING, GPUInfo, GPUSample, HostSpan, reason_of

# A release is written down just after it: in between another call may have got a lease. A killed process
# writes nothing down at all.
_LATE_S: Final = 5.0


@dataclass
class HeldPart:
    """A lease's part of one GPU while one client has it, in seconds of the run."""

    client: str
    begin_s: float
    end_s: float
    memory_bytes: int
    is_released: bool = True
    turns: Sequence[tuple[float, str]] = ()  # when its worker has gone on with which clients

    def by_client(self) -> Iterator[HeldPart]:
        """Yield the parts of the time in which each client had it: a worker may serve one after the other."""
        turns = [(self.begin_s, self.client), *(turn for turn in self.turns if turn[0] < self.end_s)]
        ends = [*(begin_s for begin_s, _ in turns[1:]), self.end_s]
        for (begin_s, client), end_s in zip(turns, ends, strict=True):
            if begin_s < end_s or len(turns) == 1:
                yield HeldPart(client, begin_s, end_s, self.memory_bytes, self.is_released)


def holdings_of(history: History, clock: RunClock, uuid: str) -> list[HeldPart]:
    """Return who held a part of a GPU, in the order in which they got it.

    The ledger gives memory away only when it is free. So where a lease needs memory of an earlier lease, the
    earlier one was over by then, whenever that was written down.
    """
    gpu = history.gpus.get(uuid)
    capacity = None if gpu is None else gpu.capacity_bytes
    every = []
    for lease in history.leases:
        if lease.granted_at is not None and uuid in lease.memory_bytes:
            released_at = lease.released_at
            end = history.over_at(lease.granted_at, clock.end) if released_at is None else released_at
            begin_s, end_s = clock.seconds(lease.granted_at), clock.seconds(max(end, lease.granted_at))
            nbytes = lease.memory_bytes[uuid]
            turns = [(clock.seconds(time), client) for time, client in lease.turns]
            every.append(HeldPart(lease.client, begin_s, end_s, nbytes, released_at is not None, turns))
    every.sort(key=lambda one: one.begin_s)
    active: list[HeldPart] = []
    for new in every:
        active = [one for one in active if one.end_s > new.begin_s]
        over = sum(one.memory_bytes for one in active) + new.memory_bytes - (capacity or 0)
        late = [one for one in active if not one.is_released or one.end_s - new.begin_s <= _LATE_S]
        for one in sorted(late, key=lambda one: (not one.is_released, one.end_s, one.begin_s)):
            if capacity is None or over <= 0 or new.memory_bytes > capacity:
                break
            one.end_s = new.begin_s
            over -= one.memory_bytes
            active.remove(one)
        active.append(new)
    found = [part for one in every for part in one.by_client()]
    return sorted(found, key=lambda one: one.begin_s)


def steps(spans: Iterable[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Return when the sum over spans (begin, end, amount) changes, and what the sum is from then on."""
    changes: dict[float, float] = {}
    for begin, end, amount in spans:
        changes[begin] = changes.get(begin, 0) + amount
        changes[end] = changes.get(end, 0) - amount
    seconds = sorted(changes)
    return seconds, list(itertools.accumulate(changes[at] for at in seconds))


def leased_steps(holdings: Sequence[HeldPart]) -> tuple[list[float], list[float]]:
    """Return when the sum of leases changed, and what it was from then on."""
    return steps((one.begin_s, one.end_s, one.memory_bytes) for one in holdings)


class GPUTotals:
    """What one GPU did during a run. Sizes in bytes; None where the driver does not tell."""

    def __init__(self, gpu: GPUInfo, holdings: Sequence[HeldPart], samples: Sequence[GPUSample]) -> None:
        used = [sample.used_bytes for sample in samples if sample.used_bytes is not None]
        busy = [one.utilization_percent / 100 for one in samples if one.utilization_percent is not None]
        celsius = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
        at_s, sums = leased_steps(holdings)
        spans = zip(itertools.pairwise(at_s), sums, strict=False)
        self.gpu = gpu
        #: For how long there was a lease on it.
        self.leased_s = sum(end - at for (at, end), held in spans if held)
        #: The sum of its leases: bytes times seconds.
        self.leased_byte_s = sum(one.memory_bytes * (one.end_s - one.begin_s) for one in holdings)
        self.most_leased_bytes = max(sums, default=0)  # at a time
        self.used_first_bytes = used[0] if used else None  # before the first worker
        self.used_last_bytes = used[-1] if used else None
        self.used_most_bytes = max(used, default=None)
        self.busy = fmean(busy) if busy else None  # mean utilization, as a share of 1
        self.hottest_c = max(celsius, default=None)

    def leased_share(self, duration_s: float) -> float | None:
        """Return for which part of the time there was a lease on it."""
        return _share(self.leased_s, duration_s)

    def capacity_share(self, duration_s: float) -> float | None:
        """Return which part of the memory that leases can have was leased, over the whole time."""
        return _share(self.leased_byte_s, (self.gpu.capacity_bytes or 0) * duration_s)


class HostTotals:
    """What one host of a Ray cluster did during a run, by its own calls."""

    def __init__(self, history: History, clock: RunClock, host: HostSpan, own: Sequence[CallTry]) -> None:
        gpus = [history.gpus[uuid] for uuid in host.gpus if uuid in history.gpus]
        self.host = host
        self.calls = len({one.whose.call for one in own})
        self.failed = sum(one.has_failed for one in own)
        self.workers = processes(own)
        #: Of all its workers together.
        self.busy_s = sum((part.seconds for one in own for part in one.parts if part.phase != WAITING), 0.0)
        self.gpus = Counter(gpu.name or gpu.uuid for gpu in gpus)  # how many of each model
        self.joined_s = None if host.joined_at is None else clock.seconds(host.joined_at)
        self.lost_s = None if host.lost_at is None else clock.seconds(host.lost_at)  # the last time


@dataclass
class AlikeFailures:
    """Failures of calls that are alike."""

    what: str  # the outcome, and the first line of the error
    details: str = ""  # the first traceback among them
    count: int = 0
    clients: set[str] = field(default_factory=set)

    @classmethod
    def all_of(cls, tries: Sequence[CallTry]) -> list[AlikeFailures]:
        """Put failures together, the most frequent first."""
        found: dict[str, AlikeFailures] = {}
        for one in tries:
            if one.has_failed:
                error, traceback = (one.worker.error, one.worker.traceback) if one.worker else ("", "")
                what = ": ".join(filter(None, (one.outcome, reason_of(error))))
                same = found.setdefault(what, cls(what))
                same.details = same.details or traceback
                same.count += 1
                same.clients.add(one.whose.client)
        return sorted(found.values(), key=lambda one: -one.count)


class Totals:
    """What a run did with its time, in seconds; ``holdings`` says which leases its GPUs had, by UUID."""

    def __init__(
        self,
        history: History,
        clock: RunClock,
        tries: Sequence[CallTry],
        holdings: Mapping[str, Sequence[HeldPart]],
    ) -> None:
        self.duration_s = clock.duration_s
        #: The GPUs that it could use.
        self.gpus = [
            GPUTotals(gpu, holdings[gpu.uuid], history.samples.get(gpu.uuid, ()))
            for gpu in history.gpus_of_run
        ]
        self.phase_s = dict.fromkeys(PHASES, 0.0)  # of all calls together
        for part in (part for one in tries for part in one.parts):
            self.phase_s[part.phase] += part.seconds
        self.calls = len({one.whose.call for one in tries})  # one that was tried again counts once
        self.workers = processes(one for one in tries if one.whose.client != SERVER)
        self.server_workers = processes(one for one in tries if one.whose.client == SERVER)
        self.unfinished = sum(not one.outcome for one in tries)
        #: How often tries ended how, the most frequent first; and those that are failures.
        self.outcomes = dict(Counter(one.outcome for one in tries if one.outcome).most_common())
        self.failures = dict(Counter(one.outcome for one in tries if one.has_failed).most_common())
        self.errors = AlikeFailures.all_of(tries)
        self.peak_bytes = highest_peak(tries)  # the most that one worker was seen to use on one GPU
        on_host: dict[str, list[CallTry]] = {}
        for one in tries:
            on_host.setdefault(one.whose.host, []).append(one)
        #: Of a Ray cluster.
        self.hosts = [
            HostTotals(history, clock, host, on_host.get(name, ())) for name, host in history.hosts.items()
        ]

    @property
    def gpu_s(self) -> float:
        """The time of all GPUs together."""
        return len(self.gpus) * self.duration_s

    @property
    def leased_s(self) -> float:
        """How much of that there was a lease on them."""
        return sum(one.leased_s for one in self.gpus)

    @property
    def idle_share(self) -> float | None:
        """Which part of the GPUs' time there was no lease on them."""
        leased = _share(self.leased_s, self.gpu_s)
        return None if leased is None else 1 - leased

    @property
    def capacity_share(self) -> float | None:
        """Which part of all memory that leases can have was leased, over the whole time."""
        capacity = sum(one.gpu.capacity_bytes or 0 for one in self.gpus) * self.duration_s
        return _share(sum(one.leased_byte_s for one in self.gpus), capacity)

    def phase_share(self, phase: str) -> float | None:
        """Return which part of the calls' time went into a phase."""
        return _share(self.phase_s[phase], sum(self.phase_s.values()))

    @property
    def lost_s(self) -> float:
        """What calls have spent with waiting for a lease and with starting a worker."""
        return self.phase_s[WAITING] + self.phase_s[STARTING]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
