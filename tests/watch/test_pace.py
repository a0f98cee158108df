"""When a run says how fast it is, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from flower_gpu import trace
from flower_gpu.watch import pace
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import OpenRound

START = 1000.0


def open_round(replies: Iterable[float], messages: int | None = 100) -> OpenRound:
    """Return a round with replies so many seconds after its start."""
    history = History(keep_finished=False)
    which = {"round": 1, "task": "train"}
    events = [trace.make("round_started", **which, messages=messages)]
    events += [trace.make("reply", **which, node=0, error=None) for _ in replies]
    for event, at in zip(events, (0.0, *replies), strict=True):
        event["time"] = START + at
    history.feed(events)
    assert history.open_round is not None
    return history.open_round


def estimates(replies: list[float], messages: int | None = 100) -> list[float | None]:
    """Return what is estimated at each reply."""
    return [
        pace.left_s(open_round(replies[: count + 1], messages), START + at)
        for count, at in enumerate(replies)
    ]


#: As measured: the first reply after 10 s of imports, then slow ones, then two a second.
SLOW_START = [10.0, 10.8, 11.5, 12.4, 13.0, *(13.5 + 0.5 * number for number in range(95))]


def test_nothing_is_estimated_from_a_slow_start() -> None:
    told = estimates(SLOW_START)
    first = next(number for number, left_s in enumerate(told) if left_s is not None)
    assert 10 <= first <= 40
    for number, left_s in enumerate(told[first:], first):
        assert left_s == pytest.approx(SLOW_START[-1] - SLOW_START[number], rel=0.3, abs=1)


def test_workers_that_are_done_together_are_not_taken_for_a_pace() -> None:
    # Sixteen at a time, each in 60 s: they answer within one second.
    replies = [60.0 * (1 + number // 16) + number % 16 / 16 for number in range(96)]
    told = estimates(replies, 96)
    assert told[:32] == [None] * 32
    for number, left_s in enumerate(told):
        true_s = replies[-1] - replies[number]
        assert left_s is None or abs(left_s - true_s) < 130


def test_an_even_pace_is_told_soon_and_ends_at_nothing() -> None:
    told = estimates([0.5 * (1 + number) for number in range(100)])
    first = next(number for number, left_s in enumerate(told) if left_s is not None)
    assert first < 15
    assert told[-1] == 0.0
    assert pace.rate(open_round([0.5, 1.0]), START + 1) is None
    assert pace.rate(None, START) is None
    even = open_round([0.5 * (1 + number) for number in range(20)], None)
    assert pace.rate(even, START + 10) == pytest.approx(2.0, rel=0.2)
    assert pace.left_s(even, START + 10) is None  # nobody has said how many there are


def rounds(*seconds: float, waits: tuple[float, ...]) -> pace.RoundsLeft:
    """Return estimates at the first reply of the round after rounds of these lengths."""
    left, now = pace.RoundsLeft(), START
    for number, (wait_s, long_s) in enumerate(zip(waits, (*seconds, 0.0), strict=True), 1):
        left.begin(number, now)
        assert left.left_s(10, now) is None or number > 2
        left.replied(OpenRound(number, "train", 10, now, replies=1, first_reply_at=now + wait_s))
        now += long_s
    return left


def test_rounds_that_are_left_take_as_long_as_those_after_a_slow_first_one() -> None:
    assert rounds(18.0, waits=(10.0, 0.4)).left_s(10, START + 18) is None
    assert rounds(18.0, 7.0, waits=(10.0, 0.4, 0.4)).left_s(10, START + 25) == 8 * 7.0
    assert rounds(18.0, 7.0, 9.0, waits=(10.0, 0.4, 0.4, 0.4)).left_s(10, START + 35) == 7 * 8.0 - 1


def test_the_first_round_counts_if_it_began_as_fast_as_the_second() -> None:
    assert rounds(3600.0, waits=(62.0, 60.0)).left_s(10, START + 3600) == 9 * 3600.0
    assert rounds(3600.0, waits=(62.0, 60.0)).left_s(None, START + 3600) is None
