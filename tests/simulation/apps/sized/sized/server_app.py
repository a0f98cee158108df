"""A server that lets all clients train."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_gpu import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    arrays = ArrayRecord([np.zeros(10, np.float32)])
    FedAvg().start(grid, arrays, num_rounds=context.run_config["num-server-rounds"])
