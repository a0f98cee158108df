"""Rounds of training with all clients, and nothing else: no torch on the server."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import rounds

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rounds.run(grid, config, [np.full(1000, number, np.float32) for number in range(config["arrays"])])
