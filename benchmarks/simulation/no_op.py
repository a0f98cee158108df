"""Parts ``no-op`` and ``many``: clients that give back what they got."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Done, Run, in_turn, perform

#: Clients, rounds, MB of the model, and whose FedAvg ours has; Ray has Flower's.
SIZES = ((100, 3, 1.0, "ours"), (100, 3, 45.0, "ours"), (100, 3, 45.0, "flower"), (1000, 1, 1.0, "ours"))
QUICK_SIZES = ((6, 2, 0.1, "ours"),)
MANY, QUICK_MANY = 10_000, 40

_MANY_MB = 1.0
_MOMENTS = (0.1, 0.5, 0.9)
_FASTER = {(100, 45.0): 4.0, (100, 1.0): 5.0, (1000, 1.0): 5.0}
_MEMORY = {(100, 45.0): 1 / 10}


def measure(
    sizes: Sequence[tuple[int, int, float, str]], engines: Sequence[str], runs: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row per engine and size, and a row per size with what ours is to Ray."""
    rows, ratios = [], []
    for clients, rounds, model_mb, strategy in sizes:
        config: dict[str, Any] = {"model-mb": model_mb, "num-server-rounds": rounds}
        of = {"ours": {**config, "strategy": strategy}, "ray": config}
        ways = {name: Run(name, "no_op", clients, of[name]) for name in engines if name != "loop"}
        found = {
            name: {
                **_row(name, clients, rounds, model_mb, done),
                "strategy": of[name].get("strategy", "flower"),
            }
            for name, done in in_turn(ways, runs).items()
        }
        _show(found)
        rows += found.values()
        if {"ours", "ray"} <= found.keys():
            ratios.append(_ratio(found["ours"], found["ray"]))
            _show_ratio(ratios[-1])
    return rows, ratios


def _row(engine: str, clients: int, rounds: int, model_mb: float, done: Sequence[Done]) -> dict[str, Any]:
    round_s = median(each.round_s for each in done)
    return {
        "engine": engine,
        "clients": clients,
        "rounds": rounds,
        "model_mb": model_mb,
        "runs": len(done),
        "total_s": round(median(each.total_s for each in done), 2),
        "round_s": round(round_s, 2),
        "per_message_ms": round(round_s / clients * 1000, 2),
        "peak_tree_mb": done[-1].peak_mb,
        "all_total_s": [round(each.total_s, 2) for each in done],
    }


def _ratio(ours: dict[str, Any], ray: dict[str, Any]) -> dict[str, Any]:
    size = ours["clients"], ours["model_mb"]
    return {
        **{name: ours[name] for name in ("clients", "rounds", "model_mb", "strategy")},
        "faster": round(ray["total_s"] / ours["total_s"], 2),
        "faster_aim": _FASTER.get(size),
        "memory": round(ours["peak_tree_mb"] / ray["peak_tree_mb"], 3),
        "memory_aim": round(_MEMORY[size], 3) if size in _MEMORY else None,
    }


def _show(found: dict[str, dict[str, Any]]) -> None:
    row = next(iter(found.values()))
    table.show(
        f"no-op, {row['clients']} clients, {row['rounds']} rounds, {row['model_mb']:g} MB, {row['strategy']}",
        ("engine", "total", "a round", "per message", "peak of the tree", "runs"),
        [
            (
                engine,
                f"{row['total_s']:.1f} s",
                f"{row['round_s']:.2f} s",
                f"{row['per_message_ms']:.1f} ms",
                f"{row['peak_tree_mb']:.0f} MB",
                row["runs"],
            )
            for engine, row in found.items()
        ],
    )


def _show_ratio(row: dict[str, Any]) -> None:
    faster = "" if row["faster_aim"] is None else f" (aim: at least {row['faster_aim']:g}x)"
    memory = "" if row["memory_aim"] is None else f" (aim: at most {row['memory_aim']:.2f})"
    print(f"ours is {row['faster']:.1f}x as fast{faster}; memory: {row['memory']:.2f} of Ray's{memory}")


def measure_many(clients: int) -> list[dict[str, Any]]:
    """Run very many clients once; return the row."""
    config = {"model-mb": _MANY_MB, "num-server-rounds": 1}
    done = perform(Run("ours", "no_op", clients, config))
    replied = sorted(done.replied)
    if len(replied) < clients:
        raise BenchmarkError(f"many: {len(replied)} of {clients} workers finished")
    assert done.memory is not None
    after = {
        f"mb_at_{share * 100:.0f}_percent": round(done.memory.at(replied[int(share * clients)]), 1)
        for share in _MOMENTS
    }
    row = {
        "engine": "ours",
        "clients": clients,
        "rounds": 1,
        "model_mb": _MANY_MB,
        "total_s": round(done.total_s, 1),
        "per_message_ms": round(done.round_s / clients * 1000, 2),
        "peak_tree_mb": done.peak_mb,
        **after,
    }
    table.show(
        f"{clients} clients, 1 round, {_MANY_MB:g} MB: memory of the tree after so many replies",
        ("engine", "total", "per message", "10 %", "50 %", "90 %", "peak"),
        [
            (
                "ours",
                f"{row['total_s']:.1f} s",
                f"{row['per_message_ms']:.1f} ms",
                *(f"{mb:.0f} MB" for mb in after.values()),
                f"{row['peak_tree_mb']:.0f} MB",
            )
        ],
    )
    return [row]
