"""Rounds of training with all clients, and nothing else: no torch on the server."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    clients, rounds = context.run_config["num-clients"], context.run_config["num-server-rounds"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    result = strategy.start(grid, ArrayRecord([np.zeros(1000, np.float32)]), num_rounds=rounds)
    assert len(result.train_metrics_clientapp) == rounds
