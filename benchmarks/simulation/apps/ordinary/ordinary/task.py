"""scikit-learn's digits by flwr-datasets, which the module keeps, and a small network."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = list[np.ndarray]

_BATCH = 8

_partitioner: Any = None


def train(
    weights: Weights, partition: int, server_round: int, config: Mapping[str, Any]
) -> tuple[Weights, int]:
    """Train on a partition; return the weights and how many images it has."""
    import torch
    from torch import nn

    torch.manual_seed(1000 * server_round + partition)
    images, labels = _load_data(partition, config)
    model = _model(weights).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(config["local-epochs"]):
        for batch in torch.randperm(len(labels)).split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return [value.detach().numpy() for value in model.state_dict().values()], len(labels)


def _load_data(partition: int, config: Mapping[str, Any]) -> Any:
    """Return the images and labels of a partition."""
    import torch

    global _partitioner
    if _partitioner is None:
        from datasets import Dataset
        from flwr_datasets.partitioner import IidPartitioner
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(config["seed"]).permutation(len(labels))
        _partitioner = IidPartitioner(config["num-clients"])
        _partitioner.dataset = Dataset.from_dict({"image": images[order] / 16, "label": labels[order]})
    mine = _partitioner.load_partition(partition).with_format("numpy")
    pixels = torch.tensor(mine["image"][:], dtype=torch.float32).reshape(-1, 1, 8, 8)
    return pixels, torch.tensor(mine["label"][:])


def _model(weights: Weights) -> Any:
    import torch
    from torch import nn

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
