"""Two rounds with all clients."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import flower_gpu

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = flower_gpu.FedAvg()
    rounds = context.run_config["num-server-rounds"]
    strategy.start(grid, ArrayRecord([np.full(3, 0.5, np.float32)]), num_rounds=rounds)
