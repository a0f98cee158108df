"""A server that lets all clients train."""

import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

from flower_gpu import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    if context.run_config["mixed"]:
        for reply in grid.send_and_receive(_mixed(grid)):
            assert not reply.has_error(), reply.error
        return
    _run_rounds(grid, context)
    # Workers wait until the test lets the run continue.
    if context.run_config["pauses"]:
        while not Path(os.environ["LEASED_APP_GO_ON"]).exists():
            time.sleep(0.02)
        _run_rounds(grid, context)


def _run_rounds(grid: Grid, context: Context) -> None:
    FedAvg().start(
        grid,
        ArrayRecord([np.zeros(10, np.float32)]),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=_evaluate if context.run_config["evaluates"] else None,
    )


def _evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"round": server_round})


def _mixed(grid: Grid) -> list[Message]:
    """Return messages of which every second one is for the CPU."""
    arrays = ArrayRecord([np.zeros(10, np.float32)])
    return [
        Message(
            RecordDict({"arrays": arrays, "config": ConfigRecord({"use-gpu": number % 2 == 0})}),
            node,
            "train",
        )
        for number, node in enumerate(grid.get_node_ids())
    ]
