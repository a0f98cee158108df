"""The torch device of this process, and what it takes to bring things there and back."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flower_gpu.errors import ConfigError

T = TypeVar("T")

_NUMBERS: Final = "biufc"  # kinds of numpy arrays that torch has, too


def device() -> torch.device:
    """Torch device to train and evaluate on in this process.

    Returns
    -------
    torch.device
        ``cuda:0`` if CUDA works here, else ``cpu``. A worker sees the GPU meant for it as its
        first, so code that says ``cuda:0`` itself means the same device.
    """
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def to_device(thing: T, device: torch.device | str | int | None = None) -> T:
    """Bring a model, a batch, an optimizer's state or any nest of tensors to a device.

    Parameters
    ----------
    thing : object
        - Module: moved in place, as by ``module.to``. Tensors that its parts share stay shared.
        - Optimizer: its state is moved in place to where its parameters are; the parameters move with
          their module, so move that first. ``step`` stays on the CPU unless the optimizer is fused or
          capturable: PyTorch wants it so.
        - Tensor: a leaf that requires a gradient becomes such a leaf; one with a history keeps it.
        - numpy array of numbers or booleans: becomes a tensor. It shares the array's memory on the CPU,
          if the array can be written to.
        - Mapping, list, tuple (named too), set, dataclass (frozen too): a new one of the same kind with its
          contents moved, or the same object where nothing had to be.
        - Object with a ``to`` method that takes a device (a tokenizer's ``BatchEncoding``, a
          ``PackedSequence``, a graph): what that returns.
        - Anything else, as None, numbers and strings: itself.
    device : torch.device, str or int, optional
        Where to. Default: :func:`device`.

    Returns
    -------
    object
        The same kind of thing on the device; ``thing`` itself if it is there already. An object that occurs
        several times in a nest is moved once and stays the same object. Copies from pinned memory do not
        wait for the GPU, which uses them in order; do not overwrite the source at once.

    Raises
    ------
    ConfigError
        If there is no such device in this process, if a tensor is on the meta device and so has no values,
        or if an optimizer's parameters are not on ``device``.
    """
    return cast(T, _Nest(_ToDevice(_checked(device), explicit=device is not None)).map(thing))


def to_numpy(thing: Any) -> Any:
    """Bring results back: every tensor in a nest becomes a numpy array.

    Parameters
    ----------
    thing : object
        A tensor, or a nest of tensors as for :func:`to_device`.

    Returns
    -------
    object
        The same nest with arrays. That of a tensor on the CPU shares its memory, so it changes with it;
        others are copies. bfloat16 becomes float32, as numpy has none. Read-only mappings become dicts.

    Raises
    ------
    ConfigError
        If a tensor has no numpy counterpart (sparse, quantised, float8, meta), or for a module: see
        :func:`flower_gpu.pytorch.weights.get_weights`.
    """
    return _Nest(_to_numpy).map(thing)


#: Handles one object: returns what it becomes, or :data:`_DESCEND` to look inside.
_Handle = Callable[[Any, "_Nest"], Any]
_DESCEND: Final = object()


class _Nest:
    """Applies a function to what is in a nest, once to each object."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle
        # With the source, so that its id is not given to another object meanwhile.
        self._done: dict[int, tuple[Any, Any]] = {}

    def map(self, thing: Any) -> Any:
        """Return what ``thing`` becomes: itself where nothing changes."""
        if id(thing) in self._done:
            return self._done[id(thing)][1]
        made = self._handle(thing, self)
        if made is _DESCEND:
            made = self._rebuilt(thing)
        self._done[id(thing)] = (thing, made)
        return made

    def _rebuilt(self, thing: Any) -> Any:
        if isinstance(thing, Mapping):
            return self._mapping(thing)
        if isinstance(thing, list | tuple | set | frozenset | deque):
            return self._sequence(thing)
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            return self._dataclass(thing)
        return thing

    def _mapping(self, thing: Mapping[Any, Any]) -> Any:
        changed = self._changed((key, thing[key]) for key in thing)
        if not changed:
            return thing
        if not isinstance(thing, MutableMapping):
            return {**thing, **changed}
        made = copy.copy(thing)  # keeps what a subclass has besides, as a defaultdict its factory
        for key, value in changed.items():
            made[key] = value
        return made

    def _sequence(self, thing: Any) -> Any:
        items = list(thing)
        made = [self.map(item) for item in items]
        if all(new is old for new, old in zip(made, items, strict=True)):
            return thing
        if hasattr(thing, "_make"):  # a named tuple
            return thing._make(made)
        if isinstance(thing, deque):
            return type(thing)(made, thing.maxlen)
        return type(thing)(made)

    def _dataclass(self, thing: Any) -> Any:
        names = [field.name for field in dataclasses.fields(thing) if hasattr(thing, field.name)]
        changed = self._changed((name, getattr(thing, name)) for name in names)
        if not changed:
            return thing
        made = copy.copy(thing)
        for name, value in changed.items():
            object.__setattr__(made, name, value)  # also where it is frozen
        return made

    def _changed(self, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        made = ((key, value, self.map(value)) for key, value in items)
        return {key: new for key, old, new in made if new is not old}


class _ToDevice:
    """Moves one object to a device."""

    def __init__(self, target: torch.device, *, explicit: bool) -> None:
        self._target = target
        self._explicit = explicit

    def __call__(self, thing: Any, nest: _Nest) -> Any:
        if isinstance(thing, torch.Tensor):
            return _moved(thing, self._target)
        if isinstance(thing, nn.Module):
            return self._module(thing)
        if isinstance(thing, torch.optim.Optimizer):
            return self._optimizer(thing)
        if isinstance(thing, np.ndarray) and thing.dtype.kind in _NUMBERS:
            return _moved(_tensor(thing), self._target)
        if _takes_device(thing):
            return thing.to(self._target)
        return _DESCEND

    def _module(self, module: nn.Module) -> nn.Module:
        shared = shared_tensors(module)
        try:
            module.to(self._target)
        except NotImplementedError as error:
            raise _no_values(type(module).__name__) from error
        # module.to puts a copy of its own into each place of a shared buffer; and of a shared parameter, too,
        # where it cannot give the present one other contents (meta).
        share_again(shared)
        return module

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self._explicit and not _is_on(parameter, self._target):
                    raise ConfigError(
                        f"the parameters of {type(optimizer).__name__} are on {parameter.device}, not on "
                        f"{self._target}: move the model there first, then its optimizer"
                    )
                if parameter in optimizer.state:
                    state = optimizer.state[parameter]
                    on_gpu = group.get("fused") or group.get("capturable")
                    for key, value in state.items():
                        to_cpu = key == "step" and not on_gpu
                        where = torch.device("cpu") if to_cpu else parameter.device
                        state[key] = _Nest(_ToDevice(where, explicit=True)).map(value)
        return optimizer


def _to_numpy(thing: Any, nest: _Nest) -> Any:
    if isinstance(thing, torch.Tensor):
        return _array(thing)
    if isinstance(thing, nn.Module | torch.optim.Optimizer):
        raise ConfigError(
            f"{type(thing).__name__} cannot become a numpy array: flower_gpu.pytorch.weights.get_weights "
            "returns a model's weights; of an optimizer pass its state_dict()"
        )
    return _DESCEND


def _checked(device: torch.device | str | int | None) -> torch.device:
    """Return the device, or raise if it cannot be used here."""
    if device is None:
        return globals()["device"]()  # type: ignore[no-any-return]
    try:
        if isinstance(device, bool):
            raise TypeError("a truth value")
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} is no device: use 'cpu' or 'cuda', or leave it out") from error
    try:
        torch.empty(0, device=target)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Its full text has pages on other devices.
        reason = re.split(r"\. |\n", str(error))[0]
        raise ConfigError(
            f"device {str(target)!r} cannot be used here ({reason}). This process sees "
            f"{torch.cuda.device_count()} GPUs; leave the device out to use the one that it was given, or "
            "the CPU where there is none"
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
    # To the GPU only: the CPU would read what has not arrived yet.
    at_once = (
        target.type == "cuda"
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_pinned()
    )
    if not (tensor.is_leaf and tensor.requires_grad):
        return tensor.to(target, non_blocking=at_once)
    moved = tensor.detach().to(target, non_blocking=at_once)
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
            plain = plain.to(torch.float32)  # holds every bfloat16
        try:
            array: NDArray[Any] = plain.to("cpu").resolve_conj().resolve_neg().numpy()
            return array
        except TypeError:
            problem = f"numpy has nothing like {tensor.dtype}; convert it, for instance with .float()"
    raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} cannot become a numpy array: {problem}")


