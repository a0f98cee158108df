"""A GPU client: ResNet-18 on images of CIFAR's size."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models import resnet18

# Relative imports, because the GPU benchmarks import this module from the root of the repository.
from . import networks
from .replies import client_app

_CHANNELS, _CLASSES = 3, 10


def small_resnet18() -> nn.Module:
    """Return ResNet-18 for images of 32 x 32, without the early reductions."""
    model: nn.Module = resnet18(num_classes=_CLASSES)
    model.conv1 = nn.Conv2d(_CHANNELS, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class MeanColor(nn.Module):
    """A model without convolutions and matrix products, so it needs neither cuDNN nor cuBLAS.

    It also runs on the stand-in for CUDA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_CLASSES, _CHANNELS))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.mean((2, 3))[:, None] * self.weight).sum(-1)


MODELS: dict[str, Any] = {"resnet18": small_resnet18, "elementwise": MeanColor}


class Trainer:
    """A model and the images of a partition, on a device.

    Parameters
    ----------
    network : str
        One of :data:`MODELS`.
    data : str
        Folder of ``images.npy`` (uint8, n x side x side x 3) and ``labels.npy``.
    partition, partitions : int
        The client's number, and the number of clients.
    device : str
        Device of PyTorch.
    """

    def __init__(self, network: str, data: str, partition: int, partitions: int, device: str) -> None:
        self._model = MODELS[network]().to(device)
        images, labels = (array[partition::partitions] for array in _arrays(data))
        self._images = torch.from_numpy(np.ascontiguousarray(images)).to(device)
        self._labels = torch.from_numpy(labels.astype(np.int64)).to(device)

    def fit(self, weights: list[Any], steps: int, batch: int, seed: int) -> tuple[list[Any], float]:
        """Train from ``weights``; return the new weights and the last loss."""
        networks.load(self._model, weights)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randint(len(self._labels), (steps, batch), generator=generator).to(self._labels.device)
        batches = (
            (self._images[part].permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0), self._labels[part])
            for part in order
        )
        loss = networks.fit(self._model, batches, rate=0.02)
        return networks.weights_of(self._model), loss.item()


def initial_weights(seed: int, network: str) -> list[Any]:
    torch.manual_seed(seed)
    return networks.weights_of(MODELS[network]())


@cache
def _arrays(folder: str) -> tuple[Any, Any]:
    images, labels = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    return images, labels


def train(weights: list[Any], partition: int, server_round: int, config: Any) -> tuple[list[Any], int]:
    """Train for some steps; return the weights and the number of images."""
    steps, batch = config["steps"], config["batch"]
    trainer = Trainer(config["network"], config["data"], partition, config["num-clients"], config["device"])
    trained, _ = trainer.fit(weights, steps, batch, seed=1000 * server_round + partition)
    return trained, steps * batch


app = client_app(train)
