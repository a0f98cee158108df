"""scikit-learn's digits, a small network, and its training; the same for a Flower client and a plain loop."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

Weights = list[np.ndarray]

_TEST = 360
_BATCH = 8
_FEWEST = 2  # images of a client


def train(
    weights: Weights, partition: int, server_round: int, config: Mapping[str, Any]
) -> tuple[Weights, int]:
    """Train on a partition; return the weights and how many images it has."""
    torch.manual_seed(hash((config["seed"], partition, server_round)))
    images, labels = load_data()
    mine = torch.from_numpy(_partitions(config["num-clients"], config["alpha"], config["seed"])[partition])
    model = _model(weights).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(config["local-epochs"]):
        for batch in mine[torch.randperm(len(mine))].split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return [value.detach().numpy() for value in model.state_dict().values()], len(mine)


def accuracy(weights: Weights) -> float:
    """Return the share of test images that a model gets right."""
    images, labels = load_data()
    with torch.no_grad():
        answers = _model(weights).eval()(images[-_TEST:]).argmax(1)
    return (answers == labels[-_TEST:]).float().mean().item()


@cache
def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images in one order; the last ones are for the test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return pixels, torch.tensor(labels[order])


@cache
def _partitions(count: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Return which training images each client has."""
    labels = load_data()[1][:-_TEST].numpy()
    random = np.random.default_rng(seed)
    if not alpha:
        return [np.sort(part) for part in np.array_split(random.permutation(len(labels)), count)]
    found: list[list[int]] = [[] for _ in range(count)]
    for label in range(10):
        having = random.permutation(np.flatnonzero(labels == label))
        cuts = (random.dirichlet([alpha] * count).cumsum()[:-1] * len(having)).astype(int)
        for mine, part in zip(found, np.split(having, cuts), strict=True):
            mine += part.tolist()
    for mine in found:  # nobody is left with nothing
        while len(mine) < _FEWEST:
            mine.append(max(found, key=len).pop())
    return [np.array(sorted(mine)) for mine in found]


def _model(weights: Weights) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    names = model.state_dict().keys()
    model.load_state_dict({name: torch.tensor(value) for name, value in zip(names, weights, strict=True)})
    return model
