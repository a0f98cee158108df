"""A server that lets all clients train."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
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
    rounds = context.run_config["num-server-rounds"]
    FedAvg().start(grid, ArrayRecord([np.zeros(10, np.float32)]), num_rounds=rounds)


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
