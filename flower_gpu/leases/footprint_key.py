"""What a footprint is known by: the task, its weights, the model of GPU, and sizes in the user's config."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

# What is in the name of a setting that is about memory; short ones as whole words, since "silent" has "len".
_PARTS = "batch|size|seq|length|image|resol|layer|width|height|hidden|depth|channel|token|patch"
_SIZE = re.compile(rf"{_PARTS}|(?<![a-z])(?:len|dims?|img|bs)(?![a-z])")
_PRECISION = re.compile(r"precision|dtype|(?<![a-z])(?:amp|bf16|fp16)(?![a-z0-9])")
_NUMBERS = re.compile(r"\d{1,9}(?:[x,* ]{1,3}\d{1,9}){0,3}", re.ASCII)
_LONGEST_TEXT = 64

# How dtypes are shown; others by their name.
_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class Array(Protocol):
    """What has a shape and a dtype: numpy arrays, tensors, Flower's arrays."""

    @property
    def shape(self) -> Sequence[int]:
        """Its lengths."""

    @property
    def dtype(self) -> Any:
        """Its element type."""


@dataclass(frozen=True)
class Key:
    """What a footprint is of: calls with the same key are taken to need the same memory."""

    task: str  # name of the function that runs
    weights: str  # number, dtype and digest of the weights: ``"11.2M parameters f32 ab12cd34"``
    gpu: str  # model of the GPU
    sizes: tuple[tuple[str, int | str], ...] = ()  # what of the user's config is about sizes, sorted by name


def key_of(task: str, arrays: Sequence[Array], settings: Mapping[str, Any], gpu: str) -> Key:
    """Return the key of a call.

    Parameters
    ----------
    task : str
        Name of the function that runs.
    arrays : sequence of arrays
        The weights; only their shapes and dtypes are looked at, in their order.
    settings : mapping
        The user's config of the call, see :func:`sizes_of`.
    gpu : str
        Model of the GPU.
    """
    return Key(task, _describe(arrays), gpu, sizes_of(settings))


def sizes_of(settings: Mapping[str, Any]) -> tuple[tuple[str, int | str], ...]:
    """Return what of a config decides how much memory a call takes, sorted by name.

    Taken are settings whose name speaks of a size (batch, size, seq, length, image, resolution, layer, width,
    height, hidden, depth, channel, token, patch, len, dim, img, bs) and whose value is a whole number, or
    numbers as a text such as ``"224x224"``; and those whose name speaks of a precision (precision, dtype,
    amp, bf16, fp16) and whose value is a bool or a text up to 64 characters. Fractions are left out: these
    are rates, and one that changes from round to round would make each round the first.
    """
    found: dict[str, int | str] = {}
    for name, value in settings.items():
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # imageSize
        if _PRECISION.search(text) and isinstance(value, bool | str) and len(str(value)) <= _LONGEST_TEXT:
            found[name] = str(value)
        elif _SIZE.search(text) and isinstance(value, Integral) and not isinstance(value, bool):
            found[name] = int(value)
        elif _SIZE.search(text) and isinstance(value, str) and _NUMBERS.fullmatch(value):
            found[name] = value
    return tuple(sorted(found.items()))


def _describe(arrays: Sequence[Array]) -> str:
    count: dict[str, int] = {}
    digest = hashlib.sha256()
    for array in arrays:
        dtype = str(array.dtype).removeprefix("torch.")
        shape = tuple(int(length) for length in array.shape)
        count[dtype] = count.get(dtype, 0) + math.prod(shape)
        digest.update(f"{dtype}{shape}".encode())
    if not count:
        return "no weights"
    most = max(count, key=lambda dtype: count[dtype])
    return f"{_shortened(sum(count.values()))} parameters {_SHORT.get(most, most)} {digest.hexdigest()[:8]}"


def _shortened(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
