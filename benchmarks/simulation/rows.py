"""Rows of figures for several parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.shared.driver import Rows
from benchmarks.simulation.engines import Result, Run


def timed_row(run: Run, results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of a run: medians of its times, and the peak of its last memory samples."""
    return {
        "engine": run.engine,
        "calls_per_worker": _value(run.options, "--calls-per-worker"),
        "preload": "--preload" in run.options,
        "is_second": run.is_second,
        "clients": run.clients,
        "rounds": run.config["num-server-rounds"],
        "runs": len(results),
        "total_s": round(median(each.total_s for each in results), 2),
        "total_cpu_s": round(median(each.total_cpu_s for each in results), 2),
        "round_s": round(median(each.round_s for each in results), 3),
        "strategy_s": round(median(sum(each.figures["rounds_s"]) for each in results), 2),
        "app_share": _app_share(results),
        "peak_tree_mb": results[-1].peak_mb,
        "all_total_s": [round(each.total_s, 2) for each in results],
        "all_rounds_s": [[round(value, 3) for value in each.figures["rounds_s"]] for each in results],
    }


def _value(options: Sequence[str], name: str) -> int | None:
    return int(options[options.index(name) + 1]) if name in options else None


def _app_share(results: Sequence[Result]) -> float | None:
    """Return the share of the cores' time, from the second round on, that the app's own tasks took."""
    cores = len(os.sched_getaffinity(0))
    shares = [
        sum(cpu_s[1:]) / sum(each.figures["rounds_s"][1:]) / cores
        for each in results
        if len(cpu_s := each.task_cpu_s()) > 1
    ]
    return round(median(shares), 3) if shares else None


def compare_to_ideal(rows: Rows, concurrency: int | None = None) -> None:
    """Add the ratio of each row's times to those of the loop divided by the cores."""
    concurrency = concurrency or len(os.sched_getaffinity(0))
    loop = next((row for row in rows if row["engine"] == "loop"), None)
    for row in rows:
        for name in ("total", "round"):
            ratio = loop and row[f"{name}_s"] / (loop[f"{name}_s"] / concurrency)
            row[f"{name}_to_ideal"] = ratio and round(ratio, 2)


#: Columns of a table of such rows.
COLUMNS = (
    "engine calls_per_worker preload is_second total_s total_cpu_s strategy_s round_s "
    "total_to_ideal round_to_ideal app_share peak_tree_mb"
)
