from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_gpu.errors import InvalidResultError
from flower_gpu.flower import results

SHAPES = [(2, 3), (), (0, 4)]


def sent_weights() -> list[Any]:
    return [np.zeros(shape, np.float32) for shape in SHAPES]


@given(
    st.lists(
        hnp.arrays(
            st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
            elements={"allow_nan": False, "allow_infinity": False},
        )
        | hnp.arrays(np.int64, 3),
        max_size=5,
    )
)
def test_finite_arrays_of_the_sent_shapes_pass_unchanged(arrays: list[Any]) -> None:
    checked = results.check_weights(arrays, [results.SentArray.of(a) for a in arrays], "f")
    for array, checked_array in zip(arrays, checked, strict=True):
        assert checked_array.dtype == array.dtype and np.array_equal(array, checked_array)


def test_a_sum_that_overflows_is_not_an_error() -> None:
    big = np.full(10, np.finfo(np.float32).max, np.float32)
    results.check_weights([big, np.full(9, 6e4, np.float16)], (), "f")


def test_infinities_that_cancel_in_the_sum_are_refused() -> None:
    with pytest.raises(InvalidResultError, match="2 values"):
        results.check_weights([np.array([np.inf, -np.inf, 1.0])], (), "f")


NOT_FINITE = [np.nan, np.inf, -np.inf]


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.complex64]),
        hnp.array_shapes(max_dims=2, max_side=4),
        elements=st.sampled_from([0.0, 1.0, *NOT_FINITE]),
    ),
    st.data(),
)
def test_only_values_that_became_not_finite_in_the_call_are_refused(array: Any, data: Any) -> None:
    sent_array = results.SentArray.of(array)
    array[np.isfinite(array)] += 1  # in place, as an optimizer does
    assert results.check_weights([array], [sent_array], "f")[0] is array
    at = data.draw(st.integers(0, array.size - 1))
    value = data.draw(st.sampled_from([bad for bad in NOT_FINITE if str(bad) != str(array.flat[at].real)]))
    array.flat[at] = value
    with pytest.raises(InvalidResultError, match="has 1 values that are not finite and were not sent so"):
        results.check_weights([array], [sent_array], "f")


def test_initial_weights_may_contain_infinities() -> None:
    results.check_weights([np.array([-np.inf, 0.0])], None, "initial_weights")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"returned NoneType, expected \(weights, num_examples, metrics\)"),
        (([], 1), "returned 2 values, expected"),
        ((np.zeros(3), 1, {}), "not a list of numpy arrays"),
        (({"a": np.zeros(3)}, 1, {}), "get_weights"),
        ((sent_weights()[:2], 1, {}), "2 arrays returned, 3 were sent"),
        (
            ([np.zeros((3, 2)), *sent_weights()[1:]], 1, {}),
            r"array 1 of 3 has shape \(3, 2\), expected \(2, 3\)",
        ),
        (([*sent_weights()[:2], np.array([None])], 1, {}), "array 3 is a ndarray of dtype object"),
        (([*sent_weights()[:2], "abc"], 1, {}), "array 3 is a str"),
        ((sent_weights(), None, {}), "num_examples is None"),
        ((sent_weights(), 1.5, {}), "num_examples is 1.5"),
        ((sent_weights(), True, {}), "num_examples is True"),
        ((sent_weights(), -1, {}), "num_examples is -1"),
        ((sent_weights(), 1, [0.5]), "metrics are a list"),
        ((sent_weights(), 1, {"per class": [0.5, 0.5]}), "metric 'per class' is a list"),
        ((sent_weights(), 1, {"curve": np.zeros(3)}), "metric 'curve' is a ndarray"),
        ((sent_weights(), 1, {3: 0.5}), "metric 3"),
    ],
)
def test_invalid_fit_results_are_refused(result: Any, message: str) -> None:
    with pytest.raises(InvalidResultError, match=message):
        results.check_fit(result, [results.SentArray.of(array) for array in sent_weights()], "train")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((0.5, 3), r"returned 2 values, expected \(loss, num_examples, metrics\)"),
        (("low", 3, {}), "loss is a str, not a number"),
        ((True, 3, {}), "loss is a bool"),
        ((0.5, "3", {}), "num_examples is '3'"),
    ],
)
def test_invalid_evaluate_results_are_refused(result: Any, message: str) -> None:
    with pytest.raises(InvalidResultError, match=message):
        results.check_evaluate(result, "evaluate")


@pytest.mark.parametrize(
    ("result", "args", "message"),
    [
        (0.5, (1, []), "returned a float"),
        ({"accuracy": 0.5}, (1, [], {}), "returned no 'loss', only accuracy"),
        ((0.5, {"a": object()}), (1, [], {}), "metric 'a' is a object"),
    ],
)
def test_invalid_results_of_server_side_evaluation_are_refused(
    result: Any, args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(InvalidResultError, match=message):
        results.server_evaluate(lambda *_: result, args, {})


def test_metrics_become_plain_python_values() -> None:
    metrics = {"a": np.float32(0.5), "b": np.int8(3), "c": np.bool_(True), "d": "x", "e": np.array([2.0])}
    plain = results.scalars(metrics, "f")
    assert plain == {"a": 0.5, "b": 3, "c": True, "d": "x", "e": 2.0}
    assert [type(value) for value in plain.values()] == [float, int, bool, str, float]
