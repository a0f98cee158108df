"""Parts ``digits`` and ``ordinary``: clients that train, beside Ray and beside a plain loop."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.app import APP
from benchmarks.shared.driver import Figures, Options
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Run, in_turn, max_difference
from benchmarks.simulation.rows import COLUMNS, compare_to_ideal, timed_row

#: Clients and rounds of ``digits``, and calls per worker of ours. 1000 calls mean that workers stay to the
#: end, as Ray's actors do.
_DIGITS, _QUICK_DIGITS = (100, 5, (1, 1000)), (2, 2, (1000,))
_MAX_ACCURACY_DIFFERENCE = 0.01
#: Clients, clients per round, and rounds of ``ordinary``.
_ORDINARY, _QUICK_ORDINARY = ((100, 100, 5), (100, 10, 60), (6, 6, 30)), ((3, 2, 2),)
_FASTER = {
    "total_s": "command_faster_than_ray",
    "strategy_s": "faster_than_ray",
    "round_s": "round_faster_than_ray",
}


def measure_digits(options: Options, figures: Figures) -> None:
    """Add a row per engine, number of calls per worker, and number of local epochs."""
    clients, rounds, calls_per_worker = _QUICK_DIGITS if options.quick else _DIGITS
    figures["digits"] = []
    for epochs in options.epochs:
        config = {"num-server-rounds": rounds, "local-epochs": epochs}

        def ours(*more: str, config: dict[str, Any] = config) -> Run:
            return Run("ours", "digits", clients, config, True, ("--calls-per-worker", *more))

        runs: dict[str, Run] = {}
        if "ours" in options.engines:
            runs["ours, preload"] = ours("1", "--preload", "bench_app.digits:load_data")
            runs |= {f"ours, {calls} calls": ours(str(calls)) for calls in calls_per_worker}
        runs |= {
            name: Run(name, "digits", clients, config, True) for name in options.engines if name != "ours"
        }
        results = in_turn(runs, options.runs)
        # The loop is the last engine.
        reference = next(reversed(results.values()))[-1].model
        rows = [
            {
                **timed_row(runs[name], found),
                "local_epochs": epochs,
                "accuracy": round(_accuracy(found[-1].model), 4),
                "weights_differ_by": max_difference(found[-1].model, reference),
            }
            for name, found in results.items()
        ]
        compare_to_ideal(rows)
        title = f"digits, {clients} clients, {rounds} rounds, {epochs} local epochs"
        table.show(title, rows, f"{COLUMNS} accuracy weights_differ_by")
        figures["digits"] += rows
        accuracies = [row["accuracy"] for row in rows]
        if max(accuracies) - min(accuracies) > _MAX_ACCURACY_DIFFERENCE:
            raise BenchmarkError(f"digits: the accuracies of the engines differ: {accuracies}")


def _accuracy(model: list[Any]) -> float:
    if str(APP) not in sys.path:
        sys.path.insert(0, str(APP))
    from bench_app import digits

    return float(digits.accuracy(model))


def measure_ordinary(options: Options, figures: Figures) -> None:
    """Add a row per engine and size. Ours has default options, and Flower's own strategy."""
    figures["ordinary"] = []
    for clients, per_round, rounds in _QUICK_ORDINARY if options.quick else _ORDINARY:
        config = {"num-server-rounds": rounds, "clients-per-round": per_round, "strategy": "flower"}
        runs = {name: Run(name, "ordinary", clients, config, True) for name in options.engines}
        if "ours" in runs:
            runs = {"ours, second run": replace(runs["ours"], is_second=True), **runs}
        rows = [
            {**timed_row(runs[name], found), "clients_per_round": per_round}
            for name, found in in_turn(runs, options.runs).items()
        ]
        compare_to_ideal(rows)
        ray = next((row for row in rows if row["engine"] == "ray"), None)
        for row in rows:
            row |= {ratio: ray and round(ray[name] / row[name], 2) for name, ratio in _FASTER.items()}
        title = f"ordinary, {per_round} of {clients} clients in each of {rounds} rounds"
        table.show(title, rows, COLUMNS)
        table.show("times as fast as Ray", rows, f"engine is_second {' '.join(_FASTER.values())}")
        figures["ordinary"] += rows
