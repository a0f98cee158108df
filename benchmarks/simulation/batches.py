"""Part ``batches``: small networks, with one message at a time and with several by ``train_many``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Result, Run, in_turn, max_difference

_SIZE, _QUICK_SIZE = (100, 12), (8, 2)  # Clients and rounds.
_NETWORKS, _QUICK_NETWORKS = ("mlp", "cnn", "wide-cnn", "image-cnn"), ("mlp",)
#: The first rounds try sizes of batches, so only the last rounds count.
_COUNTED_ROUNDS = 6
#: Maximum number of messages per call of the app's handler. With 0, it takes single messages.
_WAYS = {"one": 0, "many": 64}
#: Limit for weights after all rounds. Over many steps, a rounding error can change which value is largest.
_MAX_DIFFERENCE = 1e-3
_COLUMNS = "way round_s faster task_cpu_s peak_tree_mb fastest message_ms_by_size weights_differ_by"


def measure(options: Options, figures: Figures) -> None:
    """Add a row per network and way."""
    clients, rounds = _QUICK_SIZE if options.quick else _SIZE
    figures["batches"] = []
    for network in _QUICK_NETWORKS if options.quick else _NETWORKS:
        config = {"num-server-rounds": rounds, "strategy": "flower", "network": network}
        runs = {
            way: Run("ours", "small_models", clients, config, saves_model=True,
                     env={"SMALL_MODELS_MAX_MESSAGES": str(max_messages)})
            for way, max_messages in _WAYS.items()
        }  # fmt: skip
        results = in_turn(runs, options.runs)
        rows = [_row(network, way, runs[way], results[way], results["one"]) for way in _WAYS]
        table.show(f"{network}: {clients} clients in each of {rounds} rounds", rows, _COLUMNS)
        figures["batches"] += rows


def _row(
    network: str, way: str, run: Run, results: Sequence[Result], reference: Sequence[Result]
) -> dict[str, Any]:
    rounds_s = [_later_round_s(each) for each in results]
    differ_by = max(max_difference(reference[0].model, each.model) for each in results)
    if differ_by > _MAX_DIFFERENCE:
        raise BenchmarkError(f"{network}, {way}: weights differ by {differ_by:.2g} from single messages")
    batches = [each.summary["batches"] for each in results]
    return {
        "network": network,
        "way": way,
        "clients": run.clients,
        "rounds": run.config["num-server-rounds"],
        "runs": len(results),
        "round_s": round(median(rounds_s), 3),
        "faster": round(median(map(_later_round_s, reference)) / median(rounds_s), 2),
        "task_cpu_s": round(median(median(each.task_cpu_s()[-_COUNTED_ROUNDS:]) for each in results), 3),
        "run_cpu_s": round(median(each.total_cpu_s for each in results), 1),
        "peak_tree_mb": results[-1].peak_mb,
        "fastest": [each.get("fastest", {}).get("train", 1) for each in batches],
        "batches": batches,
        "message_ms_by_size": _message_ms(results),
        "weights_differ_by": differ_by,
        "all_round_s": [round(value, 3) for value in rounds_s],
    }


def _later_round_s(result: Result) -> float:
    return median(result.figures["rounds_s"][-_COUNTED_ROUNDS:])


def _message_ms(results: Sequence[Result]) -> dict[int, float]:
    """Return the milliseconds of a message by the size of its batch, for sizes with three batches or more."""
    times_ms: dict[int, list[float]] = defaultdict(list)
    for result in results:
        names = [call["call"].partition("-")[0] for call in result.calls]
        sizes = Counter(names)
        seconds = {name: call["seconds"] for name, call in zip(names, result.calls, strict=True)}
        for name, size in sizes.items():
            times_ms[size].append(seconds[name] / size * 1000)
    return {size: round(median(times_ms[size]), 2) for size in sorted(times_ms) if len(times_ms[size]) >= 3}
