"""Counts of a run that never decrease. Several runs may share them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from flower_gpu.watch.folds.limits import MOST_HOSTS

OUT_OF_MEMORY: Final = "out of memory"
CANCELLED: Final = "cancelled"
#: Outcome of workers on a lost host. The history sets it, because the trace has no line for their end.
HOST_LOST: Final = "host lost"
#: Known outcomes of a worker, spelled as in the trace. Unknown outcomes are counted as ``OTHER``.
OUTCOMES: Final = ("ok", "error", OUT_OF_MEMORY, "died", "timeout", CANCELLED, HOST_LOST)
#: Known reactions to a call that ran out of GPU memory, spelled as in the trace.
CONSEQUENCES: Final = ("again", "on the CPU", "failed")
OTHER: Final = "other"
#: Upper limits in seconds of the histogram buckets for waits.
WAIT_BUCKETS_S: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)


class LeaseCounts:
    """Counts of requested leases of the same kind, with a histogram of the waits."""

    def __init__(self) -> None:
        self.granted = self.refused = 0
        self.waited_s = self.longest_wait_s = 0.0
        self._waits = [0] * (len(WAIT_BUCKETS_S) + 1)

    def grant(self, waited_s: float) -> None:
        """Count a granted lease and its wait."""
        self.granted += 1
        self.waited_s += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        self._waits[bisect_left(WAIT_BUCKETS_S, waited_s)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper limit of each bucket with the number of waits up to this limit."""
        limits = (*map(str, WAIT_BUCKETS_S), "+Inf")
        return [(limit, float(count)) for limit, count in zip(limits, accumulate(self._waits), strict=True)]


@dataclass
class Tally:
    """Counts for a run, or the sums for several runs that share the tally."""

    workers_started: int = 0
    workers_finished: Counter[str] = field(default_factory=Counter)  # by outcome
    leases: LeaseCounts = field(default_factory=LeaseCounts)  # leases on GPUs
    cores: LeaseCounts = field(default_factory=LeaseCounts)  # leases on cores, for CPU calls
    out_of_memory: Counter[str] = field(default_factory=Counter)  # by reaction, see CONSEQUENCES
    #: Number of finished client calls. The key is (the worker was reused, the call failed).
    calls_by_use: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    rounds_finished: int = 0
    host_calls: dict[str, Counter[str]] = field(default_factory=dict)  # by host, then by outcome

    def calls_of(self, host: str) -> Counter[str]:
        """Return the call counts of a host. Hosts beyond the limit share the counts of ``OTHER``."""
        is_known = host in self.host_calls or len(self.host_calls) < MOST_HOSTS
        return self.host_calls.setdefault(host if is_known else OTHER, Counter())
