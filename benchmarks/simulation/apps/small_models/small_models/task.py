"""Small networks, trained one by one, and several in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from torch import nn
from torch.func import functional_call, grad, vmap

from flower_gpu.pytorch import group_alike, stack, unstack

Parameters = dict[str, torch.Tensor]

_BATCH, _IMAGES_BATCH = 8, 32
_RATE, _MOMENTUM = 0.05, 0.9


@dataclass
class Client:
    """What one client trains: its model and its data, in the order of this round."""

    number: int
    parameters: Parameters
    images: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, message: Message, context: Context) -> Client:
        """Return what a message says, with the client's data."""
        config, number = message.content["config"], int(context.node_config["partition-id"])
        load = _images if config["network"] == "image-cnn" else _digits
        images, labels = load(config["num-clients"], config["seed"])[number]
        generator = torch.Generator().manual_seed(1000 * config["server-round"] + number)
        order = torch.randperm(len(labels), generator=generator)
        names = network(config["network"]).state_dict()
        weights = message.content["arrays"].to_numpy_ndarrays()
        parameters = {name: torch.from_numpy(value) for name, value in zip(names, weights, strict=True)}
        return cls(number, parameters, images[order], labels[order])


@cache
def network(name: str) -> nn.Module:
    """Return a network; its own parameters are overwritten, or used for nothing."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    colors, first, second, side = {"wide-cnn": (1, 64, 128, 8), "image-cnn": (3, 32, 64, 32)}.get(
        name, (1, 16, 32, 8)
    )
    return nn.Sequential(
        nn.Conv2d(colors, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear((side // 4) ** 2 * second, 10),
    )


def train_one(name: str, client: Client) -> Parameters:
    """Train a client's model by SGD with momentum, as most apps do; return the new parameters."""
    model = network(name).train()
    model.load_state_dict(client.parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
    for batch in _batches(client.images):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(client.images[batch]), client.labels[batch]).backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def train_many(name: str, clients: Sequence[Client]) -> list[Parameters]:
    """Do the same for several clients, with one step for all whose data have the same shapes."""
    fit = vmap(_steps_of(network(name)))
    found: dict[int, Parameters] = {}
    data = [(client.images, client.labels) for client in clients]
    for group in group_alike(data):
        parameters = stack([clients[place].parameters for place in group])
        found |= zip(group, unstack(fit(parameters, *stack([data[place] for place in group]))), strict=True)
    return [found[place] for place in range(len(clients))]


def _steps_of(model: nn.Module) -> Callable[[Parameters, torch.Tensor, torch.Tensor], Parameters]:
    def loss(parameters: Parameters, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (images,)), labels)

    def steps(parameters: Parameters, images: torch.Tensor, labels: torch.Tensor) -> Parameters:
        velocity = {key: torch.zeros_like(value) for key, value in parameters.items()}
        for batch in _batches(images):
            gradients = grad(loss)(parameters, images[batch], labels[batch])
            velocity = {key: _MOMENTUM * velocity[key] + gradients[key] for key in parameters}
            parameters = {key: value - _RATE * velocity[key] for key, value in parameters.items()}
        return parameters

    return steps


def _batches(images: torch.Tensor) -> list[slice]:
    size = _BATCH if images.shape[-1] == 8 else _IMAGES_BATCH
    return [slice(start, start + size) for start in range(0, len(images), size)]


@cache
def _images(clients: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return 32 generated images of CIFAR's size for each client, and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(clients, 32, 3, 32, 32, generator=generator)
    return [*zip(images, torch.randint(10, (clients, 32), generator=generator), strict=True)]


@cache
def _digits(clients: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the digits of each client, and their labels."""
    from sklearn.datasets import load_digits

    found: Any = load_digits(return_X_y=True)
    images, labels = found
    order = np.random.default_rng(seed).permutation(len(labels))
    parts = np.array_split(order, clients)
    pixels = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return [(pixels[part], torch.tensor(labels[part])) for part in parts]
