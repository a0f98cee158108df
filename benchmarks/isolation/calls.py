"""Part ``calls``: the time of one call, in all ways in alternation."""

from __future__ import annotations

from functools import partial
from itertools import product
from statistics import median
from typing import Any

from benchmarks.isolation.ways import WAYS
from benchmarks.shared import table
from benchmarks.shared.driver import Rows
from benchmarks.shared.processes import Member, members

CALLS = ("update", "return")
_TIMEOUT_S = 300.0


def measure(size_mb: float, ways: list[str], runs: int | None, *, is_quick: bool) -> Rows:
    """Return one row per call and way.

    Parameters
    ----------
    size_mb : float
        Size of the weights.
    ways : list of str
        Names in :data:`ways.WAYS`.
    runs : int, optional
        Timed runs of each way; the default depends on the size and on the way.
    is_quick : bool
        True to time the first call. By default it is a warm-up, because it starts what a way keeps.
    """
    planned = {way: runs or _default_runs(size_mb, WAYS[way].is_slow) for way in ways}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in product(CALLS, ways)}
    with members(partial(Member, way, "isolation.caller", way, size_mb) for way in ways) as callers:
        for caller, call in () if is_quick else product(callers, CALLS):
            caller.ask(_TIMEOUT_S, call=call)
        total = max(planned.values())
        for number in range(total):
            # Start with another way in each round, so that a way's predecessor changes.
            begin = number % len(callers)
            for caller in callers[begin:] + callers[:begin]:
                count = planned[caller.name]
                # Spread the runs of slow ways evenly over all rounds.
                if (number + 1) * count // total == number * count // total:
                    continue
                for call in CALLS:
                    reply = caller.ask(_TIMEOUT_S, call=call)
                    seconds[call, caller.name].append(reply["seconds"])
    rows = [_row(*key, size_mb, seconds[key]) for key in product(CALLS, ways)]
    for call in CALLS:
        table.show(f"{call}, {size_mb:g} MB of weights", [row for row in rows if row["call"] == call])
    return rows


def _row(call: str, way: str, size_mb: float, seconds: list[float]) -> dict[str, Any]:
    return {
        "call": call,
        "way": way,
        "weights_mb": size_mb,
        "runs": len(seconds),
        "median_s": round(median(seconds), 5),
        "min_s": round(min(seconds), 5),
        "max_s": round(max(seconds), 5),
    }


def _default_runs(size_mb: float, is_slow: bool) -> int:
    if size_mb > 100:
        return 3 if is_slow else 7
    return 5 if is_slow else 20
