"""Rounds of training; leaves the model and what they took."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import initial, rounds

app = ServerApp()

_SHAPES = {
    "mlp": ((32, 64), (32,), (10, 32), (10,)),
    "cnn": initial.SHAPES,
    "wide-cnn": ((64, 1, 3, 3), (64,), (128, 64, 3, 3), (128,), (10, 512), (10,)),
    "image-cnn": ((32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (10, 4096), (10,)),
}


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    names = ("num-clients", "seed", "network")
    weights = initial.weights(config["seed"], _SHAPES[config["network"]])
    result = rounds.run(grid, config, weights, names, config["clients-per-round"])
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
