"""Checks that numpy arrays fit the weights of a model of any framework.

numpy has no bfloat16, so such weights travel as float32, without loss. Strategies average integers and
booleans into floats, which are rounded when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flower_gpu.errors import WeightsError

_HANDFUL: Final = 5  # number of entries named in a message, before "and n more"

_SAME: Final = frozenset(
    {"float64", "float32", "float16", "complex128", "complex64", "bool"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for weights of the dtype with this name.

    Raises WeightsError if numpy has no dtype for its values.
    """
    if name == "bfloat16":
        return np.dtype(np.float32)
    if name not in _SAME:
        raise WeightsError(f"{name} has no numpy counterpart; convert it, for instance to bfloat16")
    return np.dtype(name)


def to_numpy(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a copy of an array on the host, C-contiguous."""
    return np.array(np.asarray(value), dtype=dtype, order="C", copy=True)


def check_count(weights: object, names: Sequence[str], hint: str = "") -> Sequence[Any]:
    """Return ``weights`` if it is a list with one array for each name.

    Raises WeightsError otherwise.
    """
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise WeightsError(f"expected a list of {len(names)} numpy arrays, got {type(weights).__name__}")
    if len(weights) != len(names):
        raise WeightsError(f"expected {len(names)} arrays ({few(names)}), got {len(weights)}{hint}")
    return weights


def convert_each(names: Iterable[str], convert: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """Return all converted entries.

    Raises a WeightsError with all failed entries if ``convert`` raised one.
    """
    converted, problems = [], []
    for name, *values in zip(names, *columns, strict=True):
        try:
            converted.append(convert(*values))
        except WeightsError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise WeightsError(few(problems, separator="\n"))
    return converted


def fitted(value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``value`` as an array of this shape and dtype, which may be ``value`` itself.

    Averaging causes two differences of dtype, which are accepted: floats in the place of integers or booleans
    are rounded (halves to even), and a 0-d float64 in the place of a smaller float is converted (numpy before
    2.0 promotes 0-d arrays).

    Raises WeightsError if the value does not fit. The message gives the expected and the actual shape and
    dtype.
    """
    expected = f"expected shape {shape} {dtype}"
    if not isinstance(value, np.ndarray | np.generic):
        raise WeightsError(f"{expected}, got {type(value).__name__}, not a numpy array")
    array: NDArray[Any] = np.asarray(value)  # arithmetic on 0-d arrays returns numpy scalars
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    got = f"got shape {array.shape} {array.dtype}"
    if array.shape != shape:
        raise WeightsError(f"{expected}, {got}")
    if dtype.kind in "iub" and array.dtype.kind == "f":
        return _round(array, dtype)
    if array.dtype != dtype and not (array.ndim == 0 and array.dtype == np.float64 and dtype.kind == "f"):
        hint = f"; convert it with .astype('{dtype}')" if array.dtype.kind in "biuf" else ""
        raise WeightsError(f"{expected}, {got}{hint}")
    with np.errstate(over="ignore"):  # too large values become infinite, as in frameworks
        return array.astype(dtype, copy=False)


def _round(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    with np.errstate(all="ignore"):  # values out of range are refused below
        rounded = np.rint(np.asarray(array, dtype=np.float64))
    # high + 1 is a power of two and so exact as a float, unlike high of a 64-bit integer. NaN compares False.
    fits = (rounded >= float(low)) & (rounded < float(high + 1))
    if not fits.all():
        raise WeightsError(
            f"expected {dtype} ({low} to {high}), got {array.dtype} with the value {array[~fits].flat[0]}"
        )
    return np.asarray(rounded).astype(dtype)


def few(texts: Iterable[str], separator: str = ", ") -> str:
    """Return the first few texts joined, and the number of the others."""
    listed = list(texts)
    rest = len(listed) - _HANDFUL
    return separator.join(listed[:_HANDFUL]) + (f" and {rest} more" if rest > 0 else "")
