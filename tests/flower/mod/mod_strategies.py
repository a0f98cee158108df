"""Random records of Flower, for property-based tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

_KEYS = st.text(max_size=3)
_INTEGERS = st.integers(-(2**63), 2**63 - 1)
_FLOATS = st.floats(width=64)
_CONFIG_SCALARS: list[st.SearchStrategy[Any]] = [
    st.booleans(),
    _INTEGERS,
    _FLOATS,
    st.text(max_size=4),
    st.binary(max_size=4),
]
_DTYPES = ["<f4", "<f8", ">f8", "<i8", "|u1", "<f2", "|b1", "<c8"]

_arrays = st.sampled_from(_DTYPES).flatmap(
    # Also of no dimension, and without an element; from 1 KiB on they are no longer in the pickle itself.
    lambda dtype: hnp.arrays(
        np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12)
    )
).map(Array)  # fmt: skip
_opaque = st.builds(
    Array,
    dtype=st.sampled_from(["float32", "of another framework"]),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    stype=st.just("own bytes"),
    data=st.binary(max_size=20) | st.integers(0, 255).map(lambda byte: bytes([byte]) * 70_000),
)

records: st.SearchStrategy[Any] = st.one_of(
    st.dictionaries(_KEYS, _arrays | _opaque, max_size=3).map(ArrayRecord),
    st.dictionaries(
        _KEYS,
        st.one_of(_INTEGERS, _FLOATS, st.lists(_INTEGERS, max_size=3), st.lists(_FLOATS, max_size=3)),
        max_size=3,
    ).map(MetricRecord),
    st.dictionaries(
        _KEYS,
        st.one_of(*_CONFIG_SCALARS, *(st.lists(scalar, max_size=3) for scalar in _CONFIG_SCALARS)),
        max_size=3,
    ).map(ConfigRecord),
)


@st.composite
def record_dicts(draw: Callable[[st.SearchStrategy[Any]], Any]) -> RecordDict:
    """Records under a few names, of which two may have the very same one."""
    there = draw(st.lists(records, min_size=1, max_size=4))
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5))
    return RecordDict({name: draw(st.sampled_from(there)) for name in names})


def plain(found: RecordDict) -> list[Any]:
    """Return all that is in records, in its order, in a form in which NaN is NaN and 1 is not 1.0."""
    return [
        (name, type(record).__name__, [(key, _plain(value)) for key, value in record.items()])
        for name, record in found.items()
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Array):
        return value.dtype, tuple(value.shape), value.stype, value.data
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return type(value).__name__, repr(value)
