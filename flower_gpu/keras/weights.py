"""A Keras model's weights as numpy arrays and back.

Works with every backend of Keras 3, and with Keras 2: only what all models have is used. The arrays are those
of ``model.weights``: what is trained, and what is not but belongs to the model, such as BatchNormalization's
moving averages. The states of seed generators (of Dropout, for example) are not among them: they are random
numbers of one process, and an average of several means nothing. Nor is the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_gpu.errors import WeightsError
from flower_gpu.frameworks import array_checks


def get_weights(model: Any) -> list[NDArray[Any]]:
    """Copy a model's weights to numpy arrays.

    Parameters
    ----------
    model : keras.Model
        The model, built, on any device.

    Returns
    -------
    list of numpy.ndarray
        One C-contiguous array for each of ``model.weights``, in its order; a layer that is used twice counts
        once. bfloat16 is float32; every other dtype and all shapes are kept.

    Raises
    ------
    WeightsError
        If the model is not built, or weights have no numpy counterpart (float8, strings); the message names
        them.
    """
    variables = _variables(model)
    names = [_name(variable) for variable in variables]
    dtypes = array_checks.each(names, _dtype, variables)  # all are looked at before the first copy
    pairs = zip(variables, dtypes, strict=True)
    return [array_checks.to_numpy(variable.numpy(), dtype) for variable, dtype in pairs]


def set_weights(model: Any, weights: Sequence[NDArray[Any]]) -> None:
    """Load numpy arrays into a model.

    Everything is checked before the first write: a list that does not fit leaves the model as it was.

    Parameters
    ----------
    model : keras.Model
        The model, built, on any device.
    weights : sequence of numpy.ndarray
        One array for each of ``model.weights``, in its order, as from :func:`get_weights`.

    Raises
    ------
    WeightsError
        If the model is not built, if the number of arrays, a shape or a dtype is not the model's, or if
        floats meant for integers or booleans hold a value that does not fit; the message names the weights,
        what was expected and what came.

    Notes
    -----
    Of averages two differences of dtype are taken, see :func:`flower_gpu.frameworks.array_checks.fitted`.
    """
    variables = _variables(model)
    names = [_name(variable) for variable in variables]
    hint = ""
    if isinstance(weights, Sequence) and len(weights) == len(model.trainable_weights):
        hint = "; that is the number of trainable weights, but there are others too: use get_weights"
    arrays = array_checks.check_count(weights, names, hint)
    labels = [f"{name}, array {i} of {len(names)}" for i, name in enumerate(names, start=1)]
    fitting = array_checks.each(labels, _fitted, arrays, variables)
    for variable, array in zip(variables, fitting, strict=True):
        variable.assign(array)


def _variables(model: Any) -> list[Any]:
    if not hasattr(type(model), "trainable_weights"):  # of its class: Keras 2 raises where it is not built
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
