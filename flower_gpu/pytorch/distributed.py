"""Model, data, optimizer and numbers of a function that runs in several ranks; with one rank nothing changes.

:func:`flower_gpu.distributed` makes such a function. These helpers can be called anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from flower_gpu.pytorch import checkpoint, group, learning_rate, loaders, sharding
from flower_gpu.pytorch.device import device, to_device
from flower_gpu.pytorch.group import rank as rank
from flower_gpu.pytorch.group import world_size as world_size

T = TypeVar("T")


def prepare_model(
    model: nn.Module, shard: tuple[type[nn.Module], ...] = (), *, find_unused_parameters: bool = False
) -> nn.Module:
    """Bring a model to this rank's device, with the same weights in all ranks: those of rank 0.

    Parameters
    ----------
    model : torch.nn.Module
        With its weights, on the CPU. Make the optimizer afterwards.
    shard : tuple of classes
        With ``strategy="fsdp"``: modules of these classes, such as a transformer's blocks, are whole on a
        GPU one at a time. Default: the parts of each ``ModuleList`` and ``Sequential``.
    find_unused_parameters : bool
        With ``strategy="ddp"``: whether there are parameters that learn, but not from every batch, such as
        heads of which each batch uses one. PyTorch says so where it is needed; it costs time in each step.

    Returns
    -------
    torch.nn.Module
        With one rank the model itself. Else, as :func:`flower_gpu.distributed` was told, a
        ``DistributedDataParallel`` around it, or the model itself with its parameters divided. A backward
        pass averages the gradients over the ranks.

    Raises
    ------
    ConfigError
        If PyTorch is too old for ``fsdp`` (2.6).
    """
    where = device()
    if group.world_size() == 1:
        return to_device(model, where)
    if isinstance(model, DistributedDataParallel) or sharding.is_sharded(model):
        return model  # it is prepared already
    if group.options().sync_batchnorm and where.type == "cuda":  # there is none for the CPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if group.options().strategy == "fsdp":
        return sharding.sharded(model, where, shard)
    to_device(model, where)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model  # nothing to average
    return DistributedDataParallel(
        model,
        device_ids=[where] if where.type == "cuda" else None,
        find_unused_parameters=find_unused_parameters,
    )


def prepare_loader(loader: DataLoader[T]) -> DataLoader[T]:
    """Have a loader give each rank its part of the data, in another order in each epoch if it shuffles.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        Of the whole data set, with ``batch_size`` and ``shuffle``.

    Returns
    -------
    torch.utils.data.DataLoader
        With a ``DistributedSampler``. Its batches together are those of one rank: each has its part of
        ``batch_size``, rounded up; with ``lr_scaling`` it is the size of each. So that all ranks take as many
        steps, up to ``world_size() - 1`` examples are there twice, or left out with ``drop_last``. The order
        follows ``torch.initial_seed()`` and the epoch, which is counted by itself.

    Raises
    ------
    ConfigError
        If it cannot be divided: it has a sampler of its own, or an ``IterableDataset``.
    """
    return loaders.divided(loader)


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
    return learning_rate.scaled(optimizer)


@overload
def mean(value: float) -> float: ...
@overload
def mean(value: Mapping[str, float]) -> dict[str, float]: ...
def mean(value: Any) -> Any:
    """Return the mean over the ranks of a number, or of each number of a mapping; all ranks call it."""
    if isinstance(value, Mapping):
        means = [number / group.world_size() for number in group.summed([float(v) for v in value.values()])]
        return dict(zip(value, means, strict=True))
    return group.summed([float(value)])[0] / group.world_size()


def total(value: float) -> float:
    """Return the sum over the ranks of a number; a whole one stays whole; all ranks call it."""
    found = group.summed([float(value)])[0]
    return round(found) if isinstance(value, int) else found


def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, **extra: Any
) -> None:
    """Write a checkpoint; rank 0 does, and the others wait for it.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it appears under its name when it is complete, and replaces what is there.
    model : torch.nn.Module
        As from :func:`prepare_model`. The file does not depend on how many ranks there were, or how they
        worked together.
    optimizer : torch.optim.Optimizer, optional
        Its state is saved, too.
    **extra
        Numbers, strings and tensors that :func:`load_checkpoint` is to return, such as the epoch.
    """
    checkpoint.save(path, model, optimizer, extra)


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Any] | None:
    """Load what :func:`save_checkpoint` has written, by however many ranks; all ranks call it.

    Returns
    -------
    dict or None
        What was saved with it by name; None where there is no such file, and nothing was changed.

    Raises
    ------
    ConfigError
        If the file is no such checkpoint.
    """
    return checkpoint.load(path, model, optimizer)
