"""Part ``ordinary``: an app as most are written, with Flower's own strategy and default options.

Times are those of the whole command, of the strategy (all rounds, with what engines start in the first), and
of a steady round: one without that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.shared import table
from benchmarks.simulation import digits
from benchmarks.simulation.engines import in_turn

#: Clients, clients of a round, and rounds.
SIZES, QUICK_SIZES = ((100, 100, 5), (100, 10, 60), (6, 6, 30)), ((3, 2, 2),)
#: Calls per worker of ours; None: the default, by which workers are used again.
CALLS, QUICK_CALLS = (None,), (None,)

_IDEAL = "the loop, which is on one core, divided by the cores (aim of a round of all clients: at most 1.25x)"
_FASTER = {
    "strategy_s": "faster_than_ray",
    "total_s": "command_faster_than_ray",
    "round_s": "round_faster_than_ray",
}


def measure(
    sizes: Sequence[tuple[int, int, int]], engines: Sequence[str], runs: int, calls: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Return a row per size, engine, and calls per worker; the loop is left out where clients are sampled."""
    rows = []
    for clients, each, rounds in sizes:
        config = {"num-server-rounds": rounds, "clients-per-round": each, "seed": 0, "local-epochs": 1}
        config |= {"strategy": "flower"}
        ways = digits.ways_of("ordinary", clients, config, engines, calls)
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
            for name, faster in _FASTER.items():
                row[faster] = None if ray is None else round(ray[name] / row[name], 2)
        digits.show(f"ordinary, {each} of {clients} clients in each of {rounds} rounds", found, _IDEAL)
        if ray is not None:
            table.show(
                "times as fast as Ray",
                ("engine", "whole command", "strategy", "a steady round"),
                [
                    (
                        f"{row['engine']}{', second run' * row['is_second']}",
                        f"{row['command_faster_than_ray']:.2f}x",
                        f"{row['faster_than_ray']:.2f}x",
                        f"{row['round_faster_than_ray']:.2f}x",
                    )
                    for row in found
                ],
            )
        rows += found
    return rows
