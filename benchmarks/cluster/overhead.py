"""Parts ``overhead`` and ``wire``: two hosts beside one machine with the same cores, and what they send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.cluster import network, runs
from benchmarks.shared import driver, table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.shared.weights import MB
from benchmarks.simulation import engines, initial
from benchmarks.simulation.engines import Run

WAYS = ("one machine", "two hosts")
OPTIONS = ("--gpu", "never")
_NEAR = 1e-3  # of a weight: the same training, summed in another order


@dataclass(frozen=True)
class Size:
    """What is run in both ways.

    Attributes
    ----------
    name : str
        Of the app, and what is special about it.
    run : Run
        The run on one machine.
    aim : float, optional
        What a round of two hosts should be at most, of one on one machine.
    """

    name: str
    run: Run
    aim: float | None


def sizes(*, is_quick: bool) -> list[Size]:
    """Return what is compared."""
    if is_quick:
        return [Size("no-op", _no_op(4, 0.1, 4), None)]
    return [
        Size("digits, 1 local epoch", _digits(100, 1, 6), None),
        Size("digits, 20 local epochs", _digits(100, 20, 5), 1.1),
        Size("no-op", _no_op(100, 1.0, 6), 1.3),
    ]


def _no_op(clients: int, model_mb: float, rounds: int, strategy: str = "ours") -> Run:
    config = {"model-mb": model_mb, "num-server-rounds": rounds, "strategy": strategy}
    return Run("ours", "no_op", clients, config, options=OPTIONS)


def _digits(clients: int, epochs: int, rounds: int, strategy: str = "ours") -> Run:
    config = {"num-server-rounds": rounds, "local-epochs": epochs, "alpha": 0.0, "seed": 0}
    config |= {"strategy": strategy}  # type: ignore[dict-item]
    return Run("ours", "digits", clients, config, True, OPTIONS)


def measure(chosen: Sequence[Size], count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row per size and way, and a row per size with the ratios."""
    all_done: dict[str, dict[str, list[Any]]] = {size.name: {way: [] for way in WAYS} for size in chosen}
    for _, way in driver.in_turn(WAYS, count):
        if way == "one machine":
            for size in chosen:
                all_done[size.name][way].append(engines.perform(size.run, is_watched=False))
        else:
            with network.cluster() as cluster:  # it is not there while one machine is measured
                for size in chosen:
                    all_done[size.name][way].append(runs.perform(size.run, cluster))
    rows, ratios = [], []
    for size in chosen:
        done = all_done[size.name]
        found = [_row(size, way, each) for way, each in done.items()]
        by_way = {row["way"]: row for row in found}
        one, two = (by_way[way] for way in WAYS)
        pairs = zip(one["all_round_s"], two["all_round_s"], strict=True)
        ratio = {
            "app": size.name,
            "round": round(two["round_s"] / one["round_s"], 3),
            "rounds_of_pairs": [round(theirs / mine, 3) for mine, theirs in pairs],
            "total": round(two["total_s"] / one["total_s"], 3),
            "added_ms_per_message": round((two["round_s"] - one["round_s"]) / size.run.clients * 1000, 3),
            "aim": size.aim,
            "weights_differ_by": _checked(size, done),
        }
        _show(size, found, ratio)
        rows += found
        ratios.append(ratio)
    return rows, ratios


def _row(size: Size, way: str, done: Sequence[Any]) -> dict[str, Any]:
    rounds_s = [each.figures["rounds_s"] if way == "one machine" else each.rounds_s for each in done]
    return {
        "app": size.name,
        "way": way,
        "clients": size.run.clients,
        "rounds": size.run.config["num-server-rounds"],
        "runs": len(done),
        "total_s": round(median(each.total_s for each in done), 2),
        "round_s": round(median(each.round_s for each in done), 4),
        "all_total_s": [round(each.total_s, 2) for each in done],
        "all_round_s": [round(each.round_s, 4) for each in done],
        "all_rounds_s": [[round(value, 3) for value in each] for each in rounds_s],
    }


def _checked(size: Size, done: dict[str, list[Any]]) -> float | None:
    """Return how much the models of both ways differ; an app that leaves none has checked it itself."""
    if not size.run.saves_model:
        return None
    one, two = (done[way][-1].model for way in WAYS)
    differ_by = max(float(abs(mine - its).max()) for mine, its in zip(one, two, strict=True))
    if differ_by > _NEAR:
        raise BenchmarkError(f"{size.name}: the model of two hosts differs by {differ_by:.2g}")
    return differ_by


