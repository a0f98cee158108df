"""Rounds of training with all clients; leaves the model and what they took."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

_FOR_CLIENTS = ("num-clients", "data", "device", "steps", "batch", "seed")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    from resnet import task

    config = context.run_config
    clients, rounds = config["num-clients"], config["num-server-rounds"]
    chosen = strategy(config["strategy"], clients)
    initial = ArrayRecord(task.initial_weights(config["seed"]))
    for_clients = ConfigRecord({name: config[name] for name in _FOR_CLIENTS})
    began = time.perf_counter()
    result = chosen.start(grid, initial, num_rounds=rounds, train_config=for_clients)
    rounds_s = time.perf_counter() - began
    means = [metrics["partition"] for metrics in result.train_metrics_clientapp.values()]
    if not np.allclose(means, [(clients - 1) / 2] * rounds):
        raise ValueError(f"not all clients answered in all rounds: their mean number was {means}")
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
    Path(config["figures"]).write_text(json.dumps({"rounds_s": rounds_s, "messages": clients * rounds}))


def strategy(name: str, clients: int) -> Strategy:
    options = {"min_train_nodes": clients, "min_available_nodes": clients}
    if name == "flower":
        return FedAvg(fraction_evaluate=0.0, **options)
    import flower_gpu

    return flower_gpu.FedAvg(**options)
