"""A client with a part of scikit-learn's digits, or of the images of a file. Imports torch at its top."""

from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from sklearn.datasets import load_digits

from bench_app import networks
from bench_app.replies import client_app

IMAGES_AND_LABELS = ("images", "labels", "test_images", "test_labels")
_TEST_IMAGES = 360


def train(weights: list[Any], partition: int, server_round: int, config: Any) -> tuple[list[Any], int]:
    """Train on a partition; return the weights and the number of its images."""
    seed = np.random.SeedSequence((config["seed"], partition, server_round)).generate_state(1)[0]
    torch.manual_seed(int(seed))
    images, labels = _load(config["data"])[:2]
    part = _partitions(len(labels), config["num-clients"], config["seed"])[partition]
    model = networks.load(networks.build(config["network"]), weights)
    batches = networks.epochs(images[part], labels[part], config["local-epochs"], config["batch"])
    networks.fit(model, batches)
    return networks.weights_of(model), len(part)


def accuracy(weights: list[Any], network: str = "cnn", data: str = "") -> float:
    """Return the share of the test images that a model classifies correctly."""
    _, _, images, labels = _load(data)
    model = networks.load(networks.build(network), weights).eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def evaluate(server_round: int, arrays: ArrayRecord, data: str, network: str) -> dict[str, float]:
    """Evaluate a version of the model on images that no client has."""
    return {"accuracy": accuracy(arrays.to_numpy_ndarrays(), network, data)}


def _load(data: str) -> tuple[torch.Tensor, ...]:
    return load_file(data) if data else load_data()


@cache
def load_file(data: str) -> tuple[torch.Tensor, ...]:
    """Return the same as :func:`load_data`, from a file."""
    with np.load(data) as file:
        return tuple(torch.from_numpy(file[name]) for name in IMAGES_AND_LABELS)


@cache
def load_data() -> tuple[torch.Tensor, ...]:
    """Return images and labels for training, then those for the test. ``--preload`` calls this."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order])
    return x[:-_TEST_IMAGES], y[:-_TEST_IMAGES], x[-_TEST_IMAGES:], y[-_TEST_IMAGES:]


@cache
def _partitions(images: int, clients: int, seed: int) -> list[torch.Tensor]:
    parts = np.array_split(np.random.default_rng(seed).permutation(images), clients)
    return [torch.from_numpy(np.sort(part)) for part in parts]


app = client_app(train)
