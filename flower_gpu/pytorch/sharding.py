"""A model in parts over the ranks (FSDP), and its weights as a whole in the memory of the host.

Sources: "torch.distributed.fsdp.fully_shard" and "Distributed Checkpoint" in PyTorch's documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from flower_gpu.errors import ConfigError
from flower_gpu.pytorch import group
from flower_gpu.pytorch.device import share_again, shared_tensors, to_device


def sharded(model: nn.Module, where: torch.device, shard: tuple[type[nn.Module], ...]) -> nn.Module:
    """Divide a model's parameters over the ranks; see ``prepare_model``.

    Each tensor goes to the device for itself, from rank 0: none ever has all of them there.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise ConfigError(f"strategy='fsdp' needs PyTorch 2.6, not {torch.__version__}") from error
    from torch.distributed.device_mesh import init_device_mesh

    if hasattr(model, "_orig_mod"):
        raise ConfigError("a compiled model cannot be divided: use torch.compile(prepare_model(model))")
    state = model.state_dict() if group.rank() == 0 else {}
    not_in_state = _not_in_state(model)
    kept = {name: buffer for name, buffer in _buffers(model) if name in not_in_state}
    to_device(model, "meta")  # shapes only, and tensors that are shared stay so
    mesh = init_device_mesh(where.type, (group.world_size(),))
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
