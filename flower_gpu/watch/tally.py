"""What runs have done so far, as counts that never go down."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from flower_gpu.apps.failures import LABEL
from flower_gpu.errors import shortened
from flower_gpu.trace import Event
from flower_gpu.watch.fields import first_line

#: How a worker can end, as the trace says it; anything else is counted as ``OTHER``.
OUTCOMES: Final = ("ok", "error", "out of memory", "died", "timeout", "cancelled")
#: What can follow when a call runs out of GPU memory.
CONSEQUENCES: Final = ("again", "on the CPU", "failed")
OTHER: Final = "other"
#: Upper limits, in seconds, of what waits for leases are counted in.
WAIT_BUCKETS_S: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)


# Failed messages: how much of them is kept.
_MOST_REASONS: Final = 200
_MOST_NAMED: Final = 100  # of one reason
_MOST_CHARACTERS: Final = 1000  # of one message
_OTHER_REASONS: Final = "other reasons"
_PID: Final = re.compile(r" \(pid \d+\)")


class Waits:
    """How long calls have waited for leases, counted in buckets."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(WAIT_BUCKETS_S) + 1)

    def add(self, seconds: float) -> None:
        """Count one wait."""
        self.sum_s += seconds
        self._counts[bisect_left(WAIT_BUCKETS_S, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return for each upper limit how many waits were not longer."""
        limits = (*map(str, WAIT_BUCKETS_S), "+Inf")
        return [(limit, float(count)) for limit, count in zip(limits, accumulate(self._counts), strict=True)]


@dataclass
class Tally:
    """Counts of one run, or of several runs that share it."""

    workers_started: int = 0
    workers_finished: Counter[str] = field(default_factory=Counter)  # by outcome
    leases_granted: int = 0
    leases_not_granted: int = 0
    lease_waits: Waits = field(default_factory=Waits)  # of granted leases
    out_of_memory: Counter[str] = field(default_factory=Counter)  # by what followed
    rounds_finished: int = 0


@dataclass
class FailureReason:
    """Failed messages to clients that have the same error, but for the client and the worker's pid."""

    count: int = 0
    named: list[dict[str, Any]] = field(default_factory=list)  # client, type, round, error of the first few


class FailureReasons:
    """The reasons for which messages to clients have failed, the most frequent ones first."""

    def __init__(self) -> None:
        self._reasons: dict[str, FailureReason] = {}

    @property
    def count(self) -> int:
        """How many messages have failed."""
        return sum(found.count for found in self._reasons.values())

    def add(self, reply: Event) -> None:
        """Count a reply that is an error."""
        error = shortened(first_line(reply.get("error")), _MOST_CHARACTERS)
        reason = _PID.sub("", LABEL.sub("", error))  # else each worker's would be another one
        if reason not in self._reasons and len(self._reasons) >= _MOST_REASONS:
            reason = _OTHER_REASONS
        found = self._reasons.setdefault(reason, FailureReason())
        found.count += 1
        if len(found.named) < _MOST_NAMED:
            whose = {"client": reply.get("node"), "type": reply.get("task"), "round": reply.get("round")}
            found.named.append({**whose, "error": error})

    def items(self) -> list[tuple[str, FailureReason]]:
        """Return the messages of each reason."""
        return sorted(self._reasons.items(), key=lambda item: -item[1].count)


def known_outcome(outcome: str) -> str:
    """Return an outcome, or ``OTHER`` for one that this version does not know."""
    return outcome if outcome in OUTCOMES else OTHER


def known_consequence(then: str) -> str:
    """Return what followed, or ``OTHER`` where this version does not know it."""
    return then if then in CONSEQUENCES else OTHER
