"""Model, data, optimizer, numbers and checkpoints of a function that runs in several ranks.

:func:`flower_gpu.distributed` makes such a function. These helpers can be called anywhere: with one rank
nothing changes.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, TypeVar, cast, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from flower_gpu import files
from flower_gpu.errors import ConfigError, RankError
from flower_gpu.pytorch import group
from flower_gpu.pytorch.device import device, to_device
from flower_gpu.pytorch.group import rank as rank
from flower_gpu.pytorch.group import world_size as world_size

T = TypeVar("T")

_KEYS = {"model", "optimizer", "steps", "extra"}  # of a checkpoint

# How many steps each optimizer has taken whose learning rate is scaled: a checkpoint has it, too.
_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


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
        If a compiled model is to be divided.
    """
    where = device()
    if group.world_size() == 1:
        return to_device(model, where)
    if isinstance(model, DistributedDataParallel) or group.is_sharded(model):
        return model  # it is prepared already
    if group.options().sync_batchnorm and where.type == "cuda":  # there is none for the CPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if group.options().strategy == "fsdp":
        return group.sharded(model, where, shard)
    to_device(model, where)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model  # nothing to average
    return DistributedDataParallel(
        model,
        device_ids=[where] if where.type == "cuda" else None,
        find_unused_parameters=find_unused_parameters,
    )


class RankSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that counts epochs itself, and knows which examples are there twice."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1  # set_epoch is what one forgets; it may still be called
        return indices

    @property
    def own_examples(self) -> int:
        """How many of this rank's examples are there for the first time; they come before the others."""
        whole = min(len(cast(Sized, self.dataset)), self.total_size)
        return len(range(self.rank, whole, self.num_replicas))


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
    count = group.world_size()
    if (reason := _cannot_be_divided(loader)) is not None:
        if count == 1:  # nor has it to be
            return loader
        raise ConfigError(reason)
    seed = group.of_first(torch.initial_seed()) % 2**62
    sampler = RankSampler(
        loader.dataset,
        num_replicas=count,
        rank=group.rank(),
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=seed,
        drop_last=loader.drop_last,
    )
    group.note_part(len(cast(Sized, loader.dataset)), len(sampler))
    whole = cast(int, loader.batch_size)
    size = whole if group.options().lr_scaling else -(-whole // count)
    return DataLoader(loader.dataset, size, sampler=sampler, **_rest(loader))


def _cannot_be_divided(loader: DataLoader[Any]) -> str | None:
    """Return why a loader cannot be divided; None where it can."""
    if isinstance(loader.dataset, IterableDataset):
        return (
            "the loader of an IterableDataset cannot be divided: let the data set skip what is not of its "
            "rank, by flower_gpu.pytorch.distributed.rank() and world_size()"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        return "a loader without batches cannot be divided: give it batch_size"
    if loader.batch_size is None or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        name = type(loader.batch_sampler if loader.batch_size is None else loader.sampler).__name__
        return (
            f"a loader with a {name} cannot be divided: give it batch_size and shuffle, or divide the data "
            "yourself by flower_gpu.pytorch.distributed.rank() and world_size()"
        )
    is_random = isinstance(loader.sampler, RandomSampler)
    order = cast(Any, loader.sampler)
    if len(order) != len(cast(Sized, loader.dataset)) or (is_random and order.replacement):
        return (
            "a loader that draws a number of samples, or with replacement, cannot be divided: give it the "
            "examples themselves, such as a Subset"
        )
    return None


def _rest(loader: DataLoader[Any]) -> dict[str, Any]:
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "drop_last",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
    )
    return {name: getattr(loader, name) for name in names}


def own_examples(loader: Any) -> int | None:
    """Return how many examples of a divided loader count for this rank; None for any other loader."""
    sampler = getattr(loader, "sampler", None)
    return sampler.own_examples if isinstance(sampler, RankSampler) else None


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
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    steps = steps_of(optimizer)
    state, of_optimizer = get_state_dict(model, optimizer or (), options=options)
    # An optimizer that has no state yet was given one by a step that changes nothing.
    set_steps(optimizer, steps)
    problem = None
    if group.rank() == 0:
        try:
            _check(extra)
            _write(
                Path(path),
                {"model": state, "optimizer": of_optimizer, "steps": steps, "extra": extra},
            )
        except Exception as error:  # the others wait for the word of rank 0
            problem = error
    told = group.of_first(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    if told is not None:
        raise RankError(f"rank 0 could not write {path}: {told}", 0)


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
    path = Path(path)
    if not group.of_first(path.exists()):
        return None
    # Each rank for itself: they are on one host, and share the pages of the file.
    found = _read(path)
    if optimizer is not None and not found["optimizer"]:
        raise ConfigError(f"{path} was saved without an optimizer, and is loaded with one")
    try:
        _set_state(model, optimizer, found)
    except Exception as error:
        if group.is_of_others(error):
            raise
        raise ConfigError(
            f"{path} is not of this model and optimizer: {type(error).__name__}: {error}"
        ) from error
    set_steps(optimizer, found["steps"])
    extra: dict[str, Any] = found["extra"]
    return extra


def _set_state(model: nn.Module, optimizer: Optimizer | None, found: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    # PyTorch loads no optimizer that keeps nothing, such as SGD without momentum.
    keeps = optimizer is not None and any(found["optimizer"]["state"].values())
    set_state_dict(
        model,
        optimizer if optimizer is not None and keeps else (),
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"] if keeps else {},
        options=StateDictOptions(full_state_dict=True),
    )
    if optimizer is None or keeps:
        return
    for own, saved in zip(optimizer.param_groups, found["optimizer"]["param_groups"], strict=True):
        own.update({name: value for name, value in saved.items() if name != "params"})


def _check(extra: Mapping[str, Any]) -> None:
    """Refuse what could be written, but not be read without running code from the file."""
    for name, value in extra.items():
        content = io.BytesIO()
        try:
            torch.save(value, content)
            content.seek(0)
            torch.load(content, weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"{name}, a {type(value).__name__}, cannot be in a checkpoint: numbers, strings, tensors, "
                "and lists and dicts of them can; make float(...) of a scalar of numpy"
            ) from error


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with files.replaced(path) as new:
        torch.save(content, new)


def _read(path: Path) -> Any:
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a file that is none makes it raise nearly anything
        raise ConfigError(
            f"{path} cannot be read as a checkpoint: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(content, dict) and set(content) == _KEYS):
        raise ConfigError(f"{path} is not a checkpoint of flower_gpu.pytorch.distributed.save_checkpoint")
    return content
