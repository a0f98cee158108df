"""A client of a small network, which trains several clients in one step if the environment says so."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.func import functional_call, grad, vmap

import flower_gpu
from bench_app import networks
from bench_app.replies import client_app, reply_to
from flower_gpu.pytorch import group_alike, stack, unstack

Parameters = dict[str, torch.Tensor]

#: Maximum number of messages per call of the handler. With 0, the handler takes single messages.
MAX_MESSAGES = int(os.environ.get("SMALL_MODELS_MAX_MESSAGES", "64"))
_RATE, _MOMENTUM = 0.05, 0.9


@dataclass
class Client:
    """The model of one client, and its data in the order of this round."""

    parameters: Parameters
    images: torch.Tensor
    labels: torch.Tensor


def prepare(weights: list[Any], partition: int, server_round: int, config: Any) -> Client:
    load = _images if config["network"] == "image-cnn" else _digits
    images, labels = load(config["num-clients"], config["seed"])[partition]
    generator = torch.Generator().manual_seed(1000 * server_round + partition)
    order = torch.randperm(len(labels), generator=generator)
    names = _network(config["network"]).state_dict()
    parameters = {name: torch.from_numpy(value) for name, value in zip(names, weights, strict=True)}
    return Client(parameters, images[order], labels[order])


def train(weights: list[Any], partition: int, server_round: int, config: Any) -> tuple[list[Any], int]:
    """Train one client with ``backward()``, as most apps do."""
    client = prepare(weights, partition, server_round, config)
    model = networks.load(networks.build(config["network"]), weights)
    batches = [(client.images[part], client.labels[part]) for part in _batches(client.images)]
    networks.fit(model, batches, _RATE)
    return networks.weights_of(model), len(client.labels)


def train_many(messages: list[Message], contexts: list[Context]) -> list[Message]:
    """Train several clients. Clients whose data have the same shapes share one step."""
    config = messages[0].content["config"]
    clients = [
        prepare(
            message.content["arrays"].to_numpy_ndarrays(),
            int(context.node_config["partition-id"]),
            message.content["config"]["server-round"],
            config,
        )
        for message, context in zip(messages, contexts, strict=True)
    ]
    fit = vmap(_steps(_network(config["network"])))
    data = [(client.images, client.labels) for client in clients]
    trained: dict[int, Parameters] = {}
    for group in group_alike(data):
        parameters = stack([clients[index].parameters for index in group])
        results = unstack(fit(parameters, *stack([data[index] for index in group])))
        trained |= zip(group, results, strict=True)
    return [
        reply_to(
            message, context, ArrayRecord([value.numpy() for value in trained[index].values()]),
            len(clients[index].labels),
        )
        for index, (message, context) in enumerate(zip(messages, contexts, strict=True))
    ]  # fmt: skip


def _steps(model: nn.Module) -> Callable[[Parameters, torch.Tensor, torch.Tensor], Parameters]:
    """Return the same training as a pure function, for ``vmap``."""

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


@cache
def _network(name: str) -> nn.Module:
    return networks.build(name)


def _batches(images: torch.Tensor) -> list[slice]:
    size = 8 if images.shape[-1] == 8 else 32
    return [slice(start, start + size) for start in range(0, len(images), size)]


@cache
def _images(clients: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return 32 generated images of CIFAR's size for each client, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(clients, 32, 3, 32, 32, generator=generator)
    return [*zip(images, torch.randint(10, (clients, 32), generator=generator), strict=True)]


@cache
def _digits(clients: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the digits of each client, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)
    pixels = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return [(pixels[part], torch.tensor(labels[part])) for part in parts]


if MAX_MESSAGES:
    app = ClientApp()
    flower_gpu.train_many(app, max_messages=MAX_MESSAGES)(train_many)
else:
    app = client_app(train)