def _show(size: Size, rows: Sequence[dict[str, Any]], ratio: dict[str, Any]) -> None:
    table.show(
        f"{size.name}, {size.run.clients} clients",
        ("way", "total", "a round", "lowest", "highest", "runs"),
        [
            (
                row["way"],
                f"{row['total_s']:.1f} s",
                *(f"{value:.3f} s" for value in (row["round_s"], *_ends(row["all_round_s"]))),
                row["runs"],
            )
            for row in rows
        ],
    )
    aim = "" if size.aim is None else f" (aim: at most {size.aim:g}x)"
    print(
        f"a round of two hosts takes {ratio['round']:.2f}x{aim}: {ratio['added_ms_per_message']:.2f} ms more "
        f"per message; the whole command {ratio['total']:.2f}x"
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def wire_runs(*, is_quick: bool) -> list[tuple[str, Run, int]]:
    """Return what the bytes over the wire are counted of: a name, a run, and the bytes of its model."""
    if is_quick:
        return [("no-op", _no_op(4, 0.1, 12), _no_op_bytes(0.1))]
    digits_bytes = sum(array.nbytes for array in initial.weights(0))
    return [
        ("digits", _digits(100, 1, 10), digits_bytes),
        *(
            (f"no-op, {strategy} FedAvg", _no_op(100, size_mb, 10, strategy), _no_op_bytes(size_mb))
            for size_mb in (1.0, 10.0)
            for strategy in ("ours", "flower")
        ),
    ]


def _no_op_bytes(size_mb: float) -> int:
    return 20 * 4 * (int(size_mb * MB) // 80)  # as the app makes it: 20 arrays of float32


def measure_wire(chosen: Sequence[tuple[str, Run, int]]) -> list[dict[str, Any]]:
    """Return a row per run: what a round sends to the second host and brings from it."""
    rows = []
    with network.cluster() as cluster:
        all_done = [runs.perform(run, cluster, is_watched=True) for _, run, _ in chosen]
    for (name, run, model_bytes), done in zip(chosen, all_done, strict=True):
        down, up = done.wire_bytes(1)
        messages = done.messages[1]
        rows.append(
            {
                "app": name,
                "clients": run.clients,
                "rounds": done.counted_rounds,
                "round_s": round(done.watched_s / done.counted_rounds, 3),
                "messages_of_host": round(messages, 1),
                "model_bytes": model_bytes,
                "sum_bytes": 2 * model_bytes,
                "down_bytes": round(down),
                "up_bytes": round(up),
                "down_to_model": round(down / model_bytes, 3),
                "up_to_sum": round(up / (2 * model_bytes), 3),
                "more_down_bytes_per_message": round((down - model_bytes) / max(messages, 1)),
                "more_up_bytes_per_message": round((up - 2 * model_bytes) / max(messages, 1)),
                **costs_of(done, run),
            }
        )
    table.show(
        "bytes over the wire of the second host, per round",
        ("app", "messages", "model", "down", "to model", "64-bit sum", "up", "to sum"),
        [
            (
                row["app"],
                f"{row['messages_of_host']:.0f}",
                f"{row['model_bytes'] / MB:.3f} MB",
                f"{row['down_bytes'] / MB:.3f} MB",
                f"{row['down_to_model']:.2f}x",
                f"{row['sum_bytes'] / MB:.3f} MB",
                f"{row['up_bytes'] / MB:.3f} MB",
                f"{row['up_to_sum']:.2f}x",
            )
            for row in rows
        ],
    )
    return rows


def costs_of(done: runs.Done, run: Run) -> dict[str, Any]:
    """Return what processes take for a message, and their memory."""
    handled = done.messages[1]
    return {
        "driver_cpu_ms_per_message": round(done.cpu_s("driver") / run.clients * 1000, 3),
        "agent_cpu_ms_per_message": round(done.cpu_s("agent", 1) / max(handled, 1) * 1000, 3),
        "ray_cpu_ms_per_message": round(done.cpu_s("ray") / run.clients * 1000, 3),
        "driver_peak_rss_mb": round(done.peak_mb[0, "driver"], 1),
        "agent_peak_rss_mb": round(done.peak_mb[1, "agent"], 1),
    }
