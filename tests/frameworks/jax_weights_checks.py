"""Tests of the weights of JAX. test_framework_weights.py runs them with and without 64 bits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from properties import examples

from flower_gpu.errors import WeightsError
from flower_gpu.jax.weights import get_weights, set_weights

X64 = os.environ.get("JAX_ENABLE_X64") == "1"
DTYPES = ["float32", "float16", "bfloat16", "int32", "uint8", "bool", "complex64"]
DTYPES += ["float64", "int64"] if X64 else []


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    kernel: Any
    bias: Any


@jax.tree_util.register_pytree_node_class
class Custom:
    """A pytree node with unnamed children."""

    def __init__(self, child: Any, fixed: str = "fixed") -> None:
        self.child, self.fixed = child, fixed

    def tree_flatten(self) -> Any:
        return (self.child,), self.fixed

    @classmethod
    def tree_unflatten(cls, fixed: str, children: Any) -> Custom:
        return cls(*children, fixed)


def leaves() -> st.SearchStrategy[Any]:
    shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    seeds = st.integers(0, 2**31)

    def device(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
        values = np.random.default_rng(seed).normal(size=shape) * 100
        return jnp.asarray(abs(values) if dtype == "uint8" else values).astype(dtype)

    on_device = st.builds(device, st.sampled_from(DTYPES), shapes, seeds)
    in_numpy = st.builds(lambda shape, seed: np.random.default_rng(seed).normal(size=shape), shapes, seeds)
    numbers = st.one_of(st.booleans(), st.integers(-(2**31), 2**31), st.floats(allow_nan=False))
    return st.one_of(on_device, in_numpy, numbers, st.none())


TREES = st.recursive(
    leaves(),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.text("ab/.", max_size=2), children, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
        st.builds(Registered, children, children),
        st.builds(Custom, children),
    ),
    max_leaves=8,
)


def zero(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jnp.zeros_like(leaf)
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)(0)


@settings(max_examples=examples(150))
@given(TREES)
def test_a_tree_survives_get_weights_and_set_weights(tree: Any) -> None:
    weights = get_weights(tree)
    flat, structure = jax.tree_util.tree_flatten(tree)
    assert len(weights) == len(flat)
    zeros = jax.tree_util.tree_map(zero, tree)
    back = set_weights(zeros, weights)
    leaves_back, structure_back = jax.tree_util.tree_flatten(back)
    assert structure_back == structure
    for array, leaf, again in zip(weights, flat, leaves_back, strict=True):
        assert type(array) is np.ndarray
        assert array.flags["C_CONTIGUOUS"]
        assert not np.shares_memory(array, np.asarray(leaf))
        assert type(again) is type(leaf)
        assert np.asarray(again).dtype == np.asarray(leaf).dtype
        assert array.dtype == ("float32" if np.asarray(leaf).dtype == "bfloat16" else np.asarray(leaf).dtype)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(leaf))
    for array in weights:
        array[...] = 1  # must not change the leaves
    for leaf, again in zip(flat, jax.tree_util.tree_leaves(back), strict=True):
        np.testing.assert_array_equal(np.asarray(again), np.asarray(leaf))


def test_set_weights_needs_only_the_shapes() -> None:
    tree = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    shapes = jax.eval_shape(lambda: tree)
    back = set_weights(shapes, get_weights(tree))
    assert back["w"].dtype == jnp.bfloat16
    with pytest.raises(WeightsError, match=r"\['w'\]: a shape has no values"):
        get_weights(shapes)


def donated() -> Any:
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jax.random.key(1), "a random key is not a weight"),
        (lambda: "text", "expected an array or a number, got str"),
        (lambda: jnp.ones(2, jnp.float8_e4m3fn), "float8_e4m3fn has no numpy counterpart"),
        (lambda: np.array([object()]), "object has no numpy counterpart"),
        (lambda: 2**70, "object has no numpy counterpart"),
        (donated, "donated or deleted"),
    ],
    ids=["key", "text", "float8", "objects", "large", "donated"],
)
def test_the_error_for_an_unsupported_leaf_names_it(make: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=rf"^\['layer'\]\[1\]: .*{message}"):
        get_weights({"layer": [jnp.ones(1), make()]})


def test_get_weights_inside_of_jit_is_refused() -> None:
    with pytest.raises(WeightsError, match="the tree: a tracer has no values"):
        jax.jit(get_weights)(jnp.ones(2))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.ones(2, np.float32)], r"expected 2 arrays \(\.kernel, \.bias\), got 1"),
        (
            [np.ones((3, 2), np.float32), np.ones(3, np.float32)],
            r"\.kernel, array 1 of 2: .*\(2, 3\).*\(3, 2\)",
        ),
        ("ab", "expected a list of 2 numpy arrays, got str"),
    ],
    ids=["count", "shape", "text"],
)
def test_the_error_for_unsuitable_arrays_names_them(arrays: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        set_weights(Registered(jnp.zeros((2, 3), jnp.float32), jnp.zeros(3, jnp.float32)), arrays)
