"""Conversion of a model's ``state_dict`` to numpy arrays and back, and to a safetensors file.

Arrays and files have every entry of the ``state_dict`` in its order: parameters and buffers. numpy has no
bfloat16, so such an entry is sent as float32, which is lossless. Loading casts it back.
Strategies average integer and boolean buffers into floats. Loading rounds these floats.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flower_gpu import files
from flower_gpu.errors import ConfigError, WeightsError
from flower_gpu.frameworks import array_checks
from flower_gpu.pytorch.device import from_numpy
from flower_gpu.pytorch.distributed import rank


def get_weights(model: nn.Module) -> list[NDArray[Any]]:
    """Return a copy of a model's weights as numpy arrays.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on any device. The wrapper of ``DistributedDataParallel`` is ignored. A model that
        ``fully_shard`` has sharded over ranks is gathered on the CPU of rank 0. All ranks must call this
        function, and the other ranks get an empty list.

    Returns
    -------
    list of numpy.ndarray
        A C-contiguous array for each entry of ``model.state_dict()``, in its order. The arrays share no
        memory with the model or each other. Each is a single copy, or a single transfer from the GPU.
        bfloat16 entries become float32; all other dtypes and all shapes are kept.

    Raises
    ------
    WeightsError
        If an entry has no numpy counterpart (quantised, float8, sparse, not yet initialised, not a tensor).
        The message names the entry.
    """
    return list(get_state(model).values())


def get_state(model: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    """Return a copy of a model's weights as numpy arrays by name.

    Parameters
    ----------
    model : torch.nn.Module or mapping of str to torch.Tensor
        The model, or its ``state_dict``.

    Returns
    -------
    dict of str to numpy.ndarray
        As :func:`get_weights`, with the names of the ``state_dict``.

    Raises
    ------
    WeightsError
        As :func:`get_weights`.
    """
    entries = _entries(model)
    # Check all entries before the first copy.
    array_checks.convert_each(entries, _dtype, entries.values())
    return {name: _to_numpy(tensor) for name, tensor in entries.items()}


def set_weights(model: nn.Module, weights: Sequence[NDArray[Any]]) -> None:
    """Load numpy arrays into a model.

    All arrays are checked before the first write, so a list that does not fit leaves the model unchanged.
    The values are copied into the existing tensors on their devices, and no array is kept. A model that is
    sharded over ranks gets the arrays of rank 0.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on any device.
    weights : sequence of numpy.ndarray
        An array for each entry of ``model.state_dict()``, in that order, as from :func:`get_weights`.
        Entries that share a tensor each have an array, and the last of these arrays counts.

    Raises
    ------
    WeightsError
        If the number of arrays, a shape or a dtype differs from the model's. Also if a float array for an
        integer or boolean buffer has a value that does not fit. The message names the entry, the expected
        value and the actual value.

    Notes
    -----
    Two differences of dtype are accepted, because averaging causes them. Floats for an integer or boolean
    buffer are rounded to the nearest integer (halves to even). A 0-d float64 is accepted for a smaller float,
    because numpy before 2.0 promotes 0-d arrays.
    """
    model = _without_wrapper(model)
    state = model.state_dict()
    entries = _entries(state, is_divided=True)
    hint = ""
    if isinstance(weights, Sequence) and len(weights) == len(list(model.parameters())):
        hint = (
            "; that is the number of parameters, but the state_dict has buffers (such as "
            "BatchNorm's running mean) or shared parameters too: use get_weights"
        )
    array_checks.check_count(weights, list(entries), hint)
    labels = [f"{name}, array {i} of {len(entries)}" for i, name in enumerate(entries, start=1)]
    dtypes = array_checks.convert_each(state, _dtype, state.values())
    converted = array_checks.convert_each(labels, _to_tensor, weights, state.values(), dtypes)
    tensors = dict(zip(state, converted, strict=True))
    if is_sharded(model):
        _load_full_state(model, tensors)
        return
    # load_state_dict is used instead of copy_, because some modules do not compute with the tensors of their
    # state_dict, but load_state_dict can convert these. It needs the versions of the modules, which this same
    # dict has as metadata. Without the versions it may treat the arrays as data of an old release.
    state.update(tensors)
    model.load_state_dict(state, strict=True)


def save_model(model: nn.Module | Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Save a model's ``state_dict`` as a safetensors file.

    The file appears under its name only when it is complete. If there are several ranks, rank 0 writes it.
    The file has every name, including the names of entries that share a tensor. It has no devices, so this
    works on a machine without a GPU::

        model.load_state_dict(safetensors.torch.load_file(path))

    Parameters
    ----------
    model : torch.nn.Module or mapping of str to torch.Tensor
        The model, or its ``state_dict``, on any device.
    path : str or os.PathLike
        Path of the file. An existing file is replaced.

    Raises
    ------
    ConfigError
        If safetensors is not installed.
    WeightsError
        If an entry cannot be stored. The message names the entry.
    FileNotFoundError
        If the folder does not exist.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("saving a model needs safetensors: pip install 'safetensors>=0.4'") from error
    entries = _entries(model)
    if rank() != 0:
        return
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in entries.items():
        plain = tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
        # Clone a tensor that shares memory with another one, because safetensors refuses such tensors.
        storage = plain.untyped_storage().data_ptr()
        tensors[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    path = Path(path)
    with files.replaced(path) as new:
        try:
            save_file(tensors, new, metadata={"format": "pt"})
        except KeyError as error:  # safetensors does not know the dtype
            dtype = error.args[0]
            names = [name for name, tensor in entries.items() if tensor.dtype == dtype]
            raise WeightsError(f"safetensors cannot store {dtype}: {array_checks.few(names)}") from error


def _entries(
    model: nn.Module | Mapping[str, torch.Tensor], is_divided: bool = False
) -> dict[str, torch.Tensor]:
    """Return the detached tensors of a ``state_dict``. Raise WeightsError if a tensor has no plain values."""
    if isinstance(model, nn.Module):
        model = _without_wrapper(model)
        state = _full_state(model) if is_sharded(model) else model.state_dict()
    else:
        state = dict(model)
        if not is_divided and any(hasattr(tensor, "full_tensor") for tensor in state.values()):
            raise WeightsError("this state_dict is divided over ranks; give the model itself")
    entries = {}
    for name, tensor in state.items():
        problem = None
        if not isinstance(tensor, torch.Tensor):
            problem = f"expected a tensor, got {type(tensor).__name__}"
        elif nn.parameter.is_lazy(tensor):
            problem = "not initialised yet; run one batch through the model first"
        elif tensor.is_meta:
            problem = "on the meta device, which holds no values; materialise the model first"
        elif tensor.is_quantized or tensor.layout != torch.strided:
            problem = f"expected a dense tensor, got {tensor.dtype} with layout {tensor.layout}"
        if problem:
            raise WeightsError(f"{name}: {problem}")
        entries[name] = tensor.detach()
    return entries


def _without_wrapper(model: nn.Module) -> nn.Module:
    """Return the user's model, without the wrapper that averages its gradients over ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    return array_checks.numpy_dtype(str(tensor.dtype).removeprefix("torch."))


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
        # numpy copies in one thread. torch would use all of its threads. In a measurement with ResNet-18,
        # that was no faster on an idle machine, and 5 to 10 times slower on a busy machine.
        return np.array(tensor.numpy(), order="C", copy=True)
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    copied = tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    array: NDArray[Any] = copied.numpy()
    return array


def _to_tensor(value: object, tensor: torch.Tensor, dtype: np.dtype[Any]) -> torch.Tensor:
    """Return ``value`` as a CPU tensor for the entry ``tensor``, without a copy if possible."""
    return from_numpy(array_checks.fitted(value, tuple(tensor.shape), dtype))


# Models with parameters that are sharded over ranks (FSDP). Sources: "torch.distributed.fsdp.fully_shard" and
# "Distributed Checkpoint" in PyTorch's documentation.


def is_sharded(model: nn.Module) -> bool:
    """Return True if a model's parameters are sharded over ranks."""
    # The parameters do not show this reliably: after an evaluation, the parameters of the outermost module
    # are still whole.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def _full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole ``state_dict`` of a sharded model, on the CPU. All ranks must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def _load_full_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load each rank's part of a ``state_dict`` that at least rank 0 has. All ranks must call this."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state), options=options)
