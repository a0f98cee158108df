"""Parts ``digits`` and ``accuracy``: small clients that train, and how good their model is."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Done, Run, in_turn, perform

#: Clients and rounds of ``digits``; clients, rounds and clients of a round of ``accuracy``.
DIGITS, QUICK_DIGITS = (100, 5), (2, 2)
#: Calls per worker of ours; 1000 are more than there are: Ray keeps its actors to the end, too.
CALLS, QUICK_CALLS = (1, 1000), (1000,)
ACCURACY, QUICK_ACCURACY = (100, 10, 10), (4, 1, 2)
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)

_IDEAL = "the loop, which is on one core, divided by the cores (aim of many calls: at most 1.2x)"
_NEAR = 0.01  # of accuracy: the same training, summed in another order
_ALPHA, _EPOCHS = 0.3, 5
_SMALLEST_NOISE = 0.03


def measure(
    clients: int, rounds: int, engines: Sequence[str], epochs: Sequence[int], runs: int, calls: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row per engine, calls per worker, and local epochs."""
    rows = []
    for count in epochs:
        config = {"num-server-rounds": rounds, "local-epochs": count, "alpha": 0.0, "seed": 0}
        ways = ways_of("digits", clients, config, engines, calls)
        if "ours" in engines:
            options = ("--calls-per-worker", "1", "--preload", "digits.task:load_data")
            preloaded = Run("ours", "digits", clients, config, saves_model=True, options=options)
            ways = {"ours, 1 call per worker, data preloaded": preloaded, **ways}
        done = in_turn(ways, runs)
        reference = next(reversed(done.values()))[-1].model  # the loop's, if there is one
        found = [
            {
                **timed_row(ways[name], each),
                "local_epochs": count,
                "accuracy": round(_accuracy(each[-1].model), 4),
                "weights_differ_by": _difference(each[-1].model, reference),
            }
            for name, each in done.items()
        ]
        compare_to_ideal(found)
        show(f"digits, {clients} clients, {rounds} rounds, {count} local epochs", found, _IDEAL)
        _check_same(found)
        rows += found
    return rows


def ways_of(
    app: str,
    clients: int,
    config: dict[str, Any],
    engines: Sequence[str],
    calls_per_worker: Iterable[int | None],
) -> dict[str, Run]:
    """Return what is run in turn: each engine, and ours with several numbers of calls per worker."""
    ways: dict[str, Run] = {}
    for engine in engines:
        if engine != "ours":
            ways[engine] = Run(engine, app, clients, config, saves_model=True)
            continue
        for calls in calls_per_worker:
            options = () if calls is None else ("--calls-per-worker", str(calls))
            name = f"ours, {'default' if calls is None else calls} calls per worker"
            ways[name] = Run("ours", app, clients, config, True, options)
    return ways


def timed_row(run: Run, done: Sequence[Done]) -> dict[str, Any]:
    return {
        "engine": run.engine,
        "calls_per_worker": _value(run.options, "--calls-per-worker"),
        "preload": "--preload" in run.options,
        "is_second": run.is_second,
        "clients": run.clients,
        "rounds": run.config["num-server-rounds"],
        "runs": len(done),
        "total_s": round(median(each.total_s for each in done), 2),
        "total_cpu_s": round(median(each.total_cpu_s for each in done), 2),
        "round_s": round(median(each.round_s for each in done), 3),
        "strategy_s": round(median(sum(each.figures["rounds_s"]) for each in done), 2),
        "app_share": _app_share(done),
        "peak_tree_mb": done[-1].peak_mb,
        "all_total_s": [round(each.total_s, 2) for each in done],
        "all_rounds_s": [[round(value, 3) for value in each.figures["rounds_s"]] for each in done],
    }


def _value(options: Sequence[str], name: str) -> int | None:
    return int(options[options.index(name) + 1]) if name in options else None


def _app_share(done: Sequence[Done]) -> float | None:
    """Return how much of the cores' time from the second round on was the app's own; ours only."""
    shares = [
        sum(each.cpu_s[1:]) / sum(each.figures["rounds_s"][1:]) / len(os.sched_getaffinity(0))
        for each in done
        if len(each.cpu_s) > 1
    ]
    return round(median(shares), 3) if shares else None


def compare_to_ideal(rows: Sequence[dict[str, Any]], at_a_time: int | None = None) -> None:
    """Add what each row is to the plain loop divided by the cores; None without that loop."""
    at_a_time = at_a_time or len(os.sched_getaffinity(0))
    loop = next((row for row in rows if row["engine"] == "loop"), None)
    for row in rows:
        for name in ("total", "round"):
            ideal_s = None if loop is None else loop[f"{name}_s"] / at_a_time
            row[f"{name}_to_ideal"] = round(row[f"{name}_s"] / ideal_s, 2) if ideal_s else None


