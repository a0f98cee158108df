"""Hypothesis strategies for all kinds of Flower's records, and functions to compare records."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

texts = st.text(st.characters(codec="utf-8"), max_size=8)
ints = st.integers(-(2**70), 2**70)
floats = st.floats()
dtypes = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(),
    npst.complex_number_dtypes(),
    npst.datetime64_dtypes(),
    npst.byte_string_dtypes(max_len=5),
    npst.unicode_string_dtypes(max_len=5),
)
ndarrays = dtypes.flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
# Large arrays are sent next to the pickle instead of inside it.
large = st.builds(np.full, st.integers(1000, 3000), st.integers(0, 9))
raw = st.builds(
    lambda data: Array(dtype="bfloat16", shape=(len(data) // 2,), stype="raw", data=data),
    st.binary(max_size=9000),
)
arrays = st.one_of(st.builds(Array, ndarrays), st.builds(Array, large), raw)


def _lists(*elements: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of([element | st.lists(element, max_size=4) for element in elements])


def _dicts(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(texts, values, max_size=4)


records = st.one_of(
    st.builds(lambda items: array_record(items), _dicts(arrays)),
    st.builds(MetricRecord, _dicts(_lists(ints, floats))),
    st.builds(ConfigRecord, _dicts(_lists(ints, floats, texts, st.binary(max_size=9), st.booleans()))),
)
record_dicts = st.builds(RecordDict, _dicts(records))


def array_record(items: dict[str, Array]) -> ArrayRecord:
    record = ArrayRecord()
    record.update(items)
    return record


def contents(records: RecordDict) -> list[Any]:
    """Return all contents of records in order and with types. Contents with equal NaNs compare equal."""
    return [(name, type(record), _items(record)) for name, record in records.items()]


def _items(record: Any) -> list[Any]:
    if isinstance(record, ArrayRecord):
        return [
            (key, array.dtype, tuple(array.shape), array.stype, bytes(array.data))
            for key, array in record.items()
        ]
    return [(key, repr(value)) for key, value in record.items()]


def filled(number: int, size: int = 100) -> RecordDict:
    """Return a state with `size` bytes in its array. Each number gives a different state of that size."""
    array = Array(np.full(size, number % 256, np.uint8))
    return RecordDict(
        {"arrays": ArrayRecord({"a": array}), "config": ConfigRecord({"number": number.to_bytes(4)})}
    )


def number_of(state: Any) -> int:
    """Return the number of a state made by :func:`filled`, after checking that all of it has that number."""
    number = int.from_bytes(state["config"]["number"])
    values = set(state["arrays"]["a"].numpy().tolist())
    assert values <= {number % 256}
    return number
