"""The module of a realistic client, with heavy imports and a data set in a global variable.

It follows Flower's quickstart, with the digits data set instead of a download.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

partitioner: IidPartitioner | None = None


def load_data() -> Dataset:
    """Return the images and labels of one client. The first call builds the data set."""
    global partitioner
    if partitioner is None:
        images, labels = load_digits(return_X_y=True)
        pictures = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        partitioner = IidPartitioner(num_partitions=2)
        partitioner.dataset = Dataset.from_dict({"img": pictures.tolist(), "label": labels})
    return partitioner.load_partition(0)


def train(weights: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
    """Train for one epoch, like ``fit`` of a NumPyClient."""
    torch.manual_seed(config["seed"])
    columns = load_data().with_format("torch")[:]
    data = TensorDataset(columns["img"], columns["label"])
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*first, *second, nn.Linear(32 * 4 * 4, 10))
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
