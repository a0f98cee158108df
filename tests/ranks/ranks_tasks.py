"""Tasks of ranks in these tests: they train a small model, or fail in different ways."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flower_gpu
from flower_gpu import distributed
from flower_gpu.errors import WeightsError
from flower_gpu.pytorch.distributed import mean as mean_over_ranks
from flower_gpu.pytorch.distributed import rank, total, world_size
from flower_gpu.pytorch.weights import get_state, get_weights, is_sharded, save_model, set_weights


class Net(nn.Module):
    """A model with two blocks, a weight shared by two layers, and a buffer that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.first.weight
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
        self.last.register_buffer("scale", self.scale, persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.again(torch.relu(self.first(x)))) * self.scale
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.last(x)


def in_ranks(model: Net, way: str) -> nn.Module:
    """Distribute a model to several ranks like the page about several GPUs."""
    if world_size() == 1:
        return model
    if way == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def first_weights() -> list[np.ndarray]:
    torch.manual_seed(0)
    return get_weights(Net())


def train(weights: list[np.ndarray], config: dict[str, Any], count: int = 256) -> Any:
    """An ordinary training function with a few more lines for several ranks."""
    model = Net()
    set_weights(model, weights)
    model = in_ranks(model, config.get("way", "ddp"))
    examples = data(count)
    sampler = DistributedSampler(examples, world_size(), rank())
    loader = DataLoader(examples, 32 // world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for epoch in range(config.get("epochs", 1)):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    kind = type(model).__name__
    return (
        get_weights(model),
        len(examples),
        {"loss": float(np.mean(losses)), "rank": str(rank()), "kind": kind},
    )


def evaluate(weights: list[np.ndarray], config: dict[str, Any], count: int = 101) -> Any:
    model = Net()
    set_weights(model, weights)
    model = in_ranks(model, config.get("way", "ddp"))
    examples = data(count)
    x, y = (part[rank() :: world_size()] for part in examples.tensors)
    with torch.inference_mode():
        outputs = model.eval()(x)
    loss = total(nn.functional.cross_entropy(outputs, y, reduction="sum").item())
    hits = total((outputs.argmax(dim=1) == y).sum().item())
    return loss / count, total(len(y)), {"accuracy": hits / count}


train_in_ranks = distributed(train)
evaluate_in_ranks = distributed(evaluate)


@distributed
def rank_info(*_: Any) -> dict[str, Any]:
    """Return the rank's number, values reduced over all ranks, and settings of its process."""
    return {
        "rank": rank(),
        "world": world_size(),
        "total": total(rank() + 1),
        "mean": mean_over_ranks({"a": rank(), "b": 1.0}),
        "threads": torch.get_num_threads(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "file": flower_gpu.__file__,
    }


@distributed
def wait_for(ready: str, go: str) -> int:
    """Write the pid of this rank to a file, and wait until the file ``go`` exists."""
    total(1)
    Path(f"{ready}{rank()}").write_text(str(os.getpid()))
    while not Path(go).exists():
        time.sleep(0.02)
    total(1)
    return rank()


@distributed
def parts(weights: list[np.ndarray]) -> dict[str, Any]:
    """Return the size of this rank's part of a sharded model, and the complete weights."""
    model = Net()
    set_weights(model, weights)
    in_ranks(model, "fsdp")
    local_size = sum(parameter.to_local().numel() for parameter in model.parameters())
    weights_back = get_weights(model)
    set_weights(model, [array + 1 for array in weights])
    return {
        "local_size": local_size,
        "total_size": sum(parameter.numel() for parameter in model.parameters()),
        "tied": model.again.weight is model.first.weight,
        "scale": [float(model.scale), float(model.last.scale)],
        "is_sharded": is_sharded(model),
        "back": weights_back,
        "plus_one": get_weights(model),
    }


@distributed
def parts_after_evaluation(path: str) -> Any:
    """Return the initial weights of a sharded model, and its weights after an evaluation."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    weights = get_weights(model)
    model = fully_shard(model)
    set_weights(model, weights)
    with torch.inference_mode():
        model(data(16).tensors[0])
    save_model(model, path)
    with pytest.raises(WeightsError, match="give the model itself"):
        get_state(model.state_dict())
    return weights, get_weights(model)


def arguments(*args: Any, **kwargs: Any) -> Any:
    return world_size(), args, kwargs


@distributed(num_gpus=2)
def asks_for_two() -> int:
    return world_size()


@distributed
def different_counts(*_: Any) -> Any:
    return [np.zeros(2)], 100 + rank(), {}


# The next tasks fail. Each rank first writes its pid to a file, so that the test can wait for its end.


def _begin(folder: str) -> None:
    Path(folder, f"rank-{rank()}").write_text(str(os.getpid()))
    total(1)  # returns when all ranks have started


@distributed(timeout_s=60)
def fail(folder: str, failure: str, failing: int) -> float:
    _begin(folder)
    if rank() == failing:
        Path(folder, "grandchild").write_text(str(_start_a_program()))
        if failure == "exception":
            raise ValueError("the number is odd")
        if failure == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if failure == "exit":
            os._exit(7)
        if failure == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return float(total(1))  # the other ranks wait here for the failing one


@distributed(timeout_s=3)
def hang(folder: str, failing: int) -> float:
    _begin(folder)
    if rank() == failing:
        sleep_for_ever()
    return float(total(1))


@distributed(timeout_s=600)
def hang_all(folder: str) -> float:
    _begin(folder)
    if rank() == 1:
        sleep_for_ever()
    return float(total(1))


def sleep_for_ever() -> None:
    time.sleep(3600)


def _start_a_program() -> int:
    import subprocess

    return subprocess.Popen(["sleep", "3600"]).pid


@distributed
def guarded(weights: list[np.ndarray], config: dict[str, Any]) -> Any:
    """Communicate with the other ranks, and try to open a device."""
    try:
        Path(config["device"]).open().close()
        is_refused = False
    except PermissionError:
        is_refused = True
    return weights, int(total(1.0)), {"refused": total(float(is_refused))}
