"""Rounds of training; leaves the model and what they took. No torch on the server."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import initial, rounds

_FOR_CLIENTS = ("num-clients", "alpha", "seed", "local-epochs")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    weights = initial.weights(config["seed"])
    result = rounds.run(grid, config, weights, _FOR_CLIENTS, config["clients-per-round"])
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
