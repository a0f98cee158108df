"""Trains all clients of an app one after the other in this process: no messages, and nothing kept apart."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    folder = Path(sys.argv[1])
    config: dict[str, Any] = json.loads(sys.argv[2])
    sys.path.insert(0, str(folder))
    task = importlib.import_module(f"{folder.name}.task")
    if folder.name == "resnet":
        model = task.initial_weights(config["seed"], config["name"])
    else:
        model = importlib.import_module("benchmarks.simulation.initial").weights(config["seed"])
    clients, rounds = config["num-clients"], config["num-server-rounds"]
    each = config.get("clients-per-round") or clients
    sample = np.random.default_rng(config["seed"]).choice
    rounds_s = []
    for server_round in range(1, rounds + 1):
        began = time.perf_counter()
        chosen = sorted(sample(clients, each, replace=False).tolist())
        model = _round(task, model, chosen, server_round, config)
        rounds_s.append(time.perf_counter() - began)
    np.savez(config["model"], *model)
    Path(config["figures"]).write_text(json.dumps({"rounds_s": rounds_s}))


def _round(task: Any, model: Any, chosen: list[int], server_round: int, config: dict[str, Any]) -> Any:
    """Return the mean of these clients' weights by their numbers of images."""
    total = [np.zeros(array.shape) for array in model]
    images = 0
    for partition in chosen:
        trained, count = task.train(model, partition, server_round, config)
        for so_far, array in zip(total, trained, strict=True):
            so_far += count * array.astype(np.float64)
        images += count
    return [(so_far / images).astype(array.dtype) for so_far, array in zip(total, model, strict=True)]


if __name__ == "__main__":
    main()
