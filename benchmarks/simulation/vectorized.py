"""Part ``vectorized``: small clients whose training function is vectorized, and the same one by one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Run, in_turn

#: Clients, rounds, and local epochs.
SIZES, QUICK_SIZES = ((100, 5, 1), (100, 3, 5)), ((4, 2, 1),)

#: How the app trains: ``autograd`` as most apps do, ``functional`` by the function that is vectorized.
WAYS = ("autograd", "functional", "vectorized")
_NEAR = 1e-5  # of weights after all rounds


def measure(sizes: Sequence[tuple[int, int, int]], runs: int) -> list[dict[str, Any]]:
    """Return a row per size and way."""
    rows = []
    for clients, rounds, epochs in sizes:
        config = {"num-server-rounds": rounds, "local-epochs": epochs, "seed": 0, "strategy": "flower"}
        ways = {
            way: Run("ours", "small_models", clients, {**config, "how": way}, saves_model=True)
            for way in WAYS
            if epochs == 1 or way != "functional"  # what torch.func itself costs is seen by the first size
        }
        done = in_turn(ways, runs)
        first = done[WAYS[0]]
        usual_s = median(each.round_s for each in first)
        found = []
        for way, all_done in done.items():
            round_s = median(each.round_s for each in all_done)
            row = {
                "way": way,
                "clients": clients,
                "rounds": rounds,
                "epochs": epochs,
                "runs": len(all_done),
                "round_s": round(round_s, 3),
                "faster": round(usual_s / round_s, 2),
                "task_cpu_s": round(median(median(each.cpu_s[1:]) for each in all_done), 3),
                "total_s": round(median(each.total_s for each in all_done), 2),
                "peak_tree_mb": all_done[-1].peak_mb,
                "weights_differ_by": max(_difference(first[0].model, each.model) for each in all_done),
                "all_round_s": [round(each.round_s, 3) for each in all_done],
            }
            # In many steps a rounding can turn a maximum, by which functional differs from autograd as well.
            if epochs == 1 and row["weights_differ_by"] > _NEAR:
                raise BenchmarkError(f"{way}: weights differ by {row['weights_differ_by']:.2g} from autograd")
            found.append(row)
        _show(f"{clients} clients in each of {rounds} rounds, local epochs: {epochs}", found)
        rows += found
    return rows


def _difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float(np.abs(value - same).max()) for value, same in pairs)


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table.show(
        title,
        ("how", "a round", "faster", "CPU of tasks, a round", "command", "peak", "weights differ by"),
        [
            (
                row["way"],
                f"{row['round_s']:.3f} s",
                f"{row['faster']:.2f}x",
                f"{row['task_cpu_s']:.2f} s",
                f"{row['total_s']:.1f} s",
                f"{row['peak_tree_mb']:.0f} MB",
                f"{row['weights_differ_by']:.1g}",
            )
            for row in rows
        ],
    )
