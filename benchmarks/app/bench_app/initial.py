"""Initial models. Only the models of GPU clients need torch on the server."""

from importlib import import_module
from typing import Any

import numpy as np

Weights = list[np.ndarray]

#: Shape of the kernel of each layer in networks.py. The layer has one bias per value of the first dimension.
_KERNELS = {
    "mlp": ((32, 64), (10, 32)),
    "cnn": ((16, 1, 3, 3), (32, 16, 3, 3), (10, 128)),
    "wide-cnn": ((64, 1, 3, 3), (128, 64, 3, 3), (10, 512)),
    "image-cnn": ((32, 3, 3, 3), (64, 32, 3, 3), (10, 4096)),
    "digits-cnn": ((16, 1, 3, 3), (32, 16, 3, 3), (64, 128), (10, 64)),
    "cifar-cnn": ((16, 3, 3, 3), (32, 16, 3, 3), (64, 2048), (10, 64)),
}


def model(config: Any) -> Weights:
    """Return the initial model of a run config."""
    client = config["client"]
    if client.startswith("no_op") or client == "elementwise":
        size = int(config["model-mb"] * 1e6) // (4 * config["arrays"])
        return [np.full(size, number, np.float32) for number in range(config["arrays"])]
    if client == "images":
        # An import statement would make the fork server import torch for all clients.
        return import_module(f"bench_app.{client}").initial_weights(config["seed"], config["network"])
    return weights(config["seed"], config.get("network", "cnn"))


def weights(seed: int, network: str = "cnn") -> Weights:
    """Draw the weights and biases of each layer from the same range, as PyTorch does."""
    random = np.random.default_rng(seed)
    drawn: Weights = []
    for kernel in _KERNELS[network]:
        bound = np.prod(kernel[1:]) ** -0.5
        for shape in (kernel, kernel[:1]):
            drawn.append(random.uniform(-bound, bound, shape).astype(np.float32))
    return drawn
