"""Part ``costs``: what a message, a round, a model and a host cost, to tell what many of them would."""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import network, runs
from benchmarks.cluster.overhead import OPTIONS
from benchmarks.shared import table
from benchmarks.simulation.engines import Run

#: Clients of a round with many and with few, MB of a small and a large model, and rounds.
SIZE, QUICK_SIZE = (800, 4, 0.01, 45.0, 8), (6, 2, 0.01, 0.5, 12)
#: Hosts of a small and a large cluster, and how long their clients do nothing.
IDLE, QUICK_IDLE = (2, 4, 8.0), (1, 2, 0.5)

_KINDS = ("driver", "agent", "ray")


def measure(many: int, few: int, small_mb: float, large_mb: float, rounds: int) -> list[dict[str, Any]]:
    """Return a row each for a message, a round, and a MB of the model in a round.

    Rounds differ in one thing each time: the number of clients, then the size of the model. CPU times are
    those of both hosts together, bytes those of the second one.
    """
    with network.cluster() as cluster:
        base, crowd, large = (
            runs.perform(_no_op(clients, size_mb, rounds), cluster, is_watched=True)
            for clients, size_mb in ((few, small_mb), (many, small_mb), (few, large_mb))
        )
    message = {name: (_used(crowd)[name] - _used(base)[name]) / (many - few) for name in _used(base)}
    size = {name: (_used(large)[name] - _used(base)[name]) / (large_mb - small_mb) for name in message}
    one_round = {name: _used(base)[name] - few * message[name] for name in message}
    rows = [
        {"of": "message", **_rounded(message)},
        {"of": "round of two hosts", **_rounded(one_round)},
        {"of": "MB of the model, a round", **_rounded(size)},
    ]
    for row, done, clients, size_mb in (
        (rows[0], crowd, many, small_mb),
        (rows[1], base, few, small_mb),
        (rows[2], large, few, large_mb),
    ):
        row |= {
            "clients": clients,
            "model_mb": size_mb,
            "round_s": round(done.round_s, 4),
            "driver_peak_rss_mb": round(done.peak_mb[0, "driver"], 1),
            "agent_peak_rss_mb": round(done.peak_mb[1, "agent"], 1),
        }
    _show("costs", rows)
    return rows


def measure_idle(small: int, large: int, idle_s: float) -> list[dict[str, Any]]:
    """Return a row with what a host more costs in a second in which nothing happens."""
    found = {}
    for hosts in (small, large):
        sizes = " ".join([str(idle_s)] * 2)
        run = Run("ours", "sleeping", 2, {"sizes-s": sizes, "num-server-rounds": 3}, options=OPTIONS)
        with network.cluster(hosts) as cluster:
            done = runs.perform(run, cluster, is_watched=True)
        a_round_s = done.watched_s / done.counted_rounds
        found[hosts] = {
            **{f"{kind}_cpu_ms": done.cpu_s(kind) / a_round_s * 1000 for kind in _KINDS},
            "down_bytes": sum(done.wire_bytes(number)[0] for number in range(1, hosts)) / a_round_s,
            "up_bytes": sum(done.wire_bytes(number)[1] for number in range(1, hosts)) / a_round_s,
        }
    more = {name: (found[large][name] - found[small][name]) / (large - small) for name in found[small]}
    rows = [
        *({"of": f"second of {hosts} hosts", **_rounded(found[hosts])} for hosts in found),
        {"of": "second of one host more", **_rounded(more)},
    ]
    _show("hosts that wait", rows)
    return rows


def _no_op(clients: int, size_mb: float, rounds: int) -> Run:
    config = {"model-mb": size_mb, "num-server-rounds": rounds}
    return Run("ours", "no_op", clients, config, options=OPTIONS)


def _used(done: runs.Done) -> dict[str, float]:
    """Return what a round has used."""
    down, up = done.wire_bytes(1)
    cpu_ms = {f"{kind}_cpu_ms": done.cpu_s(kind) * 1000 for kind in _KINDS}
    return {**cpu_ms, "down_bytes": down, "up_bytes": up}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 0 if name.endswith("bytes") else 3) for name, value in values.items()}


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    table.show(
        title,
        ("of a", "CPU of the driver", "of agents", "of Ray", "down", "up"),
        [
            (
                row["of"],
                *(f"{row[f'{kind}_cpu_ms']:.2f} ms" for kind in _KINDS),
                *(f"{row[f'{way}_bytes'] / 1000:.1f} kB" for way in ("down", "up")),
            )
            for row in rows
        ],
    )
