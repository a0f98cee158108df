"""A server that trains with all clients that reply."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_gpu import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    FedAvg().start(grid, ArrayRecord([np.ones(4)]), num_rounds=context.run_config["num-server-rounds"])
