"""Rounds of training; leaves the model and what they took. No torch on the server."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from digits import initial

_FOR_CLIENTS = ("num-clients", "alpha", "seed", "local-epochs")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    clients, rounds = config["num-clients"], config["num-server-rounds"]
    each = config["clients-per-round"] or clients
    chosen = strategy(config["strategy"], each / clients, each, clients)
    for_clients = ConfigRecord({name: config[name] for name in _FOR_CLIENTS})
    began = time.perf_counter()
    result = chosen.start(
        grid, ArrayRecord(initial.weights(config["seed"])), num_rounds=rounds, train_config=for_clients
    )
    rounds_s = time.perf_counter() - began
    if sorted(result.train_metrics_clientapp) != list(range(1, rounds + 1)):
        raise ValueError(f"only rounds {sorted(result.train_metrics_clientapp)} gave a model")
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
    Path(config["figures"]).write_text(json.dumps({"rounds_s": rounds_s, "messages": each * rounds}))


def strategy(name: str, fraction: float, each: int, clients: int) -> Strategy:
    options = {"fraction_train": fraction, "min_train_nodes": each, "min_available_nodes": clients}
    if name == "flower":
        return FedAvg(fraction_evaluate=0.0, **options)
    import flower_gpu

    return flower_gpu.FedAvg(**options)
