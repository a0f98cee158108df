"""Rounds of training with all clients; leaves the model and what they took."""

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
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
    result = chosen.start(grid, initial, num_rounds=rounds, train_config=for_clients)
    rounds_s = round_times(chosen.began)
    means = [metrics["partition"] for metrics in result.train_metrics_clientapp.values()]
    if not np.allclose(means, [(clients - 1) / 2] * rounds):
        raise ValueError(f"not all clients answered in all rounds: their mean number was {means}")
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
    Path(config["figures"]).write_text(json.dumps({"rounds_s": rounds_s}))


def strategy(name: str, clients: int) -> Strategy:
    """Return FedAvg, ours or Flower's, that notes when each round begins."""
    options = {"min_train_nodes": clients, "min_available_nodes": clients}
    if name == "ours":
        import flower_gpu

        kind: type[Strategy] = flower_gpu.FedAvg
    else:
        kind, options["fraction_evaluate"] = FedAvg, 0.0

    class Noting(kind):
        def configure_train(self, *arguments: Any, **named: Any) -> Iterable[Message]:
            self.began.append(time.perf_counter())
            return super().configure_train(*arguments, **named)

    made = Noting(**options)
    made.began = []
    return made


def round_times(began: list[float]) -> list[float]:
    """Return the seconds of each round; the last one ends now."""
    return [after - before for before, after in pairwise([*began, time.perf_counter()])]
