"""Parts ``overhead`` and ``wire``: two hosts beside one machine with the same cores, and their traffic."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.app.bench_app import initial
from benchmarks.cluster import network, runs
from benchmarks.shared import driver, table
from benchmarks.shared.driver import Figures, Options, Rows
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation import engines
from benchmarks.simulation.engines import Run

WAYS = ("one machine", "two hosts")
OPTIONS = ("--gpu", "never")
#: Limit for a weight. The two ways sum the same updates in another order.
_MAX_DIFFERENCE = 1e-3


def no_op(clients: int, model_mb: float, rounds: int, strategy: str = "ours") -> Run:
    config = {"model-mb": model_mb, "num-server-rounds": rounds, "strategy": strategy}
    return Run("ours", "no_op", clients, config, options=OPTIONS)


def _digits(clients: int, epochs: int, rounds: int) -> Run:
    config = {"num-server-rounds": rounds, "local-epochs": epochs}
    return Run("ours", "digits", clients, config, True, OPTIONS)


def measure(options: Options, figures: Figures) -> None:
    """Add a row per run and way, and a row per run with the ratios of the two ways."""
    chosen = {
        "digits, 1 local epoch": _digits(100, 1, 6),
        "digits, 20 local epochs": _digits(100, 20, 5),
        "no-op": no_op(100, 1.0, 6),
    }
    if options.quick:
        chosen = {"no-op": no_op(4, 0.1, 4)}
    results: dict[tuple[str, str], list[Any]] = {(name, way): [] for name in chosen for way in WAYS}
    for _, way in driver.in_turn(WAYS, options.runs):
        if way == "one machine":
            for name, run in chosen.items():
                results[name, way].append(engines.perform(run, is_sampled=False))
        else:
            # The cluster exists only during this way.
            with network.cluster() as cluster:
                for name, run in chosen.items():
                    results[name, way].append(runs.perform(run, cluster))
    figures["overhead"], figures["overhead-ratios"] = [], []
    for name, run in chosen.items():
        one, two = (_row(name, way, run, results[name, way]) for way in WAYS)
        pairs = zip(one["all_round_s"], two["all_round_s"], strict=True)
        ratio = {
            "app": name,
            "round": round(two["round_s"] / one["round_s"], 3),
            "rounds_of_pairs": [round(theirs / mine, 3) for mine, theirs in pairs],
            "total": round(two["total_s"] / one["total_s"], 3),
            "added_ms_per_message": round((two["round_s"] - one["round_s"]) / run.clients * 1000, 3),
        }
        if run.saves_model:
            models = (results[name, way][-1].model for way in WAYS)
            ratio["weights_differ_by"] = engines.max_difference(*models)
            if ratio["weights_differ_by"] > _MAX_DIFFERENCE:
                raise BenchmarkError(f"{name}: the models differ by {ratio['weights_differ_by']:.2g}")
        table.show(f"{name}, {run.clients} clients", [one, two], "way total_s round_s all_round_s runs")
        table.show("two hosts to one machine", [ratio], "round total added_ms_per_message")
        figures["overhead"] += one, two
        figures["overhead-ratios"].append(ratio)


def _row(name: str, way: str, run: Run, results: Sequence[Any]) -> dict[str, Any]:
    return {
        "app": name,
        "way": way,
        "clients": run.clients,
        "rounds": run.config["num-server-rounds"],
        "runs": len(results),
        "total_s": round(median(each.total_s for each in results), 2),
        "round_s": round(median(each.round_s for each in results), 4),
        "all_total_s": [round(each.total_s, 2) for each in results],
        "all_round_s": [round(each.round_s, 4) for each in results],
        "all_rounds_s": [[round(value, 3) for value in each.figures["rounds_s"]] for each in results],
    }


def measure_wire(options: Options, figures: Figures) -> None:
    """Add a row per run with the bytes that the second host receives and sends in a round."""
    chosen = {"no-op": no_op(4, 0.1, 12)}
    if not options.quick:
        chosen = {"digits": _digits(100, 1, 10)} | {
            f"no-op {size_mb:g} MB, {strategy} FedAvg": no_op(100, size_mb, 10, strategy)
            for size_mb in (1.0, 10.0)
            for strategy in ("ours", "flower")
        }
    with network.cluster() as cluster:
        results = {name: runs.perform(run, cluster, is_watched=True) for name, run in chosen.items()}
    rows: Rows = []
    for name, result in results.items():
        run = chosen[name]
        app_config = {"client": run.client, "seed": 0, "arrays": 20, **run.config}
        model_bytes = sum(array.nbytes for array in initial.model(app_config))
        down, up = result.wire_bytes(1)
        messages = max(result.messages[1], 1)
        rows.append(
            {
                "app": name,
                "clients": run.clients,
                "rounds": result.counted_rounds,
                "round_s": round(result.watched_s / result.counted_rounds, 3),
                "messages_of_host": round(result.messages[1], 1),
                "model_bytes": model_bytes,
                "sum_bytes": 2 * model_bytes,
                "down_bytes": round(down),
                "up_bytes": round(up),
                "down_to_model": round(down / model_bytes, 3),
                "up_to_sum": round(up / (2 * model_bytes), 3),
                "driver_cpu_ms_per_message": round(result.cpu_s("driver") / run.clients * 1000, 3),
                "agent_cpu_ms_per_message": round(result.cpu_s("agent", 1) / messages * 1000, 3),
                "ray_cpu_ms_per_message": round(result.cpu_s("ray") / run.clients * 1000, 3),
                "driver_peak_rss_mb": round(result.peaks_mb[0, "driver"], 1),
                "agent_peak_rss_mb": round(result.peaks_mb[1, "agent"], 1),
            }
        )
    columns = "app messages_of_host model_bytes down_bytes down_to_model sum_bytes up_bytes up_to_sum"
    table.show("a round of the second host", rows, columns)
    figures["wire"] = rows
