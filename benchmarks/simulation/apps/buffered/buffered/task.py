"""A small network for the images of a file, which has those of the clients and those of the test."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

_BATCH = 16


def train(
    weights: Any, partition: int, partitions: int, server_round: int, config: Mapping[str, Any]
) -> tuple[Any, int]:
    """Train on a partition; return the weights and how many images it has."""
    seed = np.random.SeedSequence((config["seed"], partition, server_round)).generate_state(1)[0]
    torch.manual_seed(int(seed))
    data = load(config["data"])
    images, labels = data["images"][partition::partitions], data["labels"][partition::partitions]
    model = _model(config["data"])
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learning-rate"], momentum=0.9)
    for _ in range(config["local-epochs"]):
        for batch in torch.randperm(len(labels)).split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.state_dict(), len(labels)


def initial(data: str, seed: int) -> ArrayRecord:
    """Return the first model."""
    torch.manual_seed(seed)
    return ArrayRecord(_model(data).state_dict())


def evaluate(server_round: int, arrays: ArrayRecord, data: str) -> dict[str, float]:
    """Evaluate on images that no client has."""
    images, labels = load(data)["test_images"], load(data)["test_labels"]
    model = _model(data).eval()
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        answers = model(images)
    loss = nn.functional.cross_entropy(answers, labels).item()
    return {"loss": loss, "accuracy": (answers.argmax(1) == labels).float().mean().item()}


@cache
def load(data: str) -> dict[str, torch.Tensor]:
    """Return what is in a file."""
    with np.load(data) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def _model(data: str) -> nn.Module:
    _, channels, side, _ = load(data)["images"].shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
