"""Functions for code that runs in several ranks: the number of the rank, means and sums, the process group.

:func:`flower_gpu.distributed` makes a function that runs in several ranks. The functions here can be called
anywhere. With a single rank, a mean or a sum is the value itself. For models, data and checkpoints, use
PyTorch's own calls.
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

# Texts of the errors of gloo and NCCL after another rank has ended or stopped answering. The texts are needed
# because some of these errors have no class of their own.
_OF_OTHERS: Final = re.compile(
    r"gloo/|Gloo .*failed|Connection (?:closed|reset) by|Connection refused|Broken pipe|Timed out waiting"
    r"|Application timeout caused|NCCL (?:error|communicator)|remote process exited|ncclRemoteError"
    r"|wait timeout after",
    re.IGNORECASE,
)
_CLASSES: Final = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError")


def rank() -> int:
    """Return the number of this rank, starting at 0; 0 outside of a distributed function."""
    return distributed.get_rank() if _is_there() else 0


def world_size() -> int:
    """Return the number of ranks; 1 outside of a distributed function."""
    return distributed.get_world_size() if _is_there() else 1


@overload
def mean(value: float) -> float: ...
@overload
def mean(value: Mapping[str, float]) -> dict[str, float]: ...
def mean(value: Any) -> Any:
    """Return the mean over the ranks of a number, or of each number of a mapping. All ranks must call it."""
    if isinstance(value, Mapping):
        means = [number / world_size() for number in _summed([float(v) for v in value.values()])]
        return dict(zip(value, means, strict=True))
    return _summed([float(value)])[0] / world_size()


def total(value: float) -> float:
    """Return the sum of a number over the ranks, an int if ``value`` is an int. All ranks must call it."""
    result = _summed([float(value)])[0]
    return round(result) if isinstance(value, int) else result


def _summed(numbers: list[float]) -> list[float]:
    """Return the sums of numbers over the ranks, in double precision. All ranks must call it."""
    values = torch.tensor(numbers, dtype=torch.float64, device=device())
    if world_size() > 1:
        distributed.all_reduce(values)
    sums: list[float] = values.cpu().tolist()
    return sums


@contextmanager
def joined(file: str, number: int, count: int, timeout_s: float) -> Iterator[None]:
    """Join the process group within the block; raises ConfigError if CUDA works only in some ranks."""
    store = distributed.FileStore(file, count)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    rank_device = device()
    _agree(store, number, count, rank_device.type)
    options: dict[str, Any] = {}
    if rank_device.type == "cuda":
        torch.cuda.set_device(rank_device)
        options["device_id"] = rank_device
    backend = "nccl" if rank_device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, store=store, rank=number, world_size=count, timeout=timeout, **options
    )
    yield
    # An error skips this step. The barrier would then wait in vain, and this process ends anyway.
    distributed.barrier()
    distributed.destroy_process_group()


def _agree(store: Any, number: int, count: int, kind: str) -> None:
    """Raise ConfigError if only some ranks have CUDA, because CPU and GPU ranks would wait for each other."""
    store.set(f"device/{number}", kind)
    kinds = [store.get(f"device/{other}").decode() for other in range(count)]
    if len(set(kinds)) > 1:
        without = [str(other) for other in range(count) if kinds[other] == "cpu"]
        raise ConfigError(
            f"CUDA works in some ranks and not in rank {', '.join(without)}: see `flower-gpu doctor`"
        )


def is_of_others(error: BaseException) -> bool:
    """Return True if an exception means that another rank has ended or does not answer."""
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