def show(title: str, rows: Sequence[dict[str, Any]], ideal: str) -> None:
    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}x"

    table.show(
        title,
        (
            "engine",
            "calls per worker",
            "total",
            "total CPU",
            "strategy",
            "a round",
            "total to ideal",
            "round to ideal",
            "app's share",
            "accuracy",
            "peak",
        ),
        [
            (
                row.get("way", row["engine"]),
                f"{row['calls_per_worker'] or ''}{', data preloaded' * row['preload']}"
                f"{', second run' * row['is_second']}",
                f"{row['total_s']:.1f} s",
                f"{row['total_cpu_s']:.1f} s",
                f"{row['strategy_s']:.1f} s",
                f"{row['round_s']:.2f} s",
                times(row["total_to_ideal"]),
                times(row["round_to_ideal"]),
                "" if row["app_share"] is None else f"{row['app_share']:.0%}",
                f"{row['accuracy']:.3f}" if "accuracy" in row else "",
                f"{row['peak_tree_mb']:.0f} MB",
            )
            for row in rows
        ],
    )
    print(f"ideal: {ideal}")


def _difference(model: list[Any], other: list[Any]) -> float:
    """Return the largest absolute difference of a weight."""
    return max(float(abs(mine - its).max()) for mine, its in zip(model, other, strict=True))


def _check_same(rows: Sequence[dict[str, Any]]) -> None:
    found = [row["accuracy"] for row in rows]
    if max(found) - min(found) > _NEAR:
        raise BenchmarkError(f"digits: the same training gave models of accuracies {found}")
    print(f"largest difference of a weight: {max(row['weights_differ_by'] for row in rows):.1g}")


def measure_accuracy(
    clients: int, rounds: int, each: int, seeds: Sequence[int], engines: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row per engine and seed."""
    rows = []
    chosen = [engine for engine in engines if engine != "loop"]
    for number, seed in enumerate(seeds):
        config = {
            "num-server-rounds": rounds,
            "clients-per-round": each,
            "local-epochs": _EPOCHS,
            "alpha": _ALPHA,
            "seed": seed,
        }
        for engine in chosen if number % 2 == 0 else reversed(chosen):
            options = ("--seed", str(seed)) if engine == "ours" else ()
            done = perform(Run(engine, "digits", clients, config, True, options))
            row = {
                "engine": engine,
                "seed": seed,
                "clients": clients,
                "clients_per_round": each,
                "rounds": rounds,
                "alpha": _ALPHA,
                "local_epochs": _EPOCHS,
                "accuracy": round(_accuracy(done.model), 4),
                "total_s": round(done.total_s, 2),
                "round_s": round(done.round_s, 3),
            }
            rows.append(row)
    table.show(
        f"digits, Dirichlet {_ALPHA}, {clients} clients, {each} of them in each of {rounds} rounds",
        ("engine", *(f"seed {seed}" for seed in seeds), "mean", "median of total"),
        [(engine, *_shown([row for row in rows if row["engine"] == engine])) for engine in chosen],
    )
    return rows


def _shown(rows: list[dict[str, Any]]) -> list[str]:
    accuracies = [row["accuracy"] for row in sorted(rows, key=lambda row: row["seed"])]
    total_s = median(row["total_s"] for row in rows)
    return [*(f"{value:.3f}" for value in accuracies), f"{fmean(accuracies):.3f}", f"{total_s:.1f} s"]


def check_near(rows: list[dict[str, Any]]) -> None:
    """Print how far the engines' means are apart, and what chance does.

    Raises
    ------
    BenchmarkError
        If that is more than the noise: three standard deviations of such a difference.
    """
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    found = [[row["accuracy"] for row in rows if row["engine"] == engine] for engine in engines]
    if len(engines) < 2 or len(found[0]) < 2:
        return  # nothing is known of the noise
    noise = max(_SMALLEST_NOISE, 3 * math.sqrt(sum(variance(each) / len(each) for each in found)))
    apart = abs(fmean(found[0]) - fmean(found[1]))
    print(f"the means are {apart:.3f} apart; noise of seeds and of sampled clients: {noise:.3f}")
    if apart > noise:
        raise BenchmarkError(f"accuracy: {' and '.join(engines)} differ by more than seeds do: {found}")


def _accuracy(model: list[Any]) -> float:
    folder = str(Path(__file__).with_name("apps") / "digits")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from digits import task

    return float(task.accuracy(model))
