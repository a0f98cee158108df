"""Rounds of training; leaves the model and what they took. No torch on the server."""

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
    result = chosen.start(
        grid, ArrayRecord(initial.weights(config["seed"])), num_rounds=rounds, train_config=for_clients
    )
    rounds_s = round_times(chosen.began)
    if sorted(result.train_metrics_clientapp) != list(range(1, rounds + 1)):
        raise ValueError(f"only rounds {sorted(result.train_metrics_clientapp)} gave a model")
    np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
    Path(config["figures"]).write_text(json.dumps({"rounds_s": rounds_s}))


def strategy(name: str, fraction: float, each: int, clients: int) -> Strategy:
    """Return FedAvg, ours or Flower's, that notes when each round begins."""
    options = {"fraction_train": fraction, "min_train_nodes": each, "min_available_nodes": clients}
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
