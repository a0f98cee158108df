"""ResNet-18 on images of CIFAR's size; the same for a Flower client and a plain loop."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models import resnet18

Weights = list[np.ndarray]

_LIKE_FLOATS = 127.5


def train(
    weights: Weights, partition: int, server_round: int, config: Mapping[str, Any]
) -> tuple[Weights, int]:
    """Train so many steps on a partition; return the weights and how many images that were."""
    torch.manual_seed(hash((config["seed"], partition, server_round)))
    images, labels = (array[partition :: config["num-clients"]] for array in _data(config["data"]))
    device, batch = config["device"], config["batch"]
    model = _MODELS[config["name"]]()
    names = model.state_dict().keys()
    model.load_state_dict({name: torch.tensor(value) for name, value in zip(names, weights, strict=True)})
    model.to(device).train()
    x = torch.from_numpy(np.ascontiguousarray(images)).to(device)
    y = torch.from_numpy(labels.astype(np.int64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for chosen in torch.randint(len(y), (config["steps"], batch)).to(device):
        pixels = x[chosen].permute(0, 3, 1, 2).float().div_(_LIKE_FLOATS).sub_(1.0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), y[chosen]).backward()
        optimizer.step()
    return [value.cpu().numpy() for value in model.state_dict().values()], config["steps"] * batch


def initial_weights(seed: int, name: str) -> Weights:
    torch.manual_seed(seed)
    return [value.numpy() for value in _MODELS[name]().state_dict().values()]


@cache
def _data(folder: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    return images, labels


def _resnet18() -> nn.Module:
    """Return ResNet-18 as it is used for images of 32 x 32: without the early reductions."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class _MeanColour(nn.Module):
    """A model without convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.mean((2, 3))[:, None] * self.weight).sum(-1)


_MODELS = {"resnet18": _resnet18, "elementwise": _MeanColour}
