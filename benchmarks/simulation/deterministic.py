"""Part ``deterministic``: what ``--deterministic`` costs, and that its models are the same."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Run, in_turn

#: App, clients, rounds, and more of the run config.
SIZES: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("ordinary", 100, 5, {"local-epochs": 1, "seed": 0}),
    ("ordinary", 100, 5, {"local-epochs": 5, "seed": 0}),
    ("no_op", 100, 3, {"model-mb": 1.0}),
    ("no_op", 100, 3, {"model-mb": 45.0}),
)
QUICK_SIZES = (("no_op", 4, 2, {"model-mb": 0.1}),)

_OPTION = "--deterministic"


def measure(sizes: Sequence[tuple[str, int, int, dict[str, Any]]], runs: int) -> list[dict[str, Any]]:
    """Return a row per app and size, without the option and with it."""
    rows = []
    for app, clients, rounds, more in sizes:
        config = {"num-server-rounds": rounds, "strategy": "flower", **more}
        ways = {
            name: Run("ours", app, clients, config, options=options)
            for name, options in (("default", ()), (_OPTION, (_OPTION,)))
        }
        found = []
        for name, done in in_turn(ways, runs).items():
            strategies_s = [sum(each.figures["rounds_s"]) for each in done]
            row = {
                "app": app,
                "clients": clients,
                "rounds": rounds,
                **more,
                "is_deterministic": name == _OPTION,
                "runs": len(done),
                "total_s": round(median(each.total_s for each in done), 2),
                "strategy_s": round(median(strategies_s), 2),
                "round_s": round(median(each.round_s for each in done), 3),
                "peak_tree_mb": done[-1].peak_mb,
                "models": len({each.summary["model_sha256"] for each in done}),
                "all_total_s": [round(each.total_s, 2) for each in done],
            }
            if row["is_deterministic"] and row["models"] != 1:
                raise BenchmarkError(f"{app}: {row['models']} different models of one seed with {_OPTION}")
            found.append(row)
        for row in found:
            row["round_to_default"] = round(row["round_s"] / found[0]["round_s"], 2)
        _show(f"{app}, {clients} clients, {rounds} rounds, {more}", found)
        rows += found
    return rows


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table.show(
        title,
        ("run", "total", "strategy", "a round", "to default", "peak", "models", "runs"),
        [
            (
                _OPTION if row["is_deterministic"] else "default",
                f"{row['total_s']:.1f} s",
                f"{row['strategy_s']:.2f} s",
                f"{row['round_s']:.3f} s",
                f"{row['round_to_default']:.2f}x",
                f"{row['peak_tree_mb']:.0f} MB",
                row["models"],
                row["runs"],
            )
            for row in rows
        ],
    )
