"""Train all clients of the app in this process, one after the other, without messages."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[1])
    client = importlib.import_module(f"bench_app.{config['client']}")
    model = importlib.import_module("bench_app.initial").model(config)
    clients = config["num-clients"]
    count = config["clients-per-round"] or clients
    random = np.random.default_rng(config["seed"])
    rounds_s = []
    for server_round in range(1, config["num-server-rounds"] + 1):
        began = time.perf_counter()
        sampled = sorted(random.choice(clients, count, replace=False).tolist())
        model = _round(client.train, model, sampled, server_round, config)
        rounds_s.append(time.perf_counter() - began)
    np.savez(config["model"], *model)
    Path(config["figures"]).write_text(json.dumps({"rounds_s": rounds_s}))


def _round(train: Any, model: Any, sampled: list[int], server_round: int, config: dict[str, Any]) -> Any:
    """Return the mean of the clients' weights, weighted by their numbers of images."""
    total = [np.zeros(array.shape) for array in model]
    images = 0
    for partition in sampled:
        trained, count = train(model, partition, server_round, config)
        for sum_, array in zip(total, trained, strict=True):
            sum_ += count * array.astype(np.float64)
        images += count
    return [(sum_ / images).astype(array.dtype) for sum_, array in zip(total, model, strict=True)]


if __name__ == "__main__":
    main()
