"""What ranks do in tests: they train a small model, or fail in some way."""

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
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import flower_gpu
from flower_gpu import distributed
from flower_gpu.errors import ConfigError, WeightsError
from flower_gpu.pytorch import group
from flower_gpu.pytorch.distributed import (
    load_checkpoint,
    prepare_loader,
    prepare_model,
    prepare_optimizer,
    rank,
    save_checkpoint,
    total,
    world_size,
)
from flower_gpu.pytorch.distributed import mean as mean_over_ranks
from flower_gpu.pytorch.evaluation import classification_metrics
from flower_gpu.pytorch.weights import get_state, get_weights, save_model, set_state, set_weights


class Net(nn.Module):
    """Two blocks, a tensor that two places share, and a buffer that is not in the state_dict."""

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


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def first_weights() -> list[np.ndarray]:
    torch.manual_seed(0)
    return get_weights(Net())


def train(weights: list[np.ndarray], config: dict[str, Any], count: int = 256) -> Any:
    """An ordinary training function with three lines more."""
    torch.manual_seed(5)
    model = Net()
    set_weights(model, weights)
    model = prepare_model(model)
    examples = data(count)
    loader = prepare_loader(DataLoader(examples, config.get("batch", 32), shuffle=True))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    losses = []
    for _ in range(config.get("epochs", 1)):
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
    model = prepare_model(model)
    metrics = classification_metrics(model, prepare_loader(DataLoader(data(count), 32)))
    return metrics.pop("loss"), metrics.pop("num_examples"), metrics


ddp = distributed(train)
fsdp = distributed(train, strategy="fsdp")
evaluate_ddp = distributed(evaluate)
evaluate_fsdp = distributed(evaluate, strategy="fsdp")


@distributed
def who(*_: Any) -> dict[str, Any]:
    """What this rank is, and what the sum over all of them is."""
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
    """Say which process this rank is, and wait until there is a file."""
    total(1)
    Path(f"{ready}{rank()}").write_text(str(os.getpid()))
    while not Path(go).exists():
        time.sleep(0.02)
    total(1)
    return rank()


@distributed(strategy="fsdp")
def parts(weights: list[np.ndarray]) -> dict[str, Any]:
    """How much of a divided model this rank has, and what it gives back as a whole."""
    model = Net()
    set_weights(model, weights)
    model = prepare_model(model)
    own = sum(each.to_local().numel() for each in model.parameters())
    again = get_weights(model)
    set_weights(model, [array + 1 for array in weights])
    return {
        "own": own,
        "of": sum(each.numel() for each in model.parameters()),
        "tied": model.again.weight is model.first.weight,
        "scale": [float(model.scale), float(model.last.scale)],
        "is_sharded": group.is_sharded(model),
        "back": again,
        "plus_one": get_weights(model),
    }


@distributed(strategy="fsdp")
def parts_after_evaluation(path: str) -> Any:
    """The weights of a model in one part, and what it gives back that has computed something last."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    weights = get_weights(model)
    with pytest.raises(ConfigError, match="a compiled model"):
        prepare_model(torch.compile(model))  # type: ignore[arg-type]
    model = prepare_model(model)
    set_state(model, {"weight": weights[0] + 1, "bias": weights[1] + 1})
    set_weights(model, weights)
    classification_metrics(model, prepare_loader(DataLoader(data(16), 8)))
    save_model(model, path)
    with pytest.raises(WeightsError, match="give the model itself"):
        get_state(model.state_dict())
    return weights, get_weights(model)


def checkpointed(path: str, strategy: str, steps: int) -> Any:
    """Take steps from where the checkpoint is, or from the first weights; write it again."""
    torch.manual_seed(0)
    model = prepare_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = load_checkpoint(path, model, optimizer)
    x, y = data(64).tensors
    part = slice(rank(), None, world_size())
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    done = (found or {"done": 0})["done"] + steps
    save_checkpoint(path, model, optimizer, done=done)
    return get_weights(model), done


ddp_checkpointed = distributed(checkpointed)
fsdp_checkpointed = distributed(checkpointed, strategy="fsdp")


@distributed(lr_scaling="linear", warmup_steps=3)
def rates() -> list[float]:
    """The learning rates of five steps as the optimizer had them, and as it shows them afterwards."""
    model = prepare_model(prepare_model(nn.Linear(2, 1)))  # once more changes nothing
    optimizer = prepare_optimizer(prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1)))
    assert not isinstance(getattr(model, "module", None), nn.parallel.DistributedDataParallel)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(one.param_groups[0]["lr"]))
    loader = prepare_loader(DataLoader(data(10), 5))
    for x, _ in loader:
        seen.append(float(len(x)))
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


class TwoHeads(nn.Module):
    """Of two layers it uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@distributed
