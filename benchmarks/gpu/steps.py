"""Part ``steps``: a training in a process of its own, cut into its steps."""

from __future__ import annotations

import math
from functools import partial

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options, medians
from benchmarks.shared.processes import BenchmarkError, Member, members

_WARM_UP_CALLS = 1
_TIMEOUT_S = 300.0


def measure(options: Options, figures: Figures) -> None:
    """Add one row per way, with the median of each step in seconds."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    arguments = options.model, options.batch, options.side
    with members(partial(Member, way, "gpu.caller", way, *arguments) for way in found) as callers:
        for number in range(0 if options.quick else -_WARM_UP_CALLS, options.runs or 5):
            for caller in callers:
                reply = caller.ask(_TIMEOUT_S)
                if not (
                    math.isfinite(reply["loss"]) and (reply["changed"] or options.model == "elementwise")
                ):
                    raise BenchmarkError(f"{caller.name}: it did not train: loss {reply['loss']}")
                if number >= 0:
                    found[caller.name].append(_steps(reply))
    rows = [{"way": way, "runs": len(runs), **medians(runs, 5)} for way, runs in found.items()]
    table.show(f"{options.model}, medians", rows)
    figures["steps"] = rows


def _steps(marks: dict[str, float]) -> dict[str, float]:
    return {
        "start_s": marks["entered"] - marks["began"],
        "context_s": marks["context"] - marks["entered"],
        "model_s": marks["model"] - marks["context"],
        "first_step_s": marks["first_step"] - marks["model"],
        "later_step_s": (marks["later_steps"] - marks["first_step"]) / marks["later_count"],
        "exit_s": marks["ended"] - marks["result"],
        "total_s": marks["ended"] - marks["began"],
    }
