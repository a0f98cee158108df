"""Part ``ordinary``: an app as most are written, with Flower's own strategy and default options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.simulation import digits
from benchmarks.simulation.engines import in_turn

#: Clients, clients of a round, and rounds.
SIZES, QUICK_SIZES = ((100, 100, 5), (100, 10, 10), (6, 6, 3)), ((3, 3, 2),)
#: Calls per worker of ours; None: the default, which the run finds out by itself.
CALLS, QUICK_CALLS = (None, 1), (None,)

_IDEAL = "the loop, which is on one core, divided by the cores (aim of the default: at most 1.25x)"


def measure(
    sizes: Sequence[tuple[int, int, int]], engines: Sequence[str], runs: int, calls: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Return a row per size, engine, and calls per worker; the loop is left out where clients are sampled."""
    rows = []
    for clients, each, rounds in sizes:
        config = {"num-server-rounds": rounds, "clients-per-round": each, "seed": 0, "local-epochs": 1}
        config |= {"strategy": "flower"}
        here = [engine for engine in engines if engine != "loop" or each == clients]
        ways = digits.ways_of("ordinary", clients, config, here, calls)
        first = next((name for name, way in ways.items() if way.engine == "ours"), None)
        if first is not None:
            ways = {f"{first}, second run": replace(ways[first], is_second=True), **ways}
        found = [
            {**digits.timed_row(ways[name], done), "clients_per_round": each}
            for name, done in in_turn(ways, runs).items()
        ]
        digits.compare_to_ideal(found)
        ray = next((row for row in found if row["engine"] == "ray"), None)
        for row in found:
            row["faster_than_ray"] = None if ray is None else round(ray["strategy_s"] / row["strategy_s"], 2)
        digits.show(f"ordinary, {each} of {clients} clients in each of {rounds} rounds", found, _IDEAL)
        rows += found
    return rows
