"""Figures as people read them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_gpu.printable import duration_text, told_if_slow


@settings(deadline=None)
@given(st.floats(0, 1e6))
def test_durations_are_written_as_one_would_say_them(seconds: float) -> None:
    text = duration_text(seconds)
    numbers = [float(part) for part in text.split() if part[0].isdigit()]
    units = [part for part in text.split() if not part[0].isdigit()]
    worth = {"s": 1, "min": 60, "h": 3600}
    shown = sum(number * worth[unit] for number, unit in zip(numbers, units, strict=True))
    # Half of the last digit that is shown.
    assert shown == pytest.approx(seconds, abs={"s": 0.051, "min": 0.51, "h": 30.1}[units[0]])
    assert all(number < 60 for number, unit in zip(numbers, units, strict=True) if unit != "h")


def test_only_what_takes_long_is_said() -> None:
    said: list[str] = []
    told = threading.Event()
    with told_if_slow(said.append, "this takes no time"):
        pass
    with told_if_slow(lambda text: (said.append(text), told.set()), "importing the app"):
        assert told.wait(30)
    assert said == ["importing the app"]
