"""Part ``steps``: what a process per call costs with CUDA in it. A training, cut into its parts.

Start (from the call to the task's first line), context (first CUDA call), model (built and copied), first
step, later step, and exit (from the result to the moment its process is gone and the memory is back).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError, Member, members

PARTS = ("start", "context", "model", "first_step", "later_step", "exit", "total")
_UNTIMED = 1  # the first call starts what a way keeps
_TIMEOUT_S = 300.0


def measure(
    ways: Sequence[str], runs: int, model: str, batch: int, side: int, *, quick: bool
) -> list[dict[str, Any]]:
    """Return one row per way, with the median of each part in seconds."""
    parts: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    arguments = model, batch, side
    with members(partial(Member, way, "gpu.caller", way, *arguments) for way in ways) as callers:
        for number in range(0 if quick else -_UNTIMED, runs):
            for caller in callers:
                reply = caller.ask(_TIMEOUT_S)
                if not (math.isfinite(reply["loss"]) and (reply["changed"] or model == "elementwise")):
                    raise BenchmarkError(f"{caller.name}: it did not train: loss {reply['loss']}")
                if number >= 0:
                    parts[caller.name].append(_parts(reply))
    rows = [_row(way, parts[way]) for way in ways]
    _show(rows, model)
    return rows


def _parts(marks: dict[str, float]) -> dict[str, float]:
    return {
        "start": marks["entered"] - marks["began"],
        "context": marks["context"] - marks["entered"],
        "model": marks["model"] - marks["context"],
        "first_step": marks["first_step"] - marks["model"],
        "later_step": (marks["later_steps"] - marks["first_step"]) / marks["later_count"],
        "exit": marks["ended"] - marks["result"],
        "total": marks["ended"] - marks["began"],
    }


def _row(way: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    medians = {f"{part}_s": round(median(run[part] for run in runs), 5) for part in PARTS}
    return {"way": way, "runs": len(runs), **medians}


def _show(rows: list[dict[str, Any]], model: str) -> None:
    table.show(
        f"{model}, medians",
        ("way", "runs", *(part.replace("_", " ") for part in PARTS)),
        [(row["way"], row["runs"], *(table.seconds(row[f"{part}_s"]) for part in PARTS)) for row in rows],
    )
