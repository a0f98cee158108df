"""Checks of a user's result in the worker, and its conversion for Flower.

The checks run in the process that ran the function, so a client process need not import torch to read a torch
scalar. This module imports neither torch nor flwr.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flower_gpu.errors import InvalidResultError
from flower_gpu.workers.call import Task, load_task, task_name

Weights = list[NDArray[Any]]
Scalar = bool | bytes | float | int | str


@dataclass(frozen=True)
class SentArray:
    """Shape and values of an array that was sent. The array that comes back must match."""

    shape: tuple[int, ...]
    # A copy of the array if some of its values are not finite (masks of ``-inf``), otherwise None
    values: NDArray[Any] | None = None

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        """Return the description of an array. Call it before the function can change the array."""
        return cls(array.shape, None if _is_finite(array) else array.copy())


def fit(
    task: Task, weights: Weights, config: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[Weights, int, dict[str, Scalar]]:
    """Call a user's training function and return its result, checked against the weights that were sent."""
    sent = [SentArray.of(array) for array in weights]
    result = load_task(task)(weights, dict(config), **kwargs)
    return check_fit(result, sent, task_name(task))


def evaluate(
    task: Task, weights: Weights, config: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[float, int, dict[str, Scalar]]:
    """Call a user's evaluation function and return its checked result."""
    return check_evaluate(load_task(task)(weights, dict(config), **kwargs), task_name(task))


def server_evaluate(task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Call a strategy's ``evaluate_fn`` and return its metrics, under either of Flower's interfaces.

    ``task``: the user's function.
    ``args``: ``(server_round, arrays)`` under the Message API, ``(server_round, ndarrays, config)`` under the
    NumPyClient API, where a loss is required.
    ``kwargs``: further keyword arguments.
    Returns all metrics, including the loss; None if the function returned None.
    """
    name = task_name(task)
    result = load_task(task)(*args, **kwargs)
    if result is None:
        return None
    if isinstance(result, Mapping):  # a dict, or a MetricRecord, which also holds lists of numbers
        lists = {key: list(value) for key, value in result.items() if isinstance(value, list)}
        rest = {key: value for key, value in result.items() if key not in lists}
        metrics = {**scalars(rest, name), **lists}
    elif isinstance(result, tuple | list) and len(result) == 2:
        metrics = {"loss": number(result[0], name, "loss"), **scalars(result[1], name)}
    else:
        raise InvalidResultError(
            f"{name} returned a {type(result).__name__}, expected (loss, metrics), a MetricRecord, a dict "
            "or None"
        )
    if len(args) == 3 and "loss" not in metrics:
        raise InvalidResultError(f"{name} returned no 'loss', only {', '.join(metrics) or 'an empty dict'}")
    return metrics


def check_fit(result: Any, sent: Sequence[SentArray], name: str) -> tuple[Weights, int, dict[str, Scalar]]:
    """Return ``(weights, num_examples, metrics)``, checked and converted.

    ``result``: return value of the function.
    ``sent``: the arrays that were sent. If it is empty, arrays of any shape are accepted.
    ``name``: name of the function, for messages.
    Raises InvalidResultError, which names the entry and the expected value.
    """
    weights, num_examples, metrics = _three(result, name, "(weights, num_examples, metrics)")
    return (
        check_weights(weights, sent, name),
        _num_examples(num_examples, name),
        scalars(metrics, name),
    )


def check_evaluate(result: Any, name: str) -> tuple[float, int, dict[str, Scalar]]:
    """Return ``(loss, num_examples, metrics)``, checked and converted; see :func:`check_fit`."""
    loss, num_examples, metrics = _three(result, name, "(loss, num_examples, metrics)")
    return number(loss, name, "loss"), _num_examples(num_examples, name), scalars(metrics, name)


def check_weights(weights: Any, sent: Sequence[SentArray] | None, name: str) -> Weights:
    """Return ``weights`` as numpy arrays, checked for the sent shapes and for new values that are not finite.

    ``weights``: the weights that the function returned.
    ``sent``: the arrays that were sent. If it is empty, arrays of any shape are accepted. With None the
    weights were not trained, so any values are accepted, too.
    ``name``: name of the function, for messages.
    """
    if isinstance(weights, np.ndarray | Mapping) or not isinstance(weights, Sequence):
        raise InvalidResultError(
            f"{name}: the weights are a {type(weights).__name__}, not a list of numpy arrays. For a "
            "PyTorch model return flower_gpu.pytorch.weights.get_weights(model)"
        )
    arrays = [_array(value, name, index) for index, value in enumerate(weights)]
    if sent is None:
        return arrays
    if sent and len(arrays) != len(sent):
        raise InvalidResultError(f"{name}: {len(arrays)} arrays returned, {len(sent)} were sent")
    for index, array in enumerate(arrays):
        where = f"{name}: array {index + 1} of {len(arrays)}"
        original = sent[index] if sent else SentArray(array.shape)
        if array.shape != original.shape:
            raise InvalidResultError(
                f"{where} has shape {array.shape}, expected {original.shape} as it was sent"
            )
        if bad := _became_not_finite(array, original.values):
            raise InvalidResultError(
                f"{where} (shape {array.shape}, {array.dtype}) has {bad} values that are not finite and were "
                "not sent so, expected none: the training diverged. Lower the learning rate or clip gradients"
            )
    return arrays


def scalars(metrics: Any, name: str) -> dict[str, Scalar]:
    """Return ``metrics`` with numpy and torch scalars converted to plain Python values."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidResultError(
            f"{name}: the metrics are a {type(metrics).__name__}, not a dict such as {{'accuracy': 0.9}}"
        )
    plain = {}
    for key, value in metrics.items():
        value = _plain(value)
        if not isinstance(key, str) or not isinstance(value, bool | bytes | float | int | str):
            raise InvalidResultError(
                f"{name}: metric {key!r} is a {type(value).__name__}; Flower takes names with a bool, "
                "int, float, str or bytes"
            )
        plain[key] = value
    return plain


def number(value: Any, name: str, what: str) -> float:
    """Return a number of any library as a float."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise InvalidResultError(f"{name}: the {what} is a {type(value).__name__}, not a number")
    return float(plain)


def _three(result: Any, name: str, expected: str) -> tuple[Any, Any, Any]:
    if not isinstance(result, tuple | list) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise InvalidResultError(f"{name} returned {got}, expected {expected}")
    return result[0], result[1], result[2]


def _num_examples(value: Any, name: str) -> int:
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int) or plain < 0:
        raise InvalidResultError(
            f"{name}: num_examples is {value!r}, expected the number of examples as an int "
            "(results are weighted by it); usually len(loader.dataset)"
        )
    return plain


def _plain(value: Any) -> Any:
    """Return the Python value of a numpy or torch scalar, or of an array with a single element."""
    if isinstance(value, bool | bytes | float | int | str) and not isinstance(value, np.generic):
        return value
    item = getattr(value, "item", None)
    if item is None:
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):  # more than one element
        return value


def _array(value: Any, name: str, index: int) -> NDArray[Any]:
    if hasattr(value, "detach"):  # a torch tensor, recognized by its interface
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        raise InvalidResultError(
            f"{name}: array {index + 1} is a {type(value).__name__} of dtype {array.dtype}, expected "
            "a numeric numpy array"
        )
    return array


def _became_not_finite(array: NDArray[Any], original: NDArray[Any] | None) -> int:
    """Return the number of values that are not finite and have changed.

    ``original``: the earlier values; None if all were finite.
    """
    if _is_finite(array):
        return 0
    became = ~np.isfinite(array)
    if original is not None:
        became &= ~((array == original) | (np.isnan(array) & np.isnan(original)))
    return int(became.sum())


def _is_finite(array: NDArray[Any]) -> bool:
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum takes one pass and no temporary array. If it overflows, the slow check below decides.
        if math.isfinite(abs(complex(array.sum()))):
            return True
    return bool(np.isfinite(array).all())
