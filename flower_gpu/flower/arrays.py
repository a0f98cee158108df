"""Flower's ``Array`` between caller and worker, without the copies of packing it into ``.npy`` and out again.

Flower keeps the bytes of a ``.npy`` file in each ``Array``. They travel as they are: beside the pickle, and
once for all workers of a round. What arrives is an ``Array`` that reads them where they lie in memory.

Importing this module is enough for ``Array`` and all that holds one (``ArrayRecord``, ``RecordDict``,
``Context``); the worker imports it with the first one that it gets.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.common import Array as FlowerArray
from flwr.common.constant import SType
from numpy.typing import NDArray

from flower_gpu.workers.transport import regions
from flower_gpu.workers.transport.regions import SMALL_BYTES, Parts, Region, aligned

_HEADER_BYTES = 4096  # of a .npy file; it is longer for record types with very many fields only
_USUAL_BYTES = 128  # which end with the header's end, for most arrays


class Array(FlowerArray):
    """An ``Array`` that came from another process.

    It is Flower's in every way; only its bytes are made when somebody asks for :attr:`data`, and
    :meth:`numpy` need not copy them. Pickled or copied it becomes a plain one.
    """

    # Its name is part of its object id in Flower: the class must not be called otherwise.

    def __eq__(self, other: object) -> bool:
        # That of a dataclass wants the very same class.
        if not isinstance(other, FlowerArray):
            return NotImplemented
        return _fields(self) == _fields(other)

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        region = self.__dict__.get("_region")
        if name != "data" or region is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        data = bytes(region.memory)
        self.__dict__["data"] = data  # not as an attribute is set: nothing has changed
        return data

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            self.__dict__.pop("_region", None)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain(self)

    def numpy(self) -> NDArray[Any]:
        """Return the array as a NumPy array of its own; the first time without a copy."""
        region = self.__dict__.get("_region")
        found = _read_npy(region) if region is not None and self.stype == SType.NUMPY else None
        return super().numpy() if found is None else found


def _fields(array: FlowerArray) -> tuple[str, tuple[int, ...], str, bytes]:
    return array.dtype, tuple(array.shape), array.stype, array.data


def _plain(array: FlowerArray) -> tuple[Any, ...]:
    # Without Flower's own cache of object id and chunks: those are views, which cannot be pickled.
    state = dict(zip(("dtype", "shape", "stype", "data"), _fields(array), strict=True))
    return object.__new__, (FlowerArray,), state


def view_of(array: FlowerArray) -> NDArray[Any]:
    """Return an array's values for numpy to read, without a copy; torch's kernels may crash on them."""
    if array.stype == SType.NUMPY:
        region: Region | None = array.__dict__.get("_region")
        memory = memoryview(array.data) if region is None else region.memory.toreadonly()
        found = _described(memory)
        if found is not None:
            return _at(memory, *found)
    return array.numpy()


def size_bytes(array: FlowerArray) -> int:
    """Return how many bytes an array has in memory, without making a copy of them."""
    region: Region | None = array.__dict__.get("_region")
    return len(array.data) if region is None else region.memory.nbytes


def _read_npy(region: Region) -> NDArray[Any] | None:
    """Return the array of a ``.npy`` file, or None for the kinds that are left to numpy."""
    found = _described(region.memory)
    if found is None:
        return None
    mapped = region.take()
    if mapped is None:
        return _at(region.memory, *found).copy(order="K")
    return aligned(_at(mapped, *found))


def _at(
    memory: memoryview, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any, start: int
) -> NDArray[Any]:
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, start, order=order)
    return array


def _described(file: memoryview) -> tuple[tuple[int, ...], np.dtype[Any], Any, int] | None:
    """Return shape, type, order and first byte of the array in a ``.npy`` file."""
    header = bytes(file[:_USUAL_BYTES])
    if header.find(b"\n") != _USUAL_BYTES - 1:
        header = bytes(file[:_HEADER_BYTES]).partition(b"\n")[0] + b"\n"
    found = _header(header)
    if found is None:
        return None
    shape, dtype, _, start = found
    size = dtype.itemsize
    for length in shape:
        size *= length
    return None if dtype.hasobject or start + size != file.nbytes else found


@lru_cache(maxsize=1024)  # the arrays of a model come again with each reply
def _header(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any], Any, int] | None:
    file = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            return None
    except ValueError:  # numpy's own reader says it better
        return None
    return shape, dtype, "F" if is_fortran else "C", file.tell()


def _rebuild(dtype: str, shape: tuple[int, ...], stype: str, region: Region) -> Array:
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, _region=region)
    return array


def _reduce(array: FlowerArray, parts: Parts) -> Any:
    region = array.__dict__.get("_region")
    if region is not None:
        raw = np.frombuffer(region.memory, np.uint8)
        address = raw.__array_interface__["data"][0]
        handle = parts.add(region.memory, address=address, immutable=True)
    elif isinstance(array.data, bytes) and len(array.data) >= SMALL_BYTES:
        handle = parts.add(memoryview(array.data), immutable=True, shareable=array.data)
    else:
        return _plain(array)
    return _rebuild, (array.dtype, tuple(array.shape), array.stype, handle)


regions.register(FlowerArray, _reduce)
regions.register(Array, _reduce)
