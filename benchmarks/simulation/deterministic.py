"""Part ``deterministic``: the cost of ``--deterministic``, and a check that its models are the same."""

from __future__ import annotations

from typing import Any

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Run, in_turn
from benchmarks.simulation.rows import timed_row

#: Client, number of clients, rounds, and the rest of the run config.
_SIZES: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("ordinary", 100, 5, {"local-epochs": 1}),
    ("ordinary", 100, 5, {"local-epochs": 5}),
    ("no_op", 100, 3, {"model-mb": 1.0}),
    ("no_op", 100, 3, {"model-mb": 45.0}),
)
_QUICK_SIZES = (("no_op", 4, 2, {"model-mb": 0.1}),)
_OPTION = "--deterministic"
_COLUMNS = "is_deterministic total_s total_cpu_s strategy_s round_s round_to_default peak_tree_mb models runs"


def measure(options: Options, figures: Figures) -> None:
    """Add a row per client and size, without the option and with it."""
    figures["deterministic"] = []
    for client, clients, rounds, more in _QUICK_SIZES if options.quick else _SIZES:
        config = {"num-server-rounds": rounds, "strategy": "flower", **more}
        runs = {
            name: Run("ours", client, clients, config, options=("--calls-per-worker", "1000", *option))
            for name, option in (("default", ()), (_OPTION, (_OPTION,)))
        }
        rows = [
            {
                "app": client,
                **timed_row(runs[name], results),
                **more,
                "is_deterministic": name == _OPTION,
                "models": len({each.summary["model_sha256"] for each in results}),
            }
            for name, results in in_turn(runs, options.runs).items()
        ]
        for row in rows:
            row["round_to_default"] = round(row["round_s"] / rows[0]["round_s"], 2)
        table.show(f"{client}, {clients} clients, {rounds} rounds, {more}", rows, _COLUMNS)
        figures["deterministic"] += rows
        if rows[1]["models"] != 1:
            raise BenchmarkError(f"{client}: {_OPTION} gave {rows[1]['models']} models for one seed")
