"""The sums of a run: what its GPUs and its calls did with their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import PHASES, CallTry
from flower_gpu.watch.report.clock import Clock
from flower_gpu.watch.report.leases import Holding, leased_steps, occupied_s
from flower_gpu.watch.spans import STARTING, WAITING, GPUInfo, GPUSample


@dataclass(frozen=True)
class GPUTotals:
    """What one GPU did during a run. Sizes in bytes; None where the driver does not tell."""

    gpu: GPUInfo
    leased_s: float  # for how long there was a lease on it
    leased_byte_s: float  # the sum of its leases: bytes times seconds
    most_leased_bytes: int  # at a time
    used_first_bytes: int | None  # before the first worker
    used_last_bytes: int | None
    used_most_bytes: int | None
    busy: float | None  # mean utilization, as a share of 1
    hottest_c: float | None

    @classmethod
    def of(cls, gpu: GPUInfo, holdings: Sequence[Holding], samples: Sequence[GPUSample]) -> GPUTotals:
        """Sum up what is known of a GPU."""
        used = [sample.used_bytes for sample in samples if sample.used_bytes is not None]
        busy = [one.utilization_percent / 100 for one in samples if one.utilization_percent is not None]
        celsius = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
        return cls(
            gpu,
            occupied_s(holdings),
            sum(one.memory_bytes * (one.end_s - one.begin_s) for one in holdings),
            max(leased_steps(holdings)[1], default=0),
            used[0] if used else None,
            used[-1] if used else None,
            max(used, default=None),
            fmean(busy) if busy else None,
            max(celsius, default=None),
        )

    def leased_share(self, duration_s: float) -> float | None:
        """Return for which part of the time there was a lease on it."""
        return _share(self.leased_s, duration_s)

    def capacity_share(self, duration_s: float) -> float | None:
        """Return which part of the memory that leases can have was leased, over the whole time."""
        return _share(self.leased_byte_s, (self.gpu.capacity_bytes or 0) * duration_s)


@dataclass(frozen=True)
class Totals:
    """The sums of a run."""

    duration_s: float
    gpus: tuple[GPUTotals, ...]  # that it could use
    phase_s: Mapping[str, float]  # what all calls together have spent with each phase
    calls: int
    workers: int  # a call that is tried again has several workers
    unfinished: int  # calls whose end is not in the trace
    outcomes: Mapping[str, int]  # of tries of calls, the most frequent first
    errors: Mapping[str, int] = field(default_factory=dict)  # what failed calls have raised, and how often
    messages: int = 0  # that a simulation has sent
    unanswered: int = 0
    out_of_memory: Mapping[str, int] = field(default_factory=dict)  # calls, by what followed
    peak_bytes: int | None = None  # the most memory that one worker was seen to use on one GPU

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

    @property
    def failures(self) -> dict[str, int]:
        """Tries of calls without a result, by outcome."""
        return {outcome: count for outcome, count in self.outcomes.items() if outcome != "ok"}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def totals_of(
    history: History, clock: Clock, tries: Sequence[CallTry], holdings: Mapping[str, Sequence[Holding]]
) -> Totals:
    """Sum up a run; ``holdings`` says which leases its GPUs had, by UUID."""
    samples, messages = history.samples, history.messages.values()
    phases = dict.fromkeys(PHASES, 0.0)
    for part in (part for one in tries for part in one.parts):
        phases[part.phase] += part.seconds
    return Totals(
        duration_s=clock.duration_s,
        gpus=tuple(
            GPUTotals.of(gpu, holdings[gpu.uuid], samples.get(gpu.uuid, ())) for gpu in history.gpus_of_run
        ),
        phase_s=phases,
        calls=len({one.call for one in tries}),
        workers=sum(one.has_worker for one in tries),
        unfinished=sum(not one.outcome for one in tries),
        outcomes=dict(Counter(one.outcome for one in tries if one.outcome).most_common()),
        errors=dict(Counter(_error(one) for one in tries if one.has_failed).most_common()),
        messages=sum(one.messages for one in messages),
        unanswered=sum(one.failed for one in messages),
        out_of_memory=dict(Counter(event.then for event in history.out_of_memory).most_common()),
        peak_bytes=max((one.peak_bytes for one in tries if one.peak_bytes is not None), default=None),
    )


def _error(call: CallTry) -> str:
    lines = call.error.strip().splitlines()
    return f"{call.outcome}: {lines[0]}" if lines else call.outcome
