"""Rounds of FedAvg with all clients."""

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
    if sorted(result.train_metrics_clientapp) != list(range(1, rounds + 1)):
        raise ValueError(f"only rounds {sorted(result.train_metrics_clientapp)} gave a model")
