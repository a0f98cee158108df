"""Tasks with torch, on CPU. Importing this module imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 32),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(32, 10),
    )


def synthetic_data(examples: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(examples, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (examples,), generator=generator)
    return TensorDataset(images, labels)


def initial_weights(seed: int) -> list[np.ndarray]:
    torch.manual_seed(seed)
    return [tensor.numpy().copy() for tensor in make_model().state_dict().values()]


def train(
    weights: list[np.ndarray], config: dict[str, Any], *, threads: int = 1, loader_workers: int = 0
) -> tuple[list[np.ndarray], int, dict[str, float]]:
    """Train for two epochs with dropout, shuffling and momentum."""
    torch.set_num_threads(threads)
    torch.manual_seed(config["seed"])
    model = make_model()
    names = model.state_dict().keys()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in zip(names, weights, strict=True)})
    data = synthetic_data()
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=loader_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    total = 0.0
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(images)
    return (
        [tensor.numpy() for tensor in model.state_dict().values()],
        len(data),
        {"loss": total / len(data) / 2},
    )


def train_with_and_without_loader_workers(weights: list[np.ndarray], seed: int) -> list[Any]:
    return [train(weights, {"seed": seed}, loader_workers=workers) for workers in (0, 2)]


def matmul(size: int) -> float:
    """Run an OpenMP region with several threads."""
    torch.set_num_threads(2)
    ones = torch.ones(size, size)
    return float((ones @ ones).sum() + torch.exp(torch.zeros(size * size)).sum())
