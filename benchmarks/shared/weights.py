"""Weights in the shapes of a model, and a check of returned weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Weights = list[NDArray[np.float32]]

MB = 1_000_000
SMALLEST_MB = 0.05

_BLOCKS_PER_STAGE = 5
_CHANNELS = (64, 128, 256, 512)
_PATTERN = 997  # Period of the values. It is prime, so that no shape hides a shift.
_CHUNK = (
    _PATTERN * 256
)  # Elements compared at a time, so that the check does not raise the caller's peak memory.


def make(size_mb: float) -> Weights:
    """Return 60 float32 arrays with a total of ``size_mb``, in the proportions of a ResNet."""
    return [np.resize(_values(index), shape) for index, shape in enumerate(_shapes(size_mb))]


def check(weights: Weights, size_mb: float, added: int) -> None:
    """Raise ValueError unless ``weights`` are the values of :func:`make` plus ``added``."""
    if [array.shape for array in weights] != _shapes(size_mb):
        raise ValueError("the shapes of the arrays have changed")
    for index, array in enumerate(weights):
        if array.dtype != np.float32:
            raise ValueError(f"array {index} came back as {array.dtype}")
        expected = np.resize(_values(index) + np.float32(added), _CHUNK)
        flat = array.reshape(-1)
        for begin in range(0, flat.size, _CHUNK):
            chunk = flat[begin : begin + _CHUNK]
            if not np.array_equal(chunk, expected[: chunk.size]):
                raise ValueError(f"array {index} has wrong values from element {begin} on")


def _values(index: int) -> NDArray[np.float32]:
    return np.arange(_PATTERN, dtype=np.float32) + np.float32(index)


def _shapes(size_mb: float) -> list[tuple[int, ...]]:
    """Return the shapes: each block has a large array and two arrays with one value per channel.

    From stage to stage, the large array grows by a factor of four.
    """
    channels = [count for count in _CHANNELS for _ in range(_BLOCKS_PER_STAGE)]
    large = int(size_mb * MB) // 4 - 2 * sum(channels)
    all_squares = sum(count * count for count in channels)
    shapes: list[tuple[int, ...]] = []
    for count in channels:
        shapes += [(count, max(1, round(large * count / all_squares))), (count,), (count,)]
    return shapes
