"""How numpy arrays travel beside the pickle. Only functions import numpy: many tasks do without."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from flower_gpu.errors import WorkerError
from flower_gpu.workers.transport.regions import SMALL_BYTES, Parts, Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIMPLE = "biufc"  # numpy's own pickles of dates forget byte order and read-only
_ALIGNMENT = 16  # torch's kernels crash on less, for complex128


def reduce_array(array: NDArray[Any], parts: Parts) -> Any:
    """Return what rebuilds ``array``, with its bytes beside the pickle if they are many.

    Raises TypeError if it is an array of Python objects, and not part of something else, such as a data
    frame.
    """
    import numpy as np

    if array.dtype.hasobject:
        path = parts.path_to(array) if array.dtype.kind in "OV" else None  # "T": text of any length
        if path is not None:
            raise TypeError(
                f"{path} is an array of objects (dtype {array.dtype}, shape {array.shape}); "
                "convert it to a numeric dtype, or make it a list"
            )
        return array.__reduce_ex__(5)
    writeable = array.flags.writeable
    if not writeable and 0 in array.strides and array.size > 0:
        # np.broadcast_to: one row that looks like a million
        once = array[tuple(slice(1) if step == 0 else slice(None) for step in array.strides)]
        if once.size < array.size:
            return np.broadcast_to, (once, array.shape)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy(order="C")
        array.flags.writeable = writeable
    small = array.nbytes < SMALL_BYTES
    if array.dtype.itemsize == 0 or (small and array.dtype.kind in _SIMPLE):
        return array.__reduce_ex__(5)
    order: Any = "C" if array.flags.c_contiguous else "F"
    raw = array.reshape(-1, order=order).view(np.uint8)  # dates have no buffer of their own
    where = (
        PickleBuffer(raw.data) if small else parts.add(raw.data, address=raw.__array_interface__["data"][0])
    )
    return build, (where, array.dtype, array.shape, order, writeable)


def build(
    found: Region | bytes | bytearray, dtype: Any, shape: tuple[int, ...], order: Any, writeable: bool
) -> Any:
    """Return the array with these bytes, without copying them.

    Raises WorkerError if these are not that many.
    """
    import numpy as np

    memory = found.memory if isinstance(found, Region) else memoryview(found)
    if not writeable:
        memory = memory.toreadonly()
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != memory.nbytes:
        raise WorkerError(f"{memory.nbytes} bytes arrived for an array of shape {shape} and type {dtype}")
    return aligned(np.ndarray(shape, dtype, memory, order=order))


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself, or a copy if it lies where torch's kernels may crash."""
    if array.__array_interface__["data"][0] % _ALIGNMENT == 0:
        return array
    copy = array.copy(order="K")
    copy.flags.writeable = array.flags.writeable
    return copy
