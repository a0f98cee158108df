"""Parts ``costs`` and ``idle``: cost of a message, a round, a MB of the model, and a host."""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import network, runs
from benchmarks.cluster.overhead import OPTIONS, no_op
from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options
from benchmarks.simulation.engines import Run

#: Clients per round, many and few; MB of the model, small and large; and rounds.
_SIZE, _QUICK_SIZE = (800, 4, 0.01, 45.0, 8), (6, 2, 0.01, 0.5, 12)
#: Hosts of a small and a large cluster, and seconds that their clients sleep.
_IDLE, _QUICK_IDLE = (2, 4, 8.0), (1, 2, 0.5)
_KINDS = ("driver", "agent", "ray")
_COLUMNS = "of driver_cpu_ms agent_cpu_ms ray_cpu_ms down_bytes up_bytes"


def measure(options: Options, figures: Figures) -> None:
    """Add a row for a message, for a round, and for a MB of the model in a round.

    Three runs differ in one thing each: the number of clients, and the size of the model. CPU times are
    sums over both hosts. Bytes are those of the second host.
    """
    many, few, small_mb, large_mb, rounds = _QUICK_SIZE if options.quick else _SIZE
    with network.cluster() as cluster:
        base, crowd, large = (
            runs.perform(no_op(clients, size_mb, rounds), cluster, is_watched=True)
            for clients, size_mb in ((few, small_mb), (many, small_mb), (few, large_mb))
        )
    per_round = _used(base)
    message = {name: (value - per_round[name]) / (many - few) for name, value in _used(crowd).items()}
    megabyte = {
        name: (value - per_round[name]) / (large_mb - small_mb) for name, value in _used(large).items()
    }
    one_round = {name: value - few * message[name] for name, value in per_round.items()}
    figures["costs"] = [
        {
            "of": of,
            **_rounded(values),
            "clients": clients,
            "model_mb": size_mb,
            "round_s": round(result.round_s, 4),
            "driver_peak_rss_mb": round(result.peaks_mb[0, "driver"], 1),
            "agent_peak_rss_mb": round(result.peaks_mb[1, "agent"], 1),
        }
        for of, values, result, clients, size_mb in (
            ("message", message, crowd, many, small_mb),
            ("round of two hosts", one_round, base, few, small_mb),
            ("MB of the model, a round", megabyte, large, few, large_mb),
        )
    ]
    table.show("costs", figures["costs"], _COLUMNS)


def measure_idle(options: Options, figures: Figures) -> None:
    """Add rows with the cost of an idle second, for two sizes of the cluster."""
    small, large, idle_s = _QUICK_IDLE if options.quick else _IDLE
    per_second = {}
    for hosts in (small, large):
        config = {"sleep-s": f"{idle_s} {idle_s}", "num-server-rounds": 3, "model-mb": 0.004}
        with network.cluster(hosts) as cluster:
            result = runs.perform(Run("ours", "no_op", 2, config, options=OPTIONS), cluster, is_watched=True)
        round_s = result.watched_s / result.counted_rounds
        per_second[hosts] = {
            **{f"{kind}_cpu_ms": result.cpu_s(kind) / round_s * 1000 for kind in _KINDS},
            "down_bytes": sum(result.wire_bytes(number)[0] for number in range(1, hosts)) / round_s,
            "up_bytes": sum(result.wire_bytes(number)[1] for number in range(1, hosts)) / round_s,
        }
    one_more = {
        name: (value - per_second[small][name]) / (large - small) for name, value in per_second[large].items()
    }
    figures["idle"] = [
        *({"of": f"second of {hosts} hosts", **_rounded(values)} for hosts, values in per_second.items()),
        {"of": "second of one host more", **_rounded(one_more)},
    ]
    table.show("idle hosts", figures["idle"], _COLUMNS)


def _used(result: runs.Result) -> dict[str, float]:
    """Return CPU times and bytes of a round."""
    down, up = result.wire_bytes(1)
    cpu_ms = {f"{kind}_cpu_ms": result.cpu_s(kind) * 1000 for kind in _KINDS}
    return {**cpu_ms, "down_bytes": down, "up_bytes": up}


def _rounded(values: dict[str, float]) -> dict[str, Any]:
    return {name: round(value, 0 if name.endswith("bytes") else 3) for name, value in values.items()}
