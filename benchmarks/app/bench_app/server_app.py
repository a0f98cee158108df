"""Timed rounds of FedAvg or FedBuff, and a check that all clients replied. Imports no torch."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

from bench_app import initial

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    weights = initial.model(config)
    # A config of no-op messages would add to the bytes that the benchmarks count.
    for_clients = {} if config["client"].startswith("no_op") else dict(config)
    options: dict[str, Any] = {}
    if config["is-evaluated"]:
        from flower_gpu import gpu_evaluate

        evaluated = {"data": config["data"], "network": config["network"]}
        options["evaluate_fn"] = gpu_evaluate(f"bench_app.{config['client']}:evaluate", kwargs=evaluated)
    strategy = _timed(config)
    began, began_at = time.perf_counter(), time.time()
    result = strategy.start(
        grid,
        ArrayRecord(weights),
        num_rounds=config["num-server-rounds"],
        train_config=ConfigRecord(for_clients),
        **options,
    )
    times = [*strategy.began, time.perf_counter()]
    figures: dict[str, Any] = {"rounds_s": [after - before for before, after in pairwise(times)]}
    if config["is-evaluated"]:
        accuracies = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
        figures |= {
            "began": began_at,
            "versions_s": [at - began for at in strategy.made],
            "accuracies": accuracies[1:],
        }
    _check(result, weights, config)
    if config["model"]:
        np.savez(config["model"], *result.arrays.to_numpy_ndarrays())
    Path(config["figures"]).write_text(json.dumps(figures))


def _timed(config: Any) -> Any:
    """Return a strategy that records when each round begins and when each version of the model exists."""
    clients = config["num-clients"]
    count = config["clients-per-round"] or clients
    options: dict[str, Any] = {"fraction_train": count / clients, "min_train_nodes": count}
    options |= {"min_available_nodes": clients}
    kind: Any = FedAvg
    if config["strategy"] == "flower":
        options["fraction_evaluate"] = 0.0
    else:
        import flower_gpu

        kind = flower_gpu.FedAvg
        if config["strategy"] == "fedbuff":
            kind, options = flower_gpu.FedBuff, {"buffer_size": count, "concurrency": config["concurrency"]}

    class Timed(kind):  # type: ignore[misc]
        began: list[float] = []  # noqa: RUF012
        made: list[float] = []  # noqa: RUF012

        def configure_train(self, *arguments: Any, **named: Any) -> Any:
            self.began.append(time.perf_counter())
            return super().configure_train(*arguments, **named)

        def configure_evaluate(self, *arguments: Any, **named: Any) -> Any:
            self.made.append(time.perf_counter())
            return super().configure_evaluate(*arguments, **named)

    return Timed(**options)


def _check(result: Result, weights: list[Any], config: Any) -> None:
    """Raise ValueError unless every round has a model, and all clients replied where all were asked."""
    rounds = result.train_metrics_clientapp
    if sorted(rounds) != list(range(1, config["num-server-rounds"] + 1)):
        raise ValueError(f"only rounds {sorted(rounds)} have a model")
    if not config["client"].startswith("no_op") or config["sleep-s"]:
        return
    means = [metrics["partition"] for metrics in rounds.values()]
    if not np.allclose(means, (config["num-clients"] - 1) / 2):
        raise ValueError(f"not all clients replied in all rounds: the mean of their numbers was {means}")
    for sent, array in zip(weights, result.arrays.to_numpy_ndarrays(), strict=True):
        if array.shape != sent.shape or not np.allclose(array, sent, rtol=1e-4):
            raise ValueError("the model is not the model that was sent")
