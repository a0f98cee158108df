"""Part ``mps``: small clients that train at the same time: their processes in turns, and side by side by MPS.

Each trains a small network for some seconds. The figure is how many steps all of them take in a second.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks.gpu.setting import Setting
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 180.0

_WAYS = ("turns", "mps")
_ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # the steps are deterministic


def measure(setting: Setting) -> dict[str, Any]:
    rates: dict[tuple[int, str], list[float]] = {}
    percentages: dict[int, list[int]] = {}
    for number in range(setting.sizes.runs):
        for clients in setting.sizes.packed:
            for way in _WAYS:
                if number and time.monotonic() - setting.began > setting.limit_s:
                    print("mps: its time is over; what was measured before counts", flush=True)
                    return _result(rates, percentages)
                replies = _simulated(setting, clients, way)
                rates.setdefault((clients, way), []).append(sum(reply["rate"] for reply in replies))
                if way == "mps":
                    percentages[clients] = sorted({reply["percentage"] for reply in replies})
    return _result(rates, percentages)


def _result(rates: dict[tuple[int, str], list[float]], percentages: dict[int, list[int]]) -> dict[str, Any]:
    rows = []
    for clients in sorted(percentages):
        found = {way: rates[clients, way] for way in _WAYS}
        ratios = [ours / others for ours, others in zip(found["mps"], found["turns"], strict=False)]
        rows.append(
            {
                "clients": clients,
                **{f"{way}_steps_per_s": [round(rate, 1) for rate in found[way]] for way in _WAYS},
                "mps_to_turns": round(median(ratios), 3),
                "percentages": percentages[clients],
            }
        )
    return {"rows": rows}


def _simulated(setting: Setting, clients: int, way: str) -> list[dict[str, Any]]:
    """Return the replies of the second round, in which nothing has to start any more."""
    from flower_gpu import simulate
    from flower_gpu.errors import ConfigError

    replies: list[dict[str, Any]] = []
    server = ServerApp()
    server.main()(partial(_rounds, setting.sizes.neighbour_s / 2, replies))
    client = ClientApp()
    client.train()(partial(_train, setting.model, str(setting.folder / "training")))
    try:
        simulate(
            (server, client), clients, num_gpus=1 / clients, max_workers=clients, mps=way == "mps", env=_ENV,
            log_dir=None, progress=False, verbose=False, gpu="require",
        )  # fmt: skip
    except ConfigError as error:
        raise BenchmarkError(f"mps: {error}") from error
    return replies


def _rounds(seconds: float, replies: list[dict[str, Any]], grid: Grid, context: Context) -> None:
    for length in (0.1, seconds):
        replies.clear()
        config = {"seconds": length}
        messages = [
            Message(RecordDict({"config": ConfigRecord(config)}), node, "train")
            for node in grid.get_node_ids()
        ]
        for reply in grid.send_and_receive(messages):
            if reply.has_error():
                raise BenchmarkError(f"mps: {reply.error.reason}")
            replies.append(dict(reply.content["metrics"]))


def _train(model: str, marker: str, message: Message, context: Context) -> Message:
    import os

    from benchmarks.gpu import work

    found = work.steps(model, float(message.content["config"]["seconds"]), None, marker)
    rate = found["steps"] / (found["last"] - found["first"])
    percentage = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100))
    return Message(
        RecordDict({"metrics": MetricRecord({"rate": rate, "percentage": percentage})}), reply_to=message
    )


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError where clients had no share of the processors."""
    for row in result["rows"]:
        if any(percentage > 100 / row["clients"] + 1 for percentage in row["percentages"]):
            raise BenchmarkError(f"mps: clients had more than their share: {row}")


def show(result: dict[str, Any]) -> None:
    table.show(
        "steps per second of all clients together, medians",
        ("clients", "in turns", "by MPS", "MPS to turns", "percent of the processors"),
        [
            (
                row["clients"],
                *(f"{median(row[f'{way}_steps_per_s']):.0f}" for way in _WAYS),
                f"{row['mps_to_turns']:.2f}x",
                ", ".join(map(str, row["percentages"])),
            )
            for row in result["rows"]
        ],
    )
