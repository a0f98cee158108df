"""Part ``mps``: small clients that train at the same time, with and without MPS.

Without MPS, the GPU switches between their processes. The figure is the number of steps per second of all
clients together.
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
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def measure(setting: Setting) -> dict[str, Any]:
    rates: dict[tuple[int, str], list[float]] = {}
    percentages: dict[int, list[int]] = {}
    for number in range(setting.sizes.runs):
        for clients in setting.sizes.packed:
            for way in _WAYS:
                if number and time.monotonic() > setting.deadline:
                    print("mps: its time is over; the earlier figures count", flush=True)
                    return _result(rates, percentages)
                replies = _simulate(setting, clients, way)
                rates.setdefault((clients, way), []).append(sum(reply["rate"] for reply in replies))
                if way == "mps":
                    percentages[clients] = sorted({reply["percentage"] for reply in replies})
    return _result(rates, percentages)


def _result(rates: dict[tuple[int, str], list[float]], percentages: dict[int, list[int]]) -> dict[str, Any]:
    rows = []
    for clients in sorted(percentages):
        mps, turns = rates[clients, "mps"], rates[clients, "turns"]
        rows.append(
            {
                "clients": clients,
                "turns_steps_per_s": [round(rate, 1) for rate in turns],
                "mps_steps_per_s": [round(rate, 1) for rate in mps],
                "mps_to_turns": round(median(a / b for a, b in zip(mps, turns, strict=False)), 3),
                "percentages": percentages[clients],
            }
        )
    return {"rows": rows}


def _simulate(setting: Setting, clients: int, way: str) -> list[dict[str, Any]]:
    """Return the replies of the second round, when all workers are running."""
    from flower_gpu import simulate
    from flower_gpu.errors import ConfigError

    replies: list[dict[str, Any]] = []
    server = ServerApp()
    server.main()(partial(_rounds, setting.sizes.neighbor_s / 2, replies))
    client = ClientApp()
    client.train()(partial(_train, setting.model, str(setting.folder / "training")))
    try:
        simulate(
            (server, client), clients, num_gpus=1 / clients, max_workers=clients, mps=way == "mps",
            env=_DETERMINISTIC, log_dir=None, progress=False, verbose=False, gpu="require",
        )  # fmt: skip
    except ConfigError as error:
        raise BenchmarkError(f"mps: {error}") from error
    return replies


def _rounds(seconds: float, replies: list[dict[str, Any]], grid: Grid, context: Context) -> None:
    for round_s in (0.1, seconds):
        replies.clear()
        content = RecordDict({"config": ConfigRecord({"seconds": round_s})})
        messages = [Message(content, node, "train") for node in grid.get_node_ids()]
        for reply in grid.send_and_receive(messages):
            if reply.has_error():
                raise BenchmarkError(f"mps: {reply.error.reason}")
            replies.append(dict(reply.content["metrics"]))


def _train(model: str, marker: str, message: Message, context: Context) -> Message:
    import os

    from benchmarks.gpu import work

    done = work.steps(model, float(message.content["config"]["seconds"]), None, marker)
    metrics = {
        "rate": done["steps"] / (done["last"] - done["first"]),
        "percentage": int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100)),
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError if a client had more than its share of the processors."""
    for row in result["rows"]:
        if any(percentage > 100 / row["clients"] + 1 for percentage in row["percentages"]):
            raise BenchmarkError(f"mps: clients had more than their share: {row}")


def show(result: dict[str, Any]) -> None:
    table.show("steps per second of all clients together", result["rows"])
