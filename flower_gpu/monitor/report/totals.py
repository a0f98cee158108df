"""The sums of a run: what its GPUs and its calls did with their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from flower_gpu.monitor.report.calls import PHASES, CallTry
from flower_gpu.monitor.report.clock import Clock
from flower_gpu.monitor.report.holdings import Holding, leased_steps, occupied_s
from flower_gpu.monitor.report.recorded import RunHistory
from flower_gpu.monitor.spans import STARTING, WAITING, GPUInfo, GPUSample


@dataclass(frozen=True)
class GPUTotals:
    """What one GPU did during a run. Sizes in bytes; None where the driver does not tell.

    Parameters
    ----------
    gpu : GPUInfo
        Which one.
    leased_s : float
        For how long there was a lease on it.
    leased_byte_s : float
        The sum of its leases: bytes times seconds.
    most_leased_bytes : int
        The most that was leased at a time.
    used_first_bytes, used_last_bytes, used_most_bytes : int or None
        In use before the first worker, after the last, and at most.
    busy : float or None
        Mean utilization, as a share of 1.
    hottest_c : float or None
        Highest temperature, in degrees Celsius.
    """

    gpu: GPUInfo
    leased_s: float
    leased_byte_s: float
    most_leased_bytes: int
    used_first_bytes: int | None
    used_last_bytes: int | None
    used_most_bytes: int | None
    busy: float | None
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
        return self.leased_s / duration_s if duration_s > 0 else None

    def capacity_share(self, duration_s: float) -> float | None:
        """Return which part of the memory that leases can have was leased, over the whole time."""
        if duration_s <= 0 or not self.gpu.capacity_bytes:
            return None
        return self.leased_byte_s / (self.gpu.capacity_bytes * duration_s)


@dataclass(frozen=True)
class Totals:
    """The sums of a run.

    Parameters
    ----------
    duration_s : float
        How long it took.
    gpus : tuple of GPUTotals
        Of each GPU that it could use.
    phase_s : dict of str to float
        By phase, what all calls together have spent with it.
    calls, workers : int
        How many there were; a call that is tried again has several workers, or has another part of one.
    unfinished : int
        Calls whose end is not in the trace.
    outcomes : dict of str to int
        How tries of calls have ended, by outcome; the most frequent first.
    errors : dict of str to int
        What failed calls have raised, and how often.
    messages, unanswered : int
        What a simulation has sent, and what got no reply.
    out_of_memory : dict of str to int
        Calls that ran out of GPU memory, by what followed.
    peak_bytes : int or None
        The most memory that one worker was seen to use on one GPU.
    """

    duration_s: float
    gpus: tuple[GPUTotals, ...]
    phase_s: Mapping[str, float]
    calls: int
    workers: int
    unfinished: int
    outcomes: Mapping[str, int]
    errors: Mapping[str, int] = field(default_factory=dict)
    messages: int = 0
    unanswered: int = 0
    out_of_memory: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None

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
        return 1 - self.leased_s / self.gpu_s if self.gpu_s > 0 else None

    @property
    def capacity_share(self) -> float | None:
        """Which part of all memory that leases can have was leased, over the whole time."""
        capacity = sum(one.gpu.capacity_bytes or 0 for one in self.gpus) * self.duration_s
        return sum(one.leased_byte_s for one in self.gpus) / capacity if capacity > 0 else None

    def phase_share(self, phase: str) -> float | None:
        """Return which part of the calls' time went into a phase."""
        total = sum(self.phase_s.values())
        return self.phase_s[phase] / total if total > 0 else None

    @property
    def lost_s(self) -> float:
        """What calls have spent with waiting for a lease and with starting a worker."""
        return self.phase_s[WAITING] + self.phase_s[STARTING]


def totals_of(
    history: RunHistory, clock: Clock, tries: Sequence[CallTry], holdings: Mapping[str, Sequence[Holding]]
) -> Totals:
    """Sum up a run.

    Parameters
    ----------
    history : RunHistory
        Of the run.
    clock : Clock
        Its time.
    tries : sequence of CallTry
        Its calls.
    holdings : mapping
        Who held its GPUs, by UUID.
    """
    gpus = history.gpus_of_run()
    messages = history.messages.values()
    return Totals(
        duration_s=clock.duration_s,
        gpus=tuple(GPUTotals.of(gpu, holdings[gpu.uuid], history.samples.get(gpu.uuid, ())) for gpu in gpus),
        phase_s={phase: sum(one.seconds(phase) for one in tries) for phase in PHASES},
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
