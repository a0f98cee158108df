"""Conversion of a pytree of JAX arrays to numpy arrays and back.

Such a tree may have parameters, batch statistics or states of optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_gpu.errors import WeightsError
from flower_gpu.frameworks import array_checks


def get_weights(tree: Any) -> list[NDArray[Any]]:
    """Return a copy of the leaves of a pytree as numpy arrays.

    Parameters
    ----------
    tree : pytree
        A tree with JAX arrays on any device, numpy arrays or Python numbers as leaves.

    Returns
    -------
    list of numpy.ndarray
        A C-contiguous array for each leaf, in JAX's order; ``None`` is not a leaf. The arrays share no memory
        with the tree. bfloat16 becomes float32; all other dtypes and all shapes are kept.

    Raises
    ------
    WeightsError
        If a leaf has no numpy counterpart (a random key, float8, a string), was donated, lies on other hosts,
        or is a tracer; the message has its path.
    """
    paths, leaves, _ = _flattened(tree)
    array_checks.convert_each(paths, _check_values, leaves)  # all are checked before the first copy
    return array_checks.convert_each(paths, _to_numpy, leaves)


def set_weights(tree: Any, weights: Sequence[NDArray[Any]]) -> Any:
    """Return a pytree like ``tree`` with these arrays as its leaves; ``tree`` itself is unchanged.

    Parameters
    ----------
    tree : pytree
        The structure, shapes, dtypes and devices. Its values are not used, so the result of
        ``jax.eval_shape`` is sufficient.
    weights : sequence of numpy.ndarray
        An array for each leaf, in JAX's order, as from :func:`get_weights`.

    Returns
    -------
    pytree
        The same structure. JAX arrays are on the devices of the leaves of ``tree``. For numpy arrays and
        Python numbers in ``tree``, the new leaves are numpy arrays and Python numbers.

    Raises
    ------
    WeightsError
        If the number of arrays, a shape or a dtype differs from the tree's. Also if floats for integer or
        boolean leaves have a value that does not fit. The message has the leaf's path, the expected value and
        the actual value.

    Notes
    -----
    Two differences of dtype are accepted, because averages have them: see
    :func:`flower_gpu.frameworks.array_checks.fitted`.
    """
    import jax

    paths, leaves, structure = _flattened(tree)
    arrays = array_checks.check_count(weights, paths)
    labels = [f"{path}, array {i} of {len(paths)}" for i, path in enumerate(paths, start=1)]
    fitting = array_checks.convert_each(labels, _fitted, arrays, leaves)
    made = [_like(array, leaf) for array, leaf in zip(fitting, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, made)


def _flattened(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the paths of a tree's leaves, the leaves, and its structure."""
    import jax

    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    # If the tree is a single leaf, its path is empty.
    paths = [jax.tree_util.keystr(path) or "the tree" for path, _ in pairs]
    return paths, [leaf for _, leaf in pairs], structure


def _dtype(leaf: Any) -> np.dtype[Any]:
    """Return the dtype of a leaf's numpy array."""
    import jax

    if isinstance(leaf, bool | int | float | complex):
        return array_checks.numpy_dtype(np.asarray(leaf).dtype.name)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        raise WeightsError(f"expected an array or a number, got {type(leaf).__name__}")
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise WeightsError(
            "a random key is not a weight; keep it out of the tree, or give jax.random.key_data of it"
        )
    return array_checks.numpy_dtype(dtype.name)


def _check_values(leaf: Any) -> None:
    """Raise WeightsError if this process does not have the values of a leaf."""
    import jax

    if isinstance(leaf, jax.core.Tracer):
        raise WeightsError("a tracer has no values; call get_weights outside of jit, grad and vmap")
    _dtype(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise WeightsError("a shape has no values")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise WeightsError("its memory was donated or deleted; keep the function's result")
        if not leaf.is_fully_addressable:
            raise WeightsError("parts of it are on other hosts; gather it first")


def _to_numpy(leaf: Any) -> NDArray[Any]:
    return array_checks.to_numpy(leaf, _dtype(leaf))


def _fitted(array: object, leaf: Any) -> NDArray[Any]:
    return array_checks.fitted(array, np.shape(leaf), _dtype(leaf))


def _like(array: NDArray[Any], leaf: Any) -> Any:
    """Return an array as the leaf's type: a JAX array on the same devices, a numpy array or a number."""
    import jax

    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(array.item())
    values = array.astype(leaf.dtype)  # a copy, so that the tree does not share the caller's memory
    if isinstance(leaf, np.generic):
        return values[()]
    if isinstance(leaf, np.ndarray):
        return values
    return jax.device_put(values, getattr(leaf, "sharding", None))
