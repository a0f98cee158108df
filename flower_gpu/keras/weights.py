"""Conversion of a Keras model's weights to numpy arrays and back.

It works with every backend of Keras 3 and with Keras 2, because it uses only attributes that all models have.
The arrays are ``model.weights``: trainable weights and other weights of the model, such as
BatchNormalization's moving averages. The states of seed generators (for example of Dropout) are not included:
they are random numbers of a process, and their average is meaningless. The optimizer's state is not included
either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_gpu.errors import WeightsError
from flower_gpu.frameworks import array_checks


def get_weights(model: Any) -> list[NDArray[Any]]:
    """Return a copy of a model's weights as numpy arrays.

    Parameters
    ----------
    model : keras.Model
        The model, built, on any device.

    Returns
    -------
    list of numpy.ndarray
        A C-contiguous array for each of ``model.weights``, in that order. A layer that is used twice counts
        once. bfloat16 becomes float32; all other dtypes and all shapes are kept.

    Raises
    ------
    WeightsError
        If the model is not built, or if weights have no numpy counterpart (float8, strings). The message
        names these weights.
    """
    variables = _variables(model)
    names = [_name(variable) for variable in variables]
    dtypes = array_checks.convert_each(names, _dtype, variables)  # all are checked before the first copy
    pairs = zip(variables, dtypes, strict=True)
    return [array_checks.to_numpy(variable.numpy(), dtype) for variable, dtype in pairs]


def set_weights(model: Any, weights: Sequence[NDArray[Any]]) -> None:
    """Load numpy arrays into a model.

    All arrays are checked before the first write, so a list that does not fit leaves the model unchanged.

    Parameters
    ----------
    model : keras.Model
        The model, built, on any device.
    weights : sequence of numpy.ndarray
        An array for each of ``model.weights``, in that order, as from :func:`get_weights`.

    Raises
    ------
    WeightsError
        If the model is not built, or if the number of arrays, a shape or a dtype differs from the model's.
        Also if floats for integer or boolean weights have a value that does not fit. The message names the
        weights, the expected value and the actual value.

    Notes
    -----
    Two differences of dtype are accepted, because averages have them: see
    :func:`flower_gpu.frameworks.array_checks.fitted`.
    """
    variables = _variables(model)
    names = [_name(variable) for variable in variables]
    hint = ""
    if isinstance(weights, Sequence) and len(weights) == len(model.trainable_weights):
        hint = "; that is the number of trainable weights, but there are others too: use get_weights"
    arrays = array_checks.check_count(weights, names, hint)
    labels = [f"{name}, array {i} of {len(names)}" for i, name in enumerate(names, start=1)]
    fitting = array_checks.convert_each(labels, _fitted, arrays, variables)
    for variable, array in zip(variables, fitting, strict=True):
        variable.assign(array)


def _variables(model: Any) -> list[Any]:
    # The class is checked, because in Keras 2 the attribute of a model that is not built raises.
    if not hasattr(type(model), "trainable_weights"):
        raise WeightsError(f"expected a Keras model, got {type(model).__name__}")
    if not getattr(model, "built", True):
        raise WeightsError(
            f"{model.name}: not built yet; begin it with keras.Input, or call it on one batch first"
        )
    return list(model.weights)


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))  # Keras 2 has no paths


def _dtype(variable: Any) -> np.dtype[Any]:
    return array_checks.numpy_dtype(getattr(variable.dtype, "name", variable.dtype))


def _fitted(array: object, variable: Any) -> NDArray[Any]:
    return array_checks.fitted(array, tuple(variable.shape), _dtype(variable))
