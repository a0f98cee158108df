"""Time of one call, for every way, side by side."""

from __future__ import annotations

from functools import partial
from itertools import product
from statistics import median
from typing import Any

from benchmarks.isolation.ways import WAYS
from benchmarks.shared import memory, table
from benchmarks.shared.processes import Member, members

CALLS = ("update", "return")
_TIMEOUT_S = 300.0


def measure(size_mb: float, ways: list[str], runs: int | None, warm: bool) -> list[dict[str, Any]]:
    """Return one row per call and way.

    Parameters
    ----------
    size_mb : float
        Size of the weights.
    ways : list of str
        Names in :data:`ways.WAYS`.
    runs : int, optional
        Timed runs of each way; default: by size, and fewer of slow ways.
    warm : bool
        Whether a call goes before the timed ones. Without it the first call is one of them.
    """
    planned = {way: runs or _default_runs(size_mb, WAYS[way].slow) for way in ways}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in product(CALLS, ways)}
    peaks: dict[tuple[str, str], float] = dict.fromkeys(seconds, 0.0)
    with members(partial(Member, way, "isolation.caller", way, size_mb) for way in ways) as callers:
        for caller in callers if warm else ():
            for call in CALLS:  # a first call is not timed: it starts what a way keeps
                peaks[call, caller.name] = _peak_mb(caller, call)
        rounds = max(planned.values())
        for number in range(rounds):
            for caller in _rotated(callers, number):
                if not _takes_part(number, planned[caller.name], rounds):
                    continue
                for call in CALLS:
                    reply = caller.ask(_TIMEOUT_S, call=call)
                    key = call, caller.name
                    seconds[key].append(reply["seconds"])
                    peaks[key] = max(peaks[key], reply["peak_mb"])
    rows = [_row(*key, size_mb, seconds[key], peaks[key]) for key in product(CALLS, ways)]
    _show(rows)
    return rows


def _row(call: str, way: str, size_mb: float, seconds: list[float], peak_mb: float) -> dict[str, Any]:
    return {
        "call": call,
        "way": way,
        "weights_mb": size_mb,
        "runs": len(seconds),
        "median_s": round(median(seconds), 5),
        "min_s": round(min(seconds), 5),
        "max_s": round(max(seconds), 5),
        "caller_peak_mb": round(peak_mb, 1),
    }


def _default_runs(size_mb: float, slow: bool) -> int:
    if size_mb > 100:
        return 3 if slow else 7
    return 5 if slow else 20


def _takes_part(number: int, runs: int, rounds: int) -> bool:
    """Spread ``runs`` evenly over ``rounds``."""
    return (number + 1) * runs // rounds > number * runs // rounds


def _rotated(callers: list[Member], number: int) -> list[Member]:
    """Begin with another way in each round, so that none always follows the same one."""
    begin = number % len(callers)
    return callers[begin:] + callers[:begin]


def _peak_mb(caller: Member, call: str) -> float:
    """Run a call and return the caller's peak memory with that of the memory files it holds.

    The kernel's own peak knows nothing of memory files that are not mapped, so this looks again and again.
    """
    seen = 0.0

    def look() -> None:
        nonlocal seen
        seen = max(seen, memory.resident_mb(caller.pid) + memory.hidden_files_mb([caller.pid]))

    reply = caller.ask(_TIMEOUT_S, look, call=call)
    return max(seen, float(reply["peak_mb"]))


def _show(rows: list[dict[str, Any]]) -> None:
    """Print one table per call."""
    for call in CALLS:
        of_call = [row for row in rows if row["call"] == call]
        reference = next((row["median_s"] for row in of_call if row["way"] == "article"), None)
        table.show(
            f"{call}, {of_call[0]['weights_mb']:g} MB of weights",
            ("way", "median", "min", "max", "runs", "faster than article", "caller peak MB"),
            [
                (
                    row["way"],
                    *(table.seconds(row[key]) for key in ("median_s", "min_s", "max_s")),
                    row["runs"],
                    table.times_faster(row["median_s"], reference),
                    f"{row['caller_peak_mb']:.0f}",
                )
                for row in of_call
            ],
        )
