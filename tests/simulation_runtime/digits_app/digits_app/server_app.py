"""The server: FedAvg as Flower has it."""

from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app import task

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    clients = config["num-clients"]
    result = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients).start(
        grid, ArrayRecord(task.initial_state()), num_rounds=config["num-server-rounds"], timeout=300
    )
    weights = {name: array.numpy() for name, array in result.arrays.items()}
    np.savez(Path(config["notes"], "weights.npz"), **weights)
