"""The torch device of this process, and functions that move objects to it and convert them back."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flower_gpu.errors import ConfigError

T = TypeVar("T")

_NUMBERS: Final = "biufc"  # kinds of numpy dtypes that torch also has


def device() -> torch.device:
    """Return the torch device on which to train and evaluate in this process.

    Returns
    -------
    torch.device
        ``cuda:0`` if CUDA works in this process, otherwise ``cpu``. In a worker the leased GPU is the first
        GPU, so code with a literal ``cuda:0`` means the same device.
    """
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def to_device(thing: T, device: torch.device | str | int | None = None) -> T:
    """Return a model, a batch or any nested structure of tensors on a device.

    Parameters
    ----------
    thing : object
        - Module: moved in place, as by ``module.to``.
        - Tensor: a leaf that requires a gradient stays such a leaf. Any other tensor keeps its history.
        - numpy array of numbers or booleans: becomes a tensor. On the CPU it shares the array's memory if the
          array is writable.
        - Mapping, list, tuple or named tuple: a new container of the same type with its contents moved.
        - Object with a ``to`` method that takes a device (a tokenizer's ``BatchEncoding``, a
          ``PackedSequence``, a graph): the result of that method.
        - Anything else, such as None, numbers and strings: returned unchanged.
    device : torch.device, str or int, optional
        Target device. Default: :func:`device`.

    Returns
    -------
    object
        The same kind of object on the device. Copies from pinned memory to a GPU are asynchronous. Later work
        on the GPU waits for them, but code on the CPU does not. So do not overwrite the source at once.

    Raises
    ------
    ConfigError
        If this process does not have the device, or if a tensor is on the meta device and so has no values.
    """
    return cast(T, _mapped(partial(_tensor_on, _checked(device)), thing))


def to_numpy(thing: Any) -> Any:
    """Return results with each tensor converted to a numpy array.

    Parameters
    ----------
    thing : object
        A tensor, or a nested structure of tensors as for :func:`to_device`.

    Returns
    -------
    object
        The same structure with arrays. The array of a tensor on the CPU shares its memory, so it changes with
        the tensor. Other arrays are copies. bfloat16 becomes float32, because numpy has no bfloat16.
        Read-only mappings become dicts.

    Raises
    ------
    ConfigError
        If a tensor has no numpy counterpart (sparse, quantised, float8, meta). Also for a module: use
        :func:`flower_gpu.pytorch.weights.get_weights` instead.
    """
    return _mapped(_back, thing)


def _mapped(convert: Callable[[Any], Any], thing: Any) -> Any:
    """Return the converted object. If ``convert`` returns NotImplemented, convert the object's contents."""
    if (converted := convert(thing)) is not NotImplemented:
        return converted
    if isinstance(thing, MutableMapping):
        # A copy keeps the attributes of a subclass, such as the factory of a defaultdict.
        converted = copy.copy(thing)
        for key in thing:
            converted[key] = _mapped(convert, thing[key])
        return converted
    if isinstance(thing, Mapping):
        return {key: _mapped(convert, thing[key]) for key in thing}
    if isinstance(thing, list | tuple):
        items = [_mapped(convert, item) for item in thing]
        return thing._make(items) if hasattr(thing, "_make") else type(thing)(items)
    return thing


def _tensor_on(target: torch.device, thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return _moved(thing, target)
    if isinstance(thing, nn.Module):
        try:
            return thing.to(target)
        except NotImplementedError as error:
            raise _no_values(type(thing).__name__) from error
    if isinstance(thing, np.ndarray) and thing.dtype.kind in _NUMBERS:
        return _moved(_tensor(thing), target)
    return thing.to(target) if _takes_device(thing) else NotImplemented


def _back(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return _array(thing)
    if isinstance(thing, nn.Module):
        raise ConfigError(
            f"{type(thing).__name__} cannot become a numpy array: flower_gpu.pytorch.weights.get_weights "
            "returns a model's weights"
        )
    return NotImplemented


def _checked(device: torch.device | str | int | None) -> torch.device:
    """Return the device; raises ConfigError if this process cannot use it."""
    if device is None:
        return globals()["device"]()  # type: ignore[no-any-return]
    try:
        if isinstance(device, bool):
            raise TypeError("a truth value")
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} is not a device: use 'cpu' or 'cuda', or leave it out") from error
    try:
        torch.empty(0, device=target)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Quote only the first sentence, because the full text has pages about other devices.
        reason = re.split(r"\. |\n", str(error))[0]
        raise ConfigError(
            f"device {str(target)!r} cannot be used here ({reason}). This process sees "
            f"{torch.cuda.device_count()} GPUs; leave the device out to use the one that it was given, or "
            "the CPU if there is no GPU"
        ) from error
    return target


def _is_on(tensor: torch.Tensor, target: torch.device) -> bool:
    if tensor.device.type != target.type:
        return False
    if target.index is None and target.type == "cuda":
        return tensor.device.index == torch.cuda.current_device()
    return target.index is None or tensor.device == target


def _moved(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    if _is_on(tensor, target):
        return tensor
    if tensor.is_meta:
        raise _no_values("a tensor")
    # Copies to the CPU are never asynchronous, because the CPU would read memory before the values arrive.
    is_asynchronous = (
        target.type == "cuda"
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_pinned()
    )
    if not (tensor.is_leaf and tensor.requires_grad):
        return tensor.to(target, non_blocking=is_asynchronous)
    moved = tensor.detach().to(target, non_blocking=is_asynchronous)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved)
    return moved.requires_grad_()


def _no_values(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is on the meta device, which holds no values: make it with values first, for a module with "
        "module.to_empty(device=...) and its weights loaded after that"
    )


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return from_numpy(array)
    except TypeError as error:  # such as longdouble
        raise ConfigError(
            f"torch has no counterpart of a numpy array of {array.dtype}; convert it with .astype('float64')"
        ) from error


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    problem = None
    if tensor.is_meta:
        problem = "it is on the meta device and has no values"
    elif tensor.is_quantized or tensor.layout != torch.strided:
        problem = f"its layout is {tensor.layout}, its type {tensor.dtype}; make it dense first"
    if problem is None:
        plain = tensor.detach()
        if plain.dtype == torch.bfloat16:
            plain = plain.to(torch.float32)  # represents every bfloat16 exactly
        try:
            array: NDArray[Any] = plain.to("cpu").resolve_conj().resolve_neg().numpy()
            return array
        except TypeError:
            problem = f"numpy has nothing like {tensor.dtype}; convert it, for instance with .float()"
    raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} cannot become a numpy array: {problem}")


def from_numpy(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares an array's memory, or has a copy if PyTorch cannot use that memory."""
    # torch warns about read-only memory. It refuses strides that are negative or not a multiple of the item
    # size. It does not check the address, and crashes on unaligned complex numbers.
    address = array.__array_interface__["data"][0]
    needs_copy = any(step < 0 or step % array.itemsize for step in (address, *array.strides))
    return torch.from_numpy(array.copy() if needs_copy or not array.flags.writeable else array)


def _takes_device(thing: Any) -> bool:
    """Return True if an object has a ``to`` method for devices. Units and dates may have another ``to``."""
    method = getattr(type(thing), "to", None)
    if not callable(method):
        return False
    if type(thing).__module__.partition(".")[0] == "torch":
        return True
    try:
        return "device" in inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
