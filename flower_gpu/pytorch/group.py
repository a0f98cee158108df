"""The process group of a rank: who it is, who the others are, and what numbers they have together."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed

from flower_gpu.errors import ConfigError, InvalidResultError, RankError
from flower_gpu.pytorch.device import device
from flower_gpu.pytorch.rank_settings import RankSettings

# What gloo and NCCL say when another rank is gone or does not answer. Not each error has a class of its own.
_OF_OTHERS: Final = re.compile(
    r"gloo/|Gloo .*failed|Connection (?:closed|reset) by|Connection refused|Broken pipe|Timed out waiting"
    r"|Application timeout caused|NCCL (?:error|communicator)|remote process exited|ncclRemoteError"
    r"|wait timeout after",
    re.IGNORECASE,
)
_CLASSES: Final = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError")


_options = RankSettings()
# Of each loader that was divided: how many examples there are, and how many of them are this rank's.
_parts: list[tuple[int, int]] = []


def options() -> RankSettings:
    """Return how the ranks work together; the defaults where there is one."""
    return _options


def rank() -> int:
    """Return the number of this rank, from 0 on; 0 where there is one."""
    return distributed.get_rank() if _is_there() else 0


def world_size() -> int:
    """Return how many ranks there are; 1 outside of a distributed function."""
    return distributed.get_world_size() if _is_there() else 1


@contextmanager
def joined(file: str, number: int, count: int, how: RankSettings) -> Iterator[None]:
    """Be one of several ranks in the block.

    Raises
    ------
    ConfigError
        If CUDA works for some of them only.
    """
    global _options
    store = distributed.FileStore(file, count)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=how.timeout_s)
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
    _options = how
    yield
    # After an error nobody says goodbye: it would be waited for in vain, and this process ends anyway.
    distributed.barrier()
    distributed.destroy_process_group()
    _options = RankSettings()


def _agree(store: Any, number: int, count: int, kind: str) -> None:
    """Let ranks on the CPU and ranks on GPUs not wait for each other for ever."""
    store.set(f"device/{number}", kind)
    kinds = [store.get(f"device/{other}").decode() for other in range(count)]
    if len(set(kinds)) > 1:
        without = [str(other) for other in range(count) if kinds[other] == "cpu"]
        raise ConfigError(
            f"CUDA works in some ranks and not in rank {', '.join(without)}: see `flower-gpu doctor`"
        )


def note_part(whole: int, part: int) -> None:
    """Take note that this rank has so many of a data set's examples."""
    _parts.append((whole, part))


def check_num_examples(number: int | None) -> None:
    """Refuse the number of one rank's examples where the number of all is meant.

    Raises
    ------
    InvalidResultError
        If it is that.
    """
    divided = [(whole, part) for whole, part in _parts if part != whole]
    if number is None or not divided or any(number == whole for whole, _ in divided):
        return
    for whole, part in divided:
        if number == part:
            raise InvalidResultError(
                f"the function returned {number} examples, which is what this rank had of {whole}. Return "
                "the number of all examples of this client, such as len(dataset), or "
                "flower_gpu.pytorch.distributed.total(n) of a rank's own"
            )


def summed(numbers: list[float]) -> list[float]:
    """Return the sums of numbers over the ranks, in double precision; all ranks call it."""
    values = torch.tensor(numbers, dtype=torch.float64, device=device())
    found: list[float] = summed_tensor(values).cpu().tolist()
    return found


def summed_tensor(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the ranks; all ranks call it."""
    if world_size() > 1:
        distributed.all_reduce(values)
    return values


def of_first(value: Any) -> Any:
    """Return what rank 0 has given; all ranks call it."""
    if world_size() == 1:
        return value
    values = [value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on what device a pickle travels is no matter
        distributed.broadcast_object_list(values, src=0)
    return values[0]


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
