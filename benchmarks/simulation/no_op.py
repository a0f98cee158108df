"""Part ``no-op``: clients that return the model unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options
from benchmarks.simulation.engines import Result, Run, in_turn
from benchmarks.simulation.rows import timed_row

#: Clients, rounds, MB of the model, and the strategy of ours. Ray's is Flower's FedAvg.
_SIZES = ((100, 3, 1.0, "ours"), (100, 3, 45.0, "ours"), (100, 3, 45.0, "flower"), (1000, 1, 1.0, "ours"))
_QUICK_SIZES = ((6, 2, 0.1, "ours"),)


def measure(options: Options, figures: Figures) -> None:
    """Add a row per engine and size, and a row per size with ratios of ours to Ray."""
    figures["no-op"], figures["no-op-ratios"] = [], []
    for clients, rounds, model_mb, strategy in _QUICK_SIZES if options.quick else _SIZES:
        config: dict[str, Any] = {"model-mb": model_mb, "num-server-rounds": rounds}
        configs = {"ours": {**config, "strategy": strategy}, "ray": {**config, "strategy": "flower"}}
        runs = {
            engine: Run(engine, "no_op", clients, configs[engine])
            for engine in options.engines
            if engine != "loop"
        }
        rows = {engine: _row(runs[engine], found) for engine, found in in_turn(runs, options.runs).items()}
        figures["no-op"] += rows.values()
        title = f"no-op, {clients} clients, {rounds} rounds, {model_mb:g} MB"
        table.show(
            title, list(rows.values()), "engine strategy total_s round_s per_message_ms peak_tree_mb runs"
        )
        if {"ours", "ray"} <= rows.keys():
            ours, ray = rows["ours"], rows["ray"]
            ratio = {name: ours[name] for name in ("clients", "rounds", "model_mb", "strategy")} | {
                "faster": round(ray["total_s"] / ours["total_s"], 2),
                "memory": round(ours["peak_tree_mb"] / ray["peak_tree_mb"], 3),
            }
            figures["no-op-ratios"].append(ratio)
            table.show("ours to Ray", [ratio], "faster memory")


def _row(run: Run, results: Sequence[Result]) -> dict[str, Any]:
    row = timed_row(run, results)
    return {
        **row,
        "strategy": run.config["strategy"],
        "model_mb": run.config["model-mb"],
        "per_message_ms": round(row["round_s"] / run.clients * 1000, 2),
    }
