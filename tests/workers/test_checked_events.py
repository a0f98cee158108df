"""Events of a confined worker are taken only as far as they are what they ought to be."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.workers.confined_replies import _EVENTS, checked_event

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_FIELDS = sorted({name for fields in _EVENTS.values() for name in fields} | {"context_bytes", "names"})


@given(
    kind=st.sampled_from(sorted(_EVENTS)),
    fields=st.dictionaries(st.sampled_from(_FIELDS), _ANY, max_size=8),
)
def test_a_taken_event_has_all_of_its_fields_and_nothing_else(kind: str, fields: dict[str, Any]) -> None:
    found = checked_event({**fields, "event": kind})
    assert found is not None
    assert set(found) == {"event", *_EVENTS[kind]}
    json.dumps(found, allow_nan=False)
    for value in found.values():
        assert_small(value)


def assert_small(value: Any) -> None:
    if isinstance(value, str):
        assert len(value) <= 200
    elif isinstance(value, dict):
        assert len(value) <= 64
        for each in value.values():
            assert_small(each)
    elif isinstance(value, list):
        assert len(value) <= 64
        for each in value:
            assert_small(each)
    elif isinstance(value, int | float):
        assert 0 <= value <= 1 << 53
        assert math.isfinite(value)


@pytest.mark.parametrize("event", [{}, {"event": "imported", "names": ["os"]}, {"event": []}, {"event": "x"}])
def test_other_events_are_left_out(event: dict[str, Any]) -> None:
    assert checked_event(event) is None


def test_an_honest_event_stays_as_it_is() -> None:
    gpu = {"uuid": "GPU-1", "peak_bytes": 5, "reserved_peak_bytes": None, "told_by_driver": True}
    found = checked_event({"event": "gpu_memory", "gpus": [{**gpu, "context_bytes": 1 << 40}], "cuda": True})
    assert found is not None
    assert gpu.items() <= found["gpus"][0].items()
    assert "context_bytes" not in found["gpus"][0]  # it would be believed for all apps on such a GPU
    told = {"event": "progress", "desc": "epoch 1", "n": 3, "total": 10}
    assert checked_event(told) == told


def test_a_description_cannot_write_to_a_terminal() -> None:
    found = checked_event({"event": "progress", "desc": "\x1b]0;title\x07a\nb", "n": 1, "total": 2})
    assert found is not None
    assert found["desc"].isprintable()
