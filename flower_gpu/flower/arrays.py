"""Transfer of Flower's ``Array`` between caller and worker without copies to and from ``.npy`` format.

Flower keeps the bytes of a ``.npy`` file in each ``Array``. These bytes are sent unchanged, outside the
pickle, and only once for all workers of a round. The receiver gets an ``Array`` that reads the bytes in
place.

Importing this module is enough for ``Array`` and for objects that contain arrays (``ArrayRecord``,
``RecordDict``, ``Context``). The worker imports it with the first array that it receives.
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

# Largest header of a .npy file that is read. Only record types with very many fields have a longer header.
_HEADER_BYTES = 4096
# Size of the header of most arrays.
_USUAL_BYTES = 128


class Array(FlowerArray):
    """An ``Array`` that came from another process.

    It behaves like Flower's, except that :attr:`data` is created on the first access, and :meth:`numpy` need
    not copy the bytes. A pickle or a copy of it is a plain Flower ``Array``.
    """

    # The class must be called Array, because Flower makes the class name part of the object id.

    def __eq__(self, other: object) -> bool:
        # The __eq__ of a dataclass requires the same class.
        if not isinstance(other, FlowerArray):
            return NotImplemented
        return _fields(self) == _fields(other)

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        region = self.__dict__.get("_region")
        if name != "data" or region is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        data = bytes(region.memory)
        self.__dict__["data"] = data  # bypasses __setattr__, because the content has not changed
        return data

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            self.__dict__.pop("_region", None)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain(self)

    def numpy(self) -> NDArray[Any]:
        """Return a NumPy array that shares no memory with this one. The first call need not copy."""
        region = self.__dict__.get("_region")
        array = _read_npy(region) if region is not None and self.stype == SType.NUMPY else None
        return super().numpy() if array is None else array


def _fields(array: FlowerArray) -> tuple[str, tuple[int, ...], str, bytes]:
    return array.dtype, tuple(array.shape), array.stype, array.data


def _plain(array: FlowerArray) -> tuple[Any, ...]:
    # Flower's cache of object id and chunks is left out, because its chunks are views and cannot be pickled.
    state = dict(zip(("dtype", "shape", "stype", "data"), _fields(array), strict=True))
    return object.__new__, (FlowerArray,), state


def view_of(array: FlowerArray) -> NDArray[Any]:
    """Return an array's values for numpy to read, without a copy. The kernels of torch may crash on them."""
    if array.stype == SType.NUMPY:
        region: Region | None = array.__dict__.get("_region")
        memory = memoryview(array.data) if region is None else region.memory.toreadonly()
        layout = _layout(memory)
        if layout is not None:
            return _array_in(memory, *layout)
    return array.numpy()


def size_bytes(array: FlowerArray) -> int:
    """Return the size of an array in memory in bytes, without copying it."""
    region: Region | None = array.__dict__.get("_region")
    return len(array.data) if region is None else region.memory.nbytes


def _read_npy(region: Region) -> NDArray[Any] | None:
    """Return the array of a ``.npy`` file, or None if numpy itself has to read the file."""
    layout = _layout(region.memory)
    if layout is None:
        return None
    mapped = region.take()
    if mapped is None:
        return _array_in(region.memory, *layout).copy(order="K")
    return aligned(_array_in(mapped, *layout))


def _array_in(
    memory: memoryview, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any, start: int
) -> NDArray[Any]:
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, start, order=order)
    return array


def _layout(file: memoryview) -> tuple[tuple[int, ...], np.dtype[Any], Any, int] | None:
    """Return shape, dtype, order and offset of the array in a ``.npy`` file, or None."""
    header = bytes(file[:_USUAL_BYTES])
    if header.find(b"\n") != _USUAL_BYTES - 1:
        header = bytes(file[:_HEADER_BYTES]).partition(b"\n")[0] + b"\n"
    layout = _header(header)
    if layout is None:
        return None
    shape, dtype, _, start = layout
    size = dtype.itemsize
    for length in shape:
        size *= length
    return None if dtype.hasobject or start + size != file.nbytes else layout


# Cached because each reply has the arrays of the same model.
@lru_cache(maxsize=1024)
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
    except ValueError:  # numpy's own reader raises a better error
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
