"""Rounds of training with all clients; leaves the model and what they took."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import rounds

_FOR_CLIENTS = ("num-clients", "data", "device", "name", "steps", "batch", "seed")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    from resnet import task

    config = context.run_config
    result = rounds.run(grid, config, task.initial_weights(config["seed"], config["name"]), _FOR_CLIENTS)
    rounds.check_all_answered(result, config["num-clients"])
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
