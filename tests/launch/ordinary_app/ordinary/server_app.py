"""A server with one of Flower's strategies."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    initial = ArrayRecord([np.zeros(1, np.float32)])
    FedAvg().start(grid, initial, num_rounds=context.run_config["num-server-rounds"])
