"""Functions for users of PyTorch: weights, devices, functions on several GPUs, and several clients at once.

Numbers and arrays travel between client and worker; modules and tensors stay in the worker::

    list of numpy arrays ── set_weights ──> model ── to_device ──> GPU
                         <─ get_weights ──        <── training, evaluation
    several ranks: rank, world_size, mean, total
    several clients in one step: group_alike, stack, torch.func.vmap, unstack

Importing this package does not import torch. The first use of a name imports it.
``flower_gpu.pytorch.device`` is a module; the function ``device`` is ``flower_gpu.device``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_gpu.pytorch.device import to_device as to_device
    from flower_gpu.pytorch.device import to_numpy as to_numpy
    from flower_gpu.pytorch.distributed import mean as mean
    from flower_gpu.pytorch.distributed import rank as rank
    from flower_gpu.pytorch.distributed import total as total
    from flower_gpu.pytorch.distributed import world_size as world_size
    from flower_gpu.pytorch.stacking import group_alike as group_alike
    from flower_gpu.pytorch.stacking import stack as stack
    from flower_gpu.pytorch.stacking import unstack as unstack
    from flower_gpu.pytorch.weights import get_state as get_state
    from flower_gpu.pytorch.weights import get_weights as get_weights
    from flower_gpu.pytorch.weights import save_model as save_model
    from flower_gpu.pytorch.weights import set_weights as set_weights

_NAMES = {
    "device": ("to_device", "to_numpy"),
    "distributed": ("mean", "rank", "total", "world_size"),
    "stacking": ("group_alike", "stack", "unstack"),
    "weights": ("get_state", "get_weights", "save_model", "set_weights"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
