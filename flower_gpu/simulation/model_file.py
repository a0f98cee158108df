"""Writes a global model to a file that needs no pickle to be read."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import Parameters, parameters_to_ndarrays
from numpy.typing import NDArray

from flower_gpu import files
from flower_gpu.simulation.record_files import disk_error

SAFETENSORS: Final = "model.safetensors"
NPZ: Final = "model.npz"

#: The types that every version of safetensors can write from NumPy.
_TYPES: Final = frozenset(
    {"bool", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_NOT_A_NAME: Final = "__metadata__"  # what the header of a safetensors file has beside the arrays

_NOT_WRITTEN: Final = (
    "The final model is not written. Free space; flower_gpu's FedAvg leaves the model of the last finished "
    "round in the checkpoint, from which --resume goes on"
)
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")  # how safetensors, written in Rust, tells of one

_Arrays = dict[str, Callable[[], NDArray[Any]]]


def write_model(model: ArrayRecord | Parameters | None, folder: Path) -> Path | None:
    """Write a model: with safetensors if that is installed and knows all the types, else as ``.npz``.

    Parameters
    ----------
    model : ArrayRecord, Parameters or None
        The arrays of ``Parameters`` are called ``"0"``, ``"1"`` and so on.
    folder : Path
        Where the file goes. A model that is there already is replaced, in one step.

    Returns
    -------
    Path or None
        The file; None if there are no arrays.

    Raises
    ------
    FlowerGPUError
        If the disk is full or cannot be written to.
    """
    arrays = _arrays(model)
    if not arrays:
        return None
    path = folder / SAFETENSORS
    try:
        if not _write(path, arrays, _write_safetensors):
            path = folder / NPZ
            _write(path, arrays, _write_npz)
    except OSError as error:
        size = sum(np.asarray(read()).nbytes for read in arrays.values())
        raise disk_error(error, folder, size, _NOT_WRITTEN) from error
    for other in {SAFETENSORS, NPZ} - {path.name}:
        (folder / other).unlink(missing_ok=True)  # of the same run before it was resumed
    return path


def _arrays(model: ArrayRecord | Parameters | None) -> _Arrays:
    if model is None:
        return {}
    if isinstance(model, Parameters):
        if model.tensor_type != "numpy.ndarray":
            # Bytes of some framework's own: kept as they are.
            found = [np.frombuffer(tensor, np.uint8) for tensor in model.tensors]
        else:
            found = parameters_to_ndarrays(model)
        return {str(number): partial(np.asarray, array) for number, array in enumerate(found)}
    return {name: array.numpy for name, array in model.items()}


def _write(path: Path, arrays: _Arrays, write: Callable[[Path, _Arrays], bool]) -> bool:
    with files.replaced(path, has_one_writer=True) as new:
        is_written = write(new, arrays)
        if not is_written:
            new.unlink()  # the file of before stays
    return is_written


def _write_safetensors(path: Path, arrays: _Arrays) -> bool:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError:
        return False
    found = {name: read() for name, read in arrays.items()}
    if _NOT_A_NAME in found or any(array.dtype.name not in _TYPES for array in found.values()):
        return False
    # It writes what lies in memory, whatever the order of the elements.
    try:
        save_file({name: np.require(array, requirements="C") for name, array in found.items()}, path)
    except SafetensorError as error:
        if code := _OS_ERROR.search(str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), path) from error
        raise
    return True


def _write_npz(path: Path, arrays: _Arrays) -> bool:
    # As numpy.savez, which cannot take a name such as "file", and would have all arrays in memory.
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, read in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(read()), allow_pickle=False)
    return True
