"""Part ``order``: clients of very different sizes, the longest first and in the order of sending."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import table
from benchmarks.simulation.engines import Run, perform

#: Clients, workers, rounds, and seconds of the median client; then seeds of the sizes.
SIZE, QUICK_SIZE = (64, 8, 6, 1.0), (8, 2, 2, 0.05)
SEEDS, QUICK_SEEDS = (0, 1, 2, 3, 4), (0,)

_SIGMA = 1.0
_ORDERS = ("longest", "sent")
_FIGURES = ("longest_s", "sent_s", "sleep_s", "shorter", "over_bound")
_SHORTER, _OVER_BEST = 0.15, 0.05  # what we aim at


def measure(
    clients: int, workers: int, rounds: int, median_s: float, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each seed of the clients' sizes, and one with medians over them.

    A round is the median of those after the first, in which nothing is known of the clients.
    """
    rows = []
    for seed in seeds:
        sizes_s = np.random.default_rng(seed).lognormal(np.log(median_s), _SIGMA, clients).round(3).tolist()
        config = {"sizes-s": " ".join(map(str, sizes_s)), "num-server-rounds": rounds, "strategy": "ours"}
        done = {}
        for order in _ORDERS:
            options = ("--max-workers", str(workers), "--order", order)
            run = Run("ours", "sleeping", clients, config, options=options)
            done[order] = perform(run, is_watched=False)
        longest, sent = done["longest"], done["sent"]
        over = [
            took_s / bound_s(longest.calls_s[number], workers) - 1
            for number, took_s in enumerate(longest.figures["rounds_s"], 1)
            if number > 1
        ]
        rows.append(
            {
                "clients": clients,
                "workers": workers,
                "sigma": _SIGMA,
                "seed": seed,
                "rounds": rounds - 1,
                "longest_s": round(longest.round_s, 3),
                "sent_s": round(sent.round_s, 3),
                "sleep_s": round(bound_s(sizes_s, workers), 3),
                "shorter": round(1 - longest.round_s / sent.round_s, 3),
                "over_bound": round(median(over), 3),
            }
        )
    medians = {name: round(median(row[name] for row in rows), 3) for name in _FIGURES}
    rows.append({**rows[0], "seed": None, **medians})
    _show(rows)
    return rows


def bound_s(seconds: Sequence[float], workers: int) -> float:
    """Return what no schedule is shorter than: the longest call, and all of them divided by the workers."""
    return max(*seconds, sum(seconds) / workers)


def _show(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    table.show(
        f"a round of {first['clients']} clients that sleep, lognormal (sigma {first['sigma']:g}), "
        f"{first['workers']} at a time",
        ("sizes", "longest first", "as sent", "sleep only", "shorter", "over the bound"),
        [
            (
                "median" if row["seed"] is None else f"seed {row['seed']}",
                *(f"{row[name]:.2f} s" for name in _FIGURES[:3]),
                *(f"{row[name] * 100:.1f} %" for name in _FIGURES[3:]),
            )
            for row in rows
        ],
    )
    print(
        f"aim: at least {_SHORTER * 100:g} % shorter, at most {_OVER_BEST * 100:g} % over the best schedule"
    )
