"""Rounds in which some clients fail; FedAvg goes on with the others."""

import json
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    chosen = strategy(config["strategy"], config["num-clients"])
    model = np.ones(1000, np.float32)
    result = chosen.start(grid, ArrayRecord([model]), num_rounds=config["num-server-rounds"])
    figures = {
        "rounds_with_a_model": len(result.train_metrics_clientapp),
        "model_is_right": bool(np.allclose(result.arrays.to_numpy_ndarrays()[0], model)),
    }
    Path(config["figures"]).write_text(json.dumps(figures))


def strategy(name: str, clients: int) -> Strategy:
    options = {"min_train_nodes": clients, "min_available_nodes": clients}
    if name == "flower":
        return FedAvg(fraction_evaluate=0.0, **options)
    import flower_gpu

    return flower_gpu.FedAvg(**options)
