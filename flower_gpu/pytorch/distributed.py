"""Model, data, optimizer and numbers of a function that runs in several ranks; with one rank nothing changes.

:func:`flower_gpu.distributed` makes such a function. These helpers can be called anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flower_gpu.pytorch import group, sharding
from flower_gpu.pytorch.checkpoint import load_checkpoint as load_checkpoint
from flower_gpu.pytorch.checkpoint import save_checkpoint as save_checkpoint
from flower_gpu.pytorch.device import device, to_device
from flower_gpu.pytorch.group import rank as rank
from flower_gpu.pytorch.group import world_size as world_size
from flower_gpu.pytorch.learning_rate import prepare_optimizer as prepare_optimizer
from flower_gpu.pytorch.loaders import prepare_loader as prepare_loader


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
