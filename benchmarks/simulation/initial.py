"""Where training of the small network begins. No torch: the server needs none."""

from collections.abc import Sequence

import numpy as np

Weights = list[np.ndarray]

SHAPES = ((16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (10, 128), (10,))


def weights(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Weights:
    """Draw each layer's weights and biases from the same range, as PyTorch does."""
    random = np.random.default_rng(seed)
    found: Weights = []
    for kernel, bias in zip(shapes[::2], shapes[1::2], strict=True):
        bound = np.prod(kernel[1:]) ** -0.5
        found += [random.uniform(-bound, bound, shape).astype(np.float32) for shape in (kernel, bias)]
    return found