def shared_tensors(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter and buffer that has more than one: where it is, by what name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for named in (part.named_parameters, part.named_buffers):
            for name, tensor in named(recurse=False, remove_duplicate=False):
                places.setdefault(id(tensor), []).append((part, name))
    return [found for found in places.values() if len(found) > 1]


def share_again(shared: list[list[tuple[nn.Module, str]]]) -> None:
    """Put one tensor into all places of each that was shared."""
    for (first, first_name), *others in shared:
        for part, name in others:
            setattr(part, name, getattr(first, first_name))


def from_numpy(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor in an array's memory, or in that of a copy where PyTorch cannot use it."""
    # torch warns about read-only memory, and refuses steps that are negative or not whole items. It does not
    # look at the address, and crashes on a complex number that is not where it expects.
    address = array.__array_interface__["data"][0]
    odd = any(step < 0 or step % array.itemsize for step in (address, *array.strides))
    return torch.from_numpy(array.copy() if odd or not array.flags.writeable else array)


def _takes_device(thing: Any) -> bool:
    """Tell whether an object has a ``to`` method for devices: units and dates may have another kind."""
    method = getattr(type(thing), "to", None)
    if not callable(method):
        return False
    if type(thing).__module__.partition(".")[0] == "torch":
        return True
    try:
        return "device" in inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
