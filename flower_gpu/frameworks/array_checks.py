"""Whether numpy arrays fit the weights of a model, of any framework.

numpy has no bfloat16, so such weights travel as float32, which loses nothing. Strategies average integers and
booleans into floats; those are rounded on the way in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flower_gpu.errors import WeightsError

_HANDFUL: Final = 5  # entries a message names before it says "and n more"

_SAME: Final = frozenset(
    {"float64", "float32", "float16", "complex128", "complex64", "bool"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype in which weights of a dtype of this name travel.

    Raises WeightsError if numpy has none that holds its values.
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
    """Return ``weights`` if it is a list of one array for each name.

    Raises WeightsError if it is not.
    """
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise WeightsError(f"expected a list of {len(names)} numpy arrays, got {type(weights).__name__}")
    if len(weights) != len(names):
        raise WeightsError(f"expected {len(names)} arrays ({few(names)}), got {len(weights)}{hint}")
    return weights


def each(names: Iterable[str], convert: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """Convert everything, or raise one error that names each entry that cannot be.

    Raises WeightsError if ``convert`` raised it for one of them.
    """
    done, problems = [], []
    for name, *values in zip(names, *columns, strict=True):
        try:
            done.append(convert(*values))
        except WeightsError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise WeightsError(few(problems, separator="\n"))
    return done


def fitted(value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``value`` as an array of this shape and dtype, which may be ``value`` itself.

    Two differences of dtype are taken, because averaging makes them: floats for integers or booleans, which
    are rounded to the nearest one (halves to the even one), and 0-d float64 for a smaller float (numpy before
    2.0 promotes 0-d arrays).

    Raises WeightsError if it does not fit; the message says what was expected and what came.
    """
    expected = f"expected shape {shape} {dtype}"
    if not isinstance(value, np.ndarray | np.generic):
        raise WeightsError(f"{expected}, got {type(value).__name__}, not a numpy array")
    array: NDArray[Any] = np.asarray(value)  # arithmetic on 0-d arrays makes numpy scalars
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
    with np.errstate(over="ignore"):  # as in frameworks: what is too large becomes infinite
        return array.astype(dtype, copy=False)


def _round(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    with np.errstate(all="ignore"):  # what is out of range is refused below
        rounded = np.rint(np.asarray(array, dtype=np.float64))
    # high + 1 is a power of two, so exact as a float; high of a 64-bit integer is not. NaN fails.
    fits = (rounded >= float(low)) & (rounded < float(high + 1))
    if not fits.all():
        raise WeightsError(
            f"expected {dtype} ({low} to {high}), got {array.dtype} with the value {array[~fits].flat[0]}"
        )
    return np.asarray(rounded).astype(dtype)


def few(texts: Iterable[str], separator: str = ", ") -> str:
    """Join the first handful and count the rest."""
    listed = list(texts)
    rest = len(listed) - _HANDFUL
    return separator.join(listed[:_HANDFUL]) + (f" and {rest} more" if rest > 0 else "")
