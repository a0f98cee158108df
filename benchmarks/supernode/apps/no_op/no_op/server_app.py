"""Rounds of training with all clients, and nothing else: no torch on the server."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import rounds

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    rounds.run(grid, context.run_config, [np.zeros(1000, np.float32)])
