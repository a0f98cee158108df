"""A server that samples two of three clients for each round with Python's random generator."""

import json
import random
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flowers

import flower_gpu

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    random.seed(7)
    shape = (config["width"], 1000)
    initial = ArrayRecord({"w": Array(np.zeros(shape, np.float32)), "b": Array(np.ones((), np.float32))})
    kinds = {"ours": flower_gpu.FedAvg, "Derived": type("Derived", (flowers.FedAvg,), {})}
    kind = kinds.get(config["strategy"]) or getattr(flowers, config["strategy"])
    strategy = kind(fraction_train=0.67, min_train_nodes=2, min_available_nodes=3)
    if kind is flower_gpu.FedAvg:
        strategy.exact_order = True
    else:
        strategy.fraction_evaluate = 0.0
    if config["folder"]:
        strategy = flower_gpu.resumable(strategy, config["folder"])
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=config["num-server-rounds"])
    if config["model"]:
        arrays = {key: array.numpy().tobytes().hex() for key, array in result.arrays.items()}
        metrics = {number: dict(record) for number, record in result.train_metrics_clientapp.items()}
        text = json.dumps([arrays, {number: each["mean"] for number, each in metrics.items()}])
        Path(config["model"]).write_text(text)
