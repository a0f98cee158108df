"""Rounds in which all clients give the model back, and what they took."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

_ARRAYS = 20

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    clients, rounds = config["num-clients"], config["num-server-rounds"]
    size = int(config["model-mb"] * 1e6) // (4 * _ARRAYS)
    model = [np.full(size, number, np.float32) for number in range(_ARRAYS)]
    chosen = strategy(config["strategy"], clients)
    began, began_s = time.time(), time.perf_counter()
    result = chosen.start(grid, ArrayRecord(model), num_rounds=rounds)
    rounds_s = time.perf_counter() - began_s
    means = [metrics["partition"] for metrics in result.train_metrics_clientapp.values()]
    if not np.allclose(means, [(clients - 1) / 2] * rounds):
        raise ValueError(f"not all clients answered in all rounds: their mean number was {means}")
    for number, array in enumerate(result.arrays.to_numpy_ndarrays()):
        if array.shape != (size,) or not np.allclose(array, number, rtol=1e-4):
            raise ValueError(f"array {number} of the model is not what was sent")
    figures = {"began": began, "rounds_s": rounds_s, "messages": clients * rounds}
    Path(config["figures"]).write_text(json.dumps(figures))


def strategy(name: str, clients: int) -> Strategy:
    options = {"min_train_nodes": clients, "min_available_nodes": clients}
    if name == "flower":
        return FedAvg(fraction_evaluate=0.0, **options)
    import flower_gpu

    return flower_gpu.FedAvg(**options)
