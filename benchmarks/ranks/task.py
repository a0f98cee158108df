"""Training with and without ranks: the same function, called as it is, and made into distributed ones."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from flower_gpu import device, distributed, to_device
from flower_gpu.pytorch.distributed import mean, rank, world_size
from flower_gpu.pytorch.weights import get_weights, set_weights

_SIDE = 32
_CLASSES = 10


def model_of(kind: str) -> nn.Module:
    if kind == "resnet18":
        from torchvision.models import resnet18

        model: nn.Module = resnet18(num_classes=_CLASSES)
        return model
    width = int(kind.removeprefix("mlp"))
    parts = [nn.Flatten(), nn.Linear(3 * _SIDE * _SIDE, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _CLASSES))


def weights_of(kind: str) -> list[Any]:
    torch.manual_seed(0)
    return get_weights(model_of(kind))


def train(weights: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
    """Take steps, and say how long one of them took: the median of all but the first few."""
    torch.manual_seed(1)
    model = model_of(config["model"])
    set_weights(model, weights)
    model = to_device(model)
    if world_size() > 1:
        model = in_ranks(model, config["way"])
    count = config["batch"] * config["steps"]
    # The same few images again and again: what is measured is not the making of data.
    images = torch.randn(config["batch"], 3, _SIDE, _SIDE).repeat(config["steps"], 1, 1, 1)
    labels = torch.arange(count) % _CLASSES
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, world_size(), rank(), shuffle=False)
    loader = DataLoader(data, config["batch"] // world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    seconds = []
    for x, y in loader:
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(x.to(device())), y.to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    later = sorted(seconds[len(seconds) // 4 :])
    return get_weights(model), count, {"step_s": mean(later[len(later) // 2])}


def in_ranks(model: nn.Module, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    for part in model.children():
        if any(True for _ in part.parameters()):
            fully_shard(part)
    return fully_shard(model)


train_in_ranks = distributed(train)


def nothing(weights: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
    return weights, 1, {"step_s": 0.0}


nothing_in_ranks = distributed(nothing)
