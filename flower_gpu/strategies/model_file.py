"""The final model of a run: a file of safetensors, and the SHA-256 of its content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from functools import partial
from logging import WARNING
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import Parameters, parameters_to_ndarrays
from flwr.common.logger import log
from numpy.typing import NDArray

from flower_gpu import files
from flower_gpu.apps.folder import RunFolder
from flower_gpu.strategies.resuming.states import disk_error

#: Names of the format for NumPy's.
_TYPES: Final = {
    **{"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_NOT_A_NAME: Final = "__metadata__"  # entry in the header of such a file that is not an array
_ALIGNMENT: Final = 8
_NOT_WRITTEN: Final = (
    "The final model is not written. Free space; the checkpoint, if there is one, has the model of the last "
    "finished round, and --resume goes on from it"
)

_Arrays = dict[str, Callable[[], NDArray[Any]]]


def write_model(model: ArrayRecord | Parameters | None, folder: RunFolder) -> str | None:
    """Write a model, replacing an earlier file; return the file's name, or None if no model is written.

    The arrays of ``Parameters`` are called ``"0"``, ``"1"`` and so on. A model with arrays that the format
    does not know is not written, which a warning says.
    Raises FlowerGPUError if the disk is full or cannot be written to.
    """
    arrays = _arrays(model)
    if not arrays:
        return None
    headers = {name: ((array := read()).dtype, array.shape, array.nbytes) for name, read in arrays.items()}
    for name, (dtype, *_) in headers.items():
        if name == _NOT_A_NAME or dtype.name not in _TYPES:
            text = "The final model is not written: a file of safetensors cannot hold %r, of type %s"
            log(WARNING, text, name, dtype)
            folder.model.unlink(missing_ok=True)  # of the same run before it was resumed
            return None
    header: dict[str, Any] = {}
    size = 0
    for name in sorted(headers, key=lambda name: -headers[name][0].itemsize):  # so that each array is aligned
        dtype, shape, nbytes = headers[name]
        header[name] = {"dtype": _TYPES[dtype.name], "shape": shape, "data_offsets": [size, size + nbytes]}
        size += nbytes
    head = json.dumps(header).encode()
    head = head.ljust(math.ceil(len(head) / _ALIGNMENT) * _ALIGNMENT)
    try:
        with files.replaced(folder.model, has_one_writer=True) as new, new.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in header:
                file.write(_bytes(arrays[name]()))
    except OSError as error:
        raise disk_error(error, folder.path, size, _NOT_WRITTEN) from error
    return folder.model.name


def model_sha256(model: ArrayRecord | Parameters | None) -> str | None:
    """Return the SHA-256 of a model as 64 hexadecimal digits, or None if it has no arrays.

    Of each array, in the order of the names, a line with name, type and shape, and then its elements in C
    order, little-endian. docs/reference/result.md has the same for a file with a model.
    """
    arrays = _arrays(model)
    if not arrays:
        return None
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]()
        dtype = array.dtype.newbyteorder("<")
        digest.update(f"{name} {dtype.str} {array.shape}\n".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: NDArray[Any]) -> bytes:
    """Return an array's elements in C order, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _arrays(model: ArrayRecord | Parameters | None) -> _Arrays:
    """Return a function for each array that reads it, so that not all arrays are in memory twice."""
    if model is None:
        return {}
    if isinstance(model, Parameters):
        if model.tensor_type != "numpy.ndarray":
            # Bytes in a framework's own format are kept unchanged.
            raw_arrays = [np.frombuffer(tensor, np.uint8) for tensor in model.tensors]
        else:
            raw_arrays = parameters_to_ndarrays(model)
        return {str(number): partial(np.asarray, array) for number, array in enumerate(raw_arrays)}
    return {name: array.numpy for name, array in model.items()}
