"""Tasks that the tests of clients and strategies run in workers, given as a name or as a function."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
from flwr.client import NumPyClient


def add_one(weights: list[Any], config: dict[str, Any], step: float = 1.0) -> tuple[Any, ...]:
    return (
        [(w + step).astype(w.dtype) for w in weights],
        np.int64(7),
        {"loss": np.float32(0.5), "pid": os.getpid(), "round": config.get("round", -1)},
    )


def mean(weights: list[Any], config: dict[str, Any], step: float = 1.0) -> tuple[Any, ...]:
    return np.float32(weights[0].mean()), 5, {"accuracy": np.array([0.25])}


def train_with_torch(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Update all weights in place, as an optimizer does, and return PyTorch types."""
    import torch

    updated = [torch.from_numpy(array).add_(1.0) for array in weights]
    return updated, torch.tensor(5), {"torch": torch.tensor(1.0)}


def nan_weights(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    weights[1].flat[0] = np.nan
    return weights, 1, {}


def masked_weights(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Train the first array. The second is a mask, a buffer that is part of the model's state."""
    weights[0] += 1
    assert np.isneginf(weights[1]).any()
    return weights, 1, {}


def initial_with_mask() -> list[Any]:
    return [np.zeros(2, np.float32), np.triu(np.full((3, 3), -np.inf, np.float32), 1)]


def die(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    print("last words", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
    return weights, 1, {}


def initial() -> list[Any]:
    return [np.full((2, 2), 3.0, np.float32)]


def evaluate_legacy(server_round: int, weights: list[Any], config: dict[str, Any], scale: float = 1.0) -> Any:
    return np.float64(weights[0].mean() * scale), {"accuracy": np.float32(0.5), "pid": os.getpid()}


def evaluate_message(server_round: int, arrays: Any) -> Any:
    from flwr.app import MetricRecord

    mean = float(next(iter(arrays.values())).numpy().mean())
    return MetricRecord({"loss": mean, "accuracy": 0.5, "per-class": [0.1, 0.2], "pid": os.getpid()})


class ExistingClient(NumPyClient):
    """A user's client, written without flower_gpu."""

    def __init__(self, step: float, partition: int = 0) -> None:
        self.step, self.partition = step, partition

    def get_parameters(self, config: dict[str, Any]) -> list[Any]:
        return initial()

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"partition": np.int64(self.partition), "pid": os.getpid()}

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
        return add_one(parameters, config, self.step)

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
        return mean(parameters, config)


class FitOnly(NumPyClient):
    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
        return parameters, 1, {}
