"""A learning rate for the larger batches of several ranks."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from flower_gpu.pytorch import group

# How many steps each optimizer has taken whose learning rate is scaled: a checkpoint has it, too.
_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Scale an optimizer's learning rate as ``lr_scaling`` of :func:`flower_gpu.distributed` says.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        With the learning rate for one rank.

    Returns
    -------
    torch.optim.Optimizer
        The same one. Its learning rate is what it was, also for a scheduler; within ``step`` it is
        multiplied.
    """
    how = group.options()
    count = group.world_size()
    if count == 1 or how.lr_scaling is None or optimizer in _steps:
        return optimizer
    most = float(count) if how.lr_scaling == "linear" else math.sqrt(count)
    _steps[optimizer] = 0
    before: list[Any] = []

    def multiply(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _steps[optimizer] += 1
        factor = factor_at(_steps[optimizer], most, how.warmup_steps)
        before[:] = [parameters["lr"] for parameters in optimizer.param_groups]
        for parameters in optimizer.param_groups:
            parameters["lr"] = parameters["lr"] * factor

    def put_back(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameters, rate in zip(optimizer.param_groups, before, strict=True):
            parameters["lr"] = rate

    optimizer.register_step_pre_hook(multiply)
    optimizer.register_step_post_hook(put_back)
    return optimizer


def steps_of(optimizer: Optimizer | None) -> int:
    """Return how many steps an optimizer has taken whose learning rate is scaled; 0 for any other."""
    return _steps.get(optimizer, 0) if optimizer is not None else 0


def set_steps(optimizer: Optimizer | None, steps: int) -> None:
    """Let warm-up go on after so many steps."""
    if optimizer is not None and optimizer in _steps:
        _steps[optimizer] = steps


def factor_at(step: int, most: float, warmup_steps: int) -> float:
    """Return the factor of a step, counted from 1: from 1 to ``most`` in a line over the steps of warm-up."""
    if step >= warmup_steps:
        return most
    return 1 + (most - 1) * (step - 1) / max(1, warmup_steps - 1)
