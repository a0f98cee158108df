"""Rounds in which all clients give the model back, and what they took."""

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message
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
    result = chosen.start(grid, ArrayRecord(model), num_rounds=rounds)
    rounds_s = round_times(chosen.began)
    means = [metrics["partition"] for metrics in result.train_metrics_clientapp.values()]
    if not np.allclose(means, [(clients - 1) / 2] * rounds):
        raise ValueError(f"not all clients answered in all rounds: their mean number was {means}")
    for number, array in enumerate(result.arrays.to_numpy_ndarrays()):
        if array.shape != (size,) or not np.allclose(array, number, rtol=1e-4):
            raise ValueError(f"array {number} of the model is not what was sent")
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
