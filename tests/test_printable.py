"""Numbers, lists and errors are shown in a readable form."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from flower_gpu import printable
from flower_gpu.printable import and_others, duration_text, first_line, told_if_slow


@given(st.floats(0, 1e6))
def test_durations_are_written_with_readable_units(seconds: float) -> None:
    text = duration_text(seconds)
    numbers = [float(part) for part in text.split() if part[0].isdigit()]
    units = [part for part in text.split() if not part[0].isdigit()]
    worth = {"s": 1, "min": 60, "h": 3600}
    shown = sum(number * worth[unit] for number, unit in zip(numbers, units, strict=True))
    # The tolerance is half of the last digit that is shown.
    assert shown == pytest.approx(seconds, abs={"s": 0.051, "min": 0.51, "h": 30.1}[units[0]])
    assert all(number < 60 for number, unit in zip(numbers, units, strict=True) if unit != "h")


def test_a_list_that_is_cut_says_how_many_are_left_out() -> None:
    assert [and_others(count) for count in (-1, 0, 1, 12)] == ["", "", " and 1 other", " and 12 others"]


def test_only_a_slow_block_is_reported() -> None:
    lines: list[str] = []
    reported = threading.Event()
    with told_if_slow(lines.append, "this takes no time"):
        pass
    with told_if_slow(lambda text: (lines.append(text), reported.set()), "importing the app"):
        assert reported.wait(60)
    assert lines == ["importing the app"]


def test_a_long_wait_is_reported_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SLOW_S", "_STUCK_S", "_AGAIN_S"):
        monkeypatch.setattr(printable, name, 0.01)
    lines: list[str] = []
    asked = itertools.count()
    with told_if_slow(lines.append, "starting the SuperLink", lambda: f"waiting for {next(asked)}"):
        until(lambda: len(lines) >= 3, "the third line")
    assert lines[:3] == ["starting the SuperLink", "waiting for 0", "waiting for 1"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("KeyError: 'w'\nmore", "KeyError: 'w'"),
        ("\n\n  the data are gone\n", "the data are gone"),
        ("TypeError: \nunsupported operand\nmore", "TypeError: unsupported operand"),
        (
            'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): "w"\n\tsize',
            'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): "w"',
        ),
        ("ValueError:", "ValueError:"),
    ],
)
def test_the_first_line_of_an_error_contains_its_message(text: str, shown: str) -> None:
    assert first_line(text) == shown
