"""The network and the data of the ordinary app; its training as a pure function, vectorized or not."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad

import flower_gpu

Weights = list[np.ndarray]
Parameters = dict[str, torch.Tensor]

_BATCH = 8
_RATE, _MOMENTUM = 0.05, 0.9


def train(
    weights: Weights, partition: int, server_round: int, config: Mapping[str, Any]
) -> tuple[Weights, int]:
    """Train on a partition; return the weights and how many images it has."""
    images, labels = _data(config["num-clients"], config["seed"])[partition]
    generator = torch.Generator().manual_seed(1000 * server_round + partition)
    epochs = range(config["local-epochs"])
    order = torch.cat([torch.randperm(len(labels), generator=generator) for _ in epochs])
    names = network().state_dict()
    parameters = {name: torch.from_numpy(value) for name, value in zip(names, weights, strict=True)}
    way = {"vectorized": vectorized_steps, "functional": steps, "autograd": usual_steps}[config["how"]]
    trained = way(parameters, images, labels, order)
    return [value.numpy() for value in trained.values()], len(labels)


@cache
def network() -> nn.Module:
    """Return the network; its own parameters are used for nothing."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def loss(parameters: Parameters, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of these parameters."""
    return nn.functional.cross_entropy(functional_call(network(), parameters, (images,)), labels)


def steps(
    parameters: Parameters, images: torch.Tensor, labels: torch.Tensor, order: torch.Tensor
) -> Parameters:
    """Train by SGD with momentum, on images in an order; return the new parameters."""
    velocity = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for epoch in order.split(len(labels)):
        for batch in epoch.split(_BATCH):
            gradients = grad(loss)(parameters, images[batch], labels[batch])
            velocity = {name: _MOMENTUM * velocity[name] + gradients[name] for name in parameters}
            parameters = {name: value - _RATE * velocity[name] for name, value in parameters.items()}
    return parameters


vectorized_steps = flower_gpu.vectorized(steps)


def usual_steps(
    parameters: Parameters, images: torch.Tensor, labels: torch.Tensor, order: torch.Tensor
) -> Parameters:
    """Do the same as most apps do."""
    model = network().train()
    model.load_state_dict(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
    for epoch in order.split(len(labels)):
        for batch in epoch.split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@cache
def _data(clients: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the images and the labels of all partitions."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    parts = np.array_split(order, clients)
    pixels = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return [(pixels[part], torch.tensor(labels[part])) for part in parts]
