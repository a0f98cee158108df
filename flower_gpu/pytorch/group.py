"""The process group of a rank: who it is, who the others are, what numbers and what model they have together.

A model is in parts over the ranks with FSDP; its weights as a whole are in the memory of the host. Sources:
"torch.distributed.fsdp.fully_shard" and "Distributed Checkpoint" in PyTorch's documentation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed, nn

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


@contextmanager
def joined(file: str, number: int, count: int, timeout_s: float) -> Iterator[None]:
    """Be one of several ranks in the block.

    Raises
    ------
    ConfigError
        If CUDA works for some of them only.
    """
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


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model's parameters are divided over ranks."""
    # Not by its parameters: after an evaluation those of the outermost module are still whole.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the ``state_dict`` of a divided model as a whole, on the CPU; all ranks call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def load_full_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give each rank its part of a ``state_dict`` that rank 0 has, or any has; all ranks call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state), options=options)
