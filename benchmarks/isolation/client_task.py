"""The module of a real client: heavy imports, and a data set that is built once and kept in a global.

The pattern is that of Flower's quickstart, with digits instead of a download.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Weights = list[NDArray[Any]]
FitResult = tuple[Weights, int, dict[str, Any]]

partitioner: IidPartitioner | None = None


def load_data() -> Dataset:
    """Return one client's images and labels; built on first use, as ``fds`` in the quickstart."""
    global partitioner
    if partitioner is None:
        images, labels = load_digits(return_X_y=True)
        pictures = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        partitioner = IidPartitioner(num_partitions=2)
        partitioner.dataset = Dataset.from_dict({"img": pictures.tolist(), "label": labels})
    return partitioner.load_partition(0)


def build_model() -> nn.Module:
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(32 * 4 * 4, 10))


def train(weights: Weights, config: dict[str, Any]) -> FitResult:
    """Train for one epoch, as ``fit`` of a NumPyClient."""
    torch.manual_seed(config["seed"])
    columns = load_data().with_format("torch")[:]
    data = TensorDataset(columns["img"], columns["label"])
    model = build_model()
    names = model.state_dict().keys()
    model.load_state_dict({name: torch.tensor(value) for name, value in zip(names, weights, strict=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for images, labels in DataLoader(data, batch_size=32, shuffle=True):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trained = [value.numpy() for value in model.state_dict().values()]
    return trained, len(data), {"loss": float(np.mean(losses)), "pid": os.getpid()}


def into_dict(weights: Weights, config: dict[str, Any], results: MutableMapping[str, Any]) -> None:
    results["fit"] = train(weights, config)


def into_pipe(weights: Weights, config: dict[str, Any], connection: Connection) -> None:
    connection.send(train(weights, config))
    connection.close()
