"""What the server apps share: rounds of FedAvg that are timed, and the check that all clients answered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy


def run(
    grid: Grid, config: Any, initial: list[Any], for_clients: Iterable[str] = (), each: int = 0
) -> Result:
    """Run the rounds of a run config with ``each`` clients in each (0: all); write down what they took."""
    clients, rounds = config["num-clients"], config["num-server-rounds"]
    strategy = _strategy(config["strategy"], each or clients, clients)
    result = strategy.start(
        grid,
        ArrayRecord(initial),
        num_rounds=rounds,
        train_config=ConfigRecord({name: config[name] for name in for_clients}),
    )
    rounds_s = [after - before for before, after in pairwise([*strategy.began, time.perf_counter()])]
    if sorted(result.train_metrics_clientapp) != list(range(1, rounds + 1)):
        raise ValueError(f"only rounds {sorted(result.train_metrics_clientapp)} gave a model")
    Path(config["figures"]).write_text(json.dumps({"rounds_s": rounds_s}))
    return result


def check_all_answered(result: Result, clients: int) -> None:
    """Raise ValueError unless the mean of all clients' numbers is right in each round."""
    means = [metrics["partition"] for metrics in result.train_metrics_clientapp.values()]
    if not np.allclose(means, (clients - 1) / 2):
        raise ValueError(f"not all clients answered in all rounds: their mean number was {means}")


def _strategy(name: str, each: int, clients: int) -> Any:
    """Return FedAvg, ours or Flower's, that notes when each round begins."""
    options = {"fraction_train": each / clients, "min_train_nodes": each, "min_available_nodes": clients}
    if name == "ours":
        import flower_gpu

        kind: type[Strategy] = flower_gpu.FedAvg
    else:
        kind, options["fraction_evaluate"] = FedAvg, 0.0

    class Noting(kind):  # type: ignore[misc, valid-type]
        began: list[float] = []  # noqa: RUF012

        def configure_train(self, *arguments: Any, **named: Any) -> Iterable[Message]:
            self.began.append(time.perf_counter())
            found: Iterable[Message] = super().configure_train(*arguments, **named)
            return found

    return Noting(**options)
