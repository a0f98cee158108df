"""A function that runs in several ranks: which rank this is, means and sums over all of them, their group.

:func:`flower_gpu.distributed` makes such a function. These can be called anywhere: with one rank nothing
changes. Model, data and checkpoints are brought to ranks by PyTorch's own calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, overload

import torch
from torch import distributed

from flower_gpu.errors import ConfigError, RankError
from flower_gpu.pytorch.device import device

# What gloo and NCCL say when another rank is gone or does not answer. Not each error has a class of its own.
_OF_OTHERS: Final = re.compile(
    r"gloo/|Gloo .*failed|Connection (?:closed|reset) by|Connection refused|Broken pipe|Timed out waiting"
    r"|Application timeout caused|NCCL (?:error|communicator)|remote process exited|ncclRemoteError"
    r"|wait timeout after",
    re.IGNORECASE,
)
_CLASSES: Final = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError")


def rank() -> int:
    """Return the number of this rank, from 0 on; 0 where there is one."""
    return distributed.get_rank() if _is_there() else 0


def world_size() -> int:
    """Return how many ranks there are; 1 outside of a distributed function."""
    return distributed.get_world_size() if _is_there() else 1


@overload
def mean(value: float) -> float: ...
@overload
def mean(value: Mapping[str, float]) -> dict[str, float]: ...
def mean(value: Any) -> Any:
    """Return the mean over the ranks of a number, or of each number of a mapping; all ranks call it."""
    if isinstance(value, Mapping):
        means = [number / world_size() for number in _summed([float(v) for v in value.values()])]
        return dict(zip(value, means, strict=True))
    return _summed([float(value)])[0] / world_size()


def total(value: float) -> float:
    """Return the sum over the ranks of a number; a whole one stays whole; all ranks call it."""
    found = _summed([float(value)])[0]
    return round(found) if isinstance(value, int) else found


def _summed(numbers: list[float]) -> list[float]:
    """Return the sums of numbers over the ranks, in double precision; all ranks call it."""
    values = torch.tensor(numbers, dtype=torch.float64, device=device())
    found: list[float] = summed_tensor(values).cpu().tolist()
    return found


def summed_tensor(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the ranks; all ranks call it."""
    if world_size() > 1:
        distributed.all_reduce(values)
    return values


@contextmanager
def joined(file: str, number: int, count: int, timeout_s: float) -> Iterator[None]:
    """Be one of several ranks in the block; ConfigError if CUDA works for some of them only."""
    store = distributed.FileStore(file, count)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    own = device()
    _agree(store, number, count, own.type)
    where: dict[str, Any] = {}
    if own.type == "cuda":
        torch.cuda.set_device(own)
        where["device_id"] = own
    backend = "nccl" if own.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, store=store, rank=number, world_size=count, timeout=timeout, **where
    )
    yield
    # After an error nobody says goodbye: it would be waited for in vain, and this process ends anyway.
    distributed.barrier()
    distributed.destroy_process_group()


def _agree(store: Any, number: int, count: int, kind: str) -> None:
    """Let ranks on the CPU and ranks on GPUs not wait for each other for ever."""
    store.set(f"device/{number}", kind)
    kinds = [store.get(f"device/{other}").decode() for other in range(count)]
    if len(set(kinds)) > 1:
        without = [str(other) for other in range(count) if kinds[other] == "cpu"]
        raise ConfigError(
            f"CUDA works in some ranks and not in rank {', '.join(without)}: see `flower-gpu doctor`"
        )


def is_of_others(error: BaseException) -> bool:
    """Tell whether an exception says that another rank is gone, or does not answer."""
    link: BaseException | None = error
    while link is not None:
        if type(link).__name__ in _CLASSES or isinstance(link, RankError):
            return True
        if isinstance(link, RuntimeError) and _OF_OTHERS.search(str(link)):
            return True
        link = link.__cause__
    return False


def _is_there() -> bool:
    return distributed.is_available() and distributed.is_initialized()
