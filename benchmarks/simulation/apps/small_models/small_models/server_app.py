"""Rounds of training; leaves the model and what they took."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import initial, rounds

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    names = ("num-clients", "seed", "local-epochs", "how")
    result = rounds.run(grid, config, initial.weights(config["seed"]), names, config["clients-per-round"])
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
