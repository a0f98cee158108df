"""The process group of a rank: who it is, who the others are, what numbers and what model they have together.

A model is in parts over the ranks with FSDP; its weights as a whole are in the memory of the host. Sources:
"torch.distributed.fsdp.fully_shard" and "Distributed Checkpoint" in PyTorch's documentation.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed, nn

from flower_gpu.errors import ConfigError, InvalidResultError, RankError
from flower_gpu.pytorch.device import device, share_again, shared_tensors, to_device
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


# A model in parts -------------------------------------------------------------------------------------------


def sharded(model: nn.Module, where: torch.device, shard: tuple[type[nn.Module], ...]) -> nn.Module:
    """Divide a model's parameters over the ranks; see ``prepare_model``.

    Each tensor goes to the device for itself, from rank 0: none ever has all of them there.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if hasattr(model, "_orig_mod"):  # of torch.compile, whose class is not public
        raise ConfigError("a compiled model cannot be divided: use torch.compile(prepare_model(model))")
    state = model.state_dict() if rank() == 0 else {}
    not_in_state = _not_in_state(model)
    kept = {name: buffer for name, buffer in _buffers(model) if name in not_in_state}
    to_device(model, "meta")  # shapes only, and tensors that are shared stay so
    mesh = init_device_mesh(where.type, (world_size(),))
    for module in list(_own_units(model, shard)):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shared = shared_tensors(model)
    model.to_empty(device=where)
    share_again(shared)  # each place has got a tensor of its own
    load_full_state(model, state)
    for name, buffer in kept.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, buffer.to(where))
    return model


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


def _own_units(model: nn.Module, shard: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """Yield the modules that are divided for themselves, inner ones first."""
    chosen: set[int] = set()
    for module in model.modules():
        if shard:
            chosen.update(id(part) for part in [module] if isinstance(part, shard))
        elif isinstance(module, nn.ModuleList | nn.Sequential):
            chosen.update(id(part) for part in module)
    for module in reversed(list(model.modules())):
        is_container = isinstance(module, nn.ModuleList | nn.Sequential)
        if id(module) in chosen and not is_container and any(True for _ in module.parameters()):
            yield module


def _not_in_state(model: nn.Module) -> set[str]:
    return {name for name, _ in _buffers(model)} - set(model.state_dict())


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return model.named_buffers(remove_duplicate=False)  # each place of one that is shared
