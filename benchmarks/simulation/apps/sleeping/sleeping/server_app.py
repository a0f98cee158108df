"""Rounds in which all clients sleep."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import rounds

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    result = rounds.run(grid, config, [np.ones(1000, np.float32)])
    if sorted(result.train_metrics_clientapp) != list(range(1, config["num-server-rounds"] + 1)):
        raise ValueError("not all rounds have results")
