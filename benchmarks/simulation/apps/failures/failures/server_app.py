"""Rounds in which some clients fail; FedAvg goes on with the others."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import rounds

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model = np.ones(1000, np.float32)
    result = rounds.run(grid, context.run_config, [model])
    if not np.allclose(result.arrays.to_numpy_ndarrays()[0], model):
        raise ValueError("the model of those that answered is not what was sent")
