"""Part ``batches``: small networks, with one message at a time and with several by ``train_many``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Done, Run, in_turn

#: Clients and rounds. In the first rounds sizes of batches are tried; of the last ones the time counts.
SIZE, QUICK_SIZE = (100, 12), (8, 2)
NETWORKS, QUICK_NETWORKS = ("mlp", "cnn", "wide-cnn", "image-cnn"), ("mlp",)
_COUNTED_ROUNDS = 6

#: How the app trains: with ``backward()`` as most apps do, or by ``train_many``.
WAYS = {"one": 0, "many": 64}
_NEAR = 1e-3  # of weights after all rounds: in many steps a rounding can turn a maximum


def measure(size: tuple[int, int], networks: Sequence[str], runs: int) -> list[dict[str, Any]]:
    """Return a row per network and way."""
    clients, rounds = size
    rows: list[dict[str, Any]] = []
    for network in networks:
        config = {"num-server-rounds": rounds, "seed": 0, "strategy": "flower", "network": network}
        ways = {
            way: Run(
                "ours",
                "small_models",
                clients,
                config,
                saves_model=True,
                env={"SMALL_MODELS_MAX_MESSAGES": str(most)},
            )
            for way, most in WAYS.items()
        }
        done = in_turn(ways, runs)
        reference = done["one"]
        found = [_row(network, way, clients, rounds, done[way], reference) for way in WAYS]
        _show(f"{network}: {clients} clients in each of {rounds} rounds", found)
        rows += found
    return rows


def _row(
    network: str, way: str, clients: int, rounds: int, done: Sequence[Done], reference: Sequence[Done]
) -> dict[str, Any]:
    rounds_s = [_later_round_s(each) for each in done]
    differ = max(_difference(reference[0].model, each.model) for each in done)
    if differ > _NEAR:
        raise BenchmarkError(f"{network}, {way}: weights differ by {differ:.2g} from one message at a time")
    return {
        "network": network,
        "way": way,
        "clients": clients,
        "rounds": rounds,
        "runs": len(done),
        "round_s": round(median(rounds_s), 3),
        "faster": round(median(map(_later_round_s, reference)) / median(rounds_s), 2),
        "task_cpu_s": round(median(median(each.cpu_s[-_COUNTED_ROUNDS:]) for each in done), 3),
        "run_cpu_s": round(median(each.total_cpu_s for each in done), 1),
        "peak_tree_mb": done[-1].peak_mb,
        "batches": [each.summary["batches"] for each in done],
        "message_ms_by_size": _message_ms(done),
        "weights_differ_by": differ,
        "all_round_s": [round(each, 3) for each in rounds_s],
    }


def _later_round_s(done: Done) -> float:
    return median(done.figures["rounds_s"][-_COUNTED_ROUNDS:])


def _message_ms(done: Sequence[Done]) -> dict[int, float]:
    """Return the milliseconds of a message by the size of its batch; of sizes with three batches or more."""
    found: dict[int, list[float]] = defaultdict(list)
    for each in done:
        batches: dict[str, list[float]] = defaultdict(list)
        for call in each.calls:
            batches[call["call"].partition("-")[0]].append(call["seconds"])
        for seconds in batches.values():
            found[len(seconds)].append(seconds[0] / len(seconds) * 1000)
    return {size: round(median(found[size]), 2) for size in sorted(found) if len(found[size]) >= 3}


def _difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float(np.abs(value - same).max()) for value, same in pairs)


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table.show(
        title,
        ("how", "a later round", "faster", "CPU of tasks, a round", "peak", "fastest size", "ms by size"),
        [
            (
                row["way"],
                f"{row['round_s']:.3f} s",
                f"{row['faster']:.2f}x",
                f"{row['task_cpu_s']:.2f} s",
                f"{row['peak_tree_mb']:.0f} MB",
                ", ".join(str(each.get("fastest", {}).get("train", 1)) for each in row["batches"]),
                ", ".join(f"{size}: {ms:.2f}" for size, ms in row["message_ms_by_size"].items()),
            )
            for row in rows
        ],
    )
