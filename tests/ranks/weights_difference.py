"""The difference between two lists of weights."""

from __future__ import annotations

import numpy as np


def difference(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))