def one_head(find_unused_parameters: bool) -> int:
    model = prepare_model(TwoHeads(), find_unused_parameters=find_unused_parameters)
    for _ in range(2):
        model(data(4).tensors[0]).sum().backward()
    return sum(parameter.grad is not None for parameter in model.parameters())


@distributed
def sampler_of_others() -> None:
    examples = data(10)
    prepare_loader(DataLoader(examples, 2, sampler=SequentialSampler(range(6))))


def arguments(*args: Any, **kwargs: Any) -> Any:
    return world_size(), group.options().strategy, args, kwargs


@distributed(num_gpus=2)
def asks_for_two() -> int:
    return world_size()


@distributed(lr_scaling="linear", warmup_steps=5)
def warmed_up(path: str) -> list[float]:
    """The learning rates of two steps, then after a checkpoint those of three more, by another optimizer."""
    seen: list[float] = []
    for count in (2, 3):
        model = prepare_model(nn.Linear(2, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01))
        optimizer.register_step_pre_hook(lambda one, *_: seen.append(one.param_groups[0]["lr"]))
        found = load_checkpoint(path, model, optimizer)
        seen[:] = found["seen"] if found else []
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        save_checkpoint(path, model, optimizer, seen=seen)
    return [*seen, optimizer.param_groups[0]["lr"]]


@distributed
def cannot_be_saved(path: str, extra: Any) -> None:
    save_checkpoint(path, prepare_model(nn.Linear(2, 1)), extra=extra)


@distributed
def other_than_saved(path: str, features: int, momentum: float) -> None:
    for size, beta in ((2, 0.9), (features, momentum)):
        model = prepare_model(nn.Linear(size, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=beta)
        load_checkpoint(path, model, optimizer)
        save_checkpoint(path, model, optimizer)


@distributed
def different_counts(*_: Any) -> Any:
    return [np.zeros(2)], 100 + rank(), {}


@distributed
def part_of_the_count(*_: Any) -> Any:
    loader = prepare_loader(DataLoader(data(64), 8))
    return [np.zeros(2)], sum(len(x) for x, _ in loader), {}


# How ranks fail. Each first says who it is, so that a test knows whom to look for.


def _begin(folder: str) -> None:
    Path(folder, f"rank-{rank()}").write_text(str(os.getpid()))
    total(1)  # all are there


@distributed(timeout_s=60)
def fail(folder: str, how: str, failing: int) -> float:
    _begin(folder)
    if rank() == failing:
        Path(folder, "grandchild").write_text(str(_start_a_program()))
        if how == "exception":
            raise ValueError("the number is odd")
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return float(total(1))  # where the others wait for it


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


def options() -> Any:
    return group.options()


@distributed
def guarded(weights: list[np.ndarray], config: dict[str, Any]) -> Any:
    """Meet the others, and try to open a device."""
    try:
        Path(config["device"]).open().close()
        is_refused = False
    except PermissionError:
        is_refused = True
    return weights, int(total(1.0)), {"refused": total(float(is_refused))}
