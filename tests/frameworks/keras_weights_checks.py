"""Tests of the weights of Keras. test_framework_weights.py runs them with each backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from flower_gpu.errors import WeightsError
from flower_gpu.keras.weights import get_weights, set_weights

DTYPES = ["float32", "float16", "bfloat16"]


def model_with_shared_layer(dtype: str = "float32") -> Any:
    """A model with a layer that is used twice, BatchNormalization, and Dropout with its seed generator."""
    images = keras.Input((6,))
    shared_layer = keras.layers.Dense(6, dtype=dtype, name="twice")
    hidden = keras.layers.BatchNormalization(dtype=dtype)(shared_layer(shared_layer(images)))
    return keras.Model(images, keras.layers.Dense(2, dtype=dtype)(keras.layers.Dropout(0.5)(hidden)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_survive_get_weights_and_set_weights(dtype: str) -> None:
    model = model_with_shared_layer(dtype)
    weights = get_weights(model)
    assert [array.shape for array in weights] == [(6, 6), (6,), *[(6,)] * 4, (6, 2), (2,)]
    expected = "float32" if dtype == "bfloat16" else dtype
    assert {str(array.dtype) for array in weights} == {expected}
    assert all(array.flags["C_CONTIGUOUS"] and array.flags["OWNDATA"] for array in weights)

    other = model_with_shared_layer(dtype)
    assert not np.array_equal(get_weights(other)[0], weights[0])
    set_weights(other, weights)
    for expected_array, actual_array in zip(weights, get_weights(other), strict=True):
        np.testing.assert_array_equal(expected_array, actual_array)
    data = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
    np.testing.assert_array_equal(model.predict(data, verbose=0), other.predict(data, verbose=0))


def test_moving_averages_are_weights_and_seeds_are_not() -> None:
    model = model_with_shared_layer()
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.full((8, 6), 5.0, np.float32), np.ones((8, 2), np.float32), verbose=0)
    other = model_with_shared_layer()
    seeds = [variable.numpy() for variable in other.variables if "seed" in variable.path]
    set_weights(other, get_weights(model))
    moving = [variable.numpy() for variable in other.weights if "moving_mean" in variable.path]
    assert len(seeds) == len(moving) == 1
    assert np.abs(moving[0]).max() > 0
    np.testing.assert_array_equal(
        seeds, [variable.numpy() for variable in other.variables if "seed" in variable.path]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays[:-1], r"expected 8 arrays \(.*twice/kernel.*got 7"),
        (lambda arrays: arrays[:6], "that is the number of trainable weights.*use get_weights"),
        (lambda arrays: [arrays[0].T[:5], *arrays[1:]], r"twice/kernel, array 1 of 8: .*\(6, 6\).*\(5, 6\)"),
        (lambda arrays: dict(enumerate(arrays)), "expected a list of 8 numpy arrays, got dict"),
    ],
    ids=["count", "trainable", "shape", "mapping"],
)
def test_unsuitable_arrays_leave_the_model_unchanged(change: Any, message: str) -> None:
    model = model_with_shared_layer()
    weights_before = get_weights(model)
    with pytest.raises(WeightsError, match=message):
        set_weights(model, change([array + 1 for array in weights_before]))
    for expected_array, actual_array in zip(weights_before, get_weights(model), strict=True):
        np.testing.assert_array_equal(expected_array, actual_array)


@pytest.mark.parametrize("function", [get_weights, lambda model: set_weights(model, [])])
def test_models_without_weights_are_refused(function: Any) -> None:
    with pytest.raises(WeightsError, match=r"not built yet; begin it with keras\.Input"):
        function(keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(WeightsError, match="expected a Keras model, got dict"):
        function({})
