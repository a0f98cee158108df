"""Part ``order``: clients of very different sizes, the longest first and in the order of sending."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options, Rows, medians
from benchmarks.simulation.engines import Run, perform

#: Clients, workers, rounds, and seconds of the median client; then seeds of the sizes.
_SIZE, _QUICK_SIZE = (64, 8, 6, 1.0), (8, 2, 2, 0.05)
_SEEDS, _QUICK_SEEDS = (0, 1, 2, 3, 4), (0,)
_SIGMA = 1.0
_FIGURES = ("longest_s", "sent_s", "sleep_s", "shorter", "over_bound")


def measure(options: Options, figures: Figures) -> None:
    """Add a row per seed of the clients' sizes, and a row of medians.

    A round is the median of the rounds after the first, in which the sizes are not known yet.
    """
    size, seeds = (_QUICK_SIZE, _QUICK_SEEDS) if options.quick else (_SIZE, _SEEDS)
    rows: Rows = [_row(seed, *size) for seed in seeds]
    middle = medians([{name: row[name] for name in _FIGURES} for row in rows])
    rows.append({**rows[0], "seed": None, **middle})
    clients, workers, _, _ = size
    title = f"a round of {clients} sleeping clients, lognormal (sigma {_SIGMA:g}), {workers} at a time"
    table.show(f"{title}; the last row has the medians", rows, f"seed {' '.join(_FIGURES)}")
    figures["order"] = rows


def _row(seed: int, clients: int, workers: int, rounds: int, median_s: float) -> dict[str, Any]:
    sizes_s = np.random.default_rng(seed).lognormal(np.log(median_s), _SIGMA, clients).round(3).tolist()
    config = {"sleep-s": " ".join(map(str, sizes_s)), "num-server-rounds": rounds, "model-mb": 0.004}
    longest, sent = (
        perform(
            Run("ours", "no_op", clients, config, options=("--max-workers", str(workers), "--order", order)),
            is_sampled=False,
        )
        for order in ("longest", "sent")
    )
    over_bound = [
        seconds / _bound_s(longest.call_seconds(number), workers) - 1
        for number, seconds in enumerate(longest.figures["rounds_s"], 1)
        if number > 1
    ]
    return {
        "clients": clients,
        "workers": workers,
        "sigma": _SIGMA,
        "seed": seed,
        "rounds": rounds - 1,
        "longest_s": round(longest.round_s, 3),
        "sent_s": round(sent.round_s, 3),
        "sleep_s": round(_bound_s(sizes_s, workers), 3),
        "shorter": round(1 - longest.round_s / sent.round_s, 3),
        "over_bound": round(median(over_bound), 3),
    }


def _bound_s(seconds: Sequence[float], workers: int) -> float:
    """Return a lower bound for all schedules: the longest call, or the sum divided by the workers."""
    return max(*seconds, sum(seconds) / workers)
