"""Loaders that give each rank its part of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from flower_gpu.errors import ConfigError
from flower_gpu.pytorch import group

T = TypeVar("T")


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
