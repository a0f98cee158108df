"""The curves of metrics at the beginning of a report."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.watch.report.curves import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MOST_CURVES,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    charts_of,
    round_ticks,
    thinned,
    value_ticks,
)
from flower_gpu.watch.spans import RoundPart

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def part(number: int | None, task: str = "train", **metrics: float) -> RoundPart:
    return RoundPart(0.0, number, task, metrics)


def points_of(chart: Chart, place: int = 0) -> list[tuple[float, float]]:
    """Return the points of a line, as they are in its path."""
    pairs = chart.curves[place].path.removeprefix("M").split("L")
    return [(float(x), float(y)) for x, y in (pair.split(" ") for pair in pairs)]


def test_metrics_have_a_chart_each_and_tasks_a_curve_in_it() -> None:
    parts = [
        part(0, "server-evaluate", loss=4.0),
        *(part(number, "train", loss=3.0 / number, seconds=1.0) for number in (1, 2)),
        *(part(number, "server-evaluate", loss=2.0, accuracy=number / 2) for number in (1, 2)),
        part(None, "query", loss=9.0),
        part(2, "mine", loss=1.0),
    ]
    found = charts_of(parts)
    assert found is not None and found.left_out == 0
    assert [chart.title for chart in found.charts] == ["accuracy", "loss", "seconds"]
    assert found.tasks == ["server-evaluate", "train", "mine"]
    loss = found.charts[1]
    assert [(curve.task, curve.kind, len(curve.dots)) for curve in loss.curves] == [
        ("server-evaluate", "server-evaluate", 3),
        ("train", "train", 2),
        ("mine", "other-task", 1),
    ]
    assert found.kind_of("mine") == "other-task" and found.kind_of("fit") == "fit"
    height_of_2 = pytest.approx(TOP + 2 / 3 * (HEIGHT - BOTTOM - TOP), abs=0.1)
    assert points_of(loss) == [
        (LEFT, TOP),
        ((LEFT + WIDTH - RIGHT) / 2, height_of_2),
        (WIDTH - RIGHT, height_of_2),
    ]
    assert [label for _, label in loss.x_ticks] == ["0", "1", "2"]
    assert [label for _, label in loss.y_ticks] == ["1", "2", "3", "4"]


def test_a_run_without_metrics_has_no_charts() -> None:
    assert charts_of([]) is None
    assert charts_of([part(1), part(None, loss=1.0)]) is None


def test_of_many_metrics_the_first_are_drawn_and_the_others_counted() -> None:
    found = charts_of([part(1, **{f"m{number:03}": 1.0 for number in range(MOST_CURVES + 3)}, loss=2.0)])
    assert found is not None and found.left_out == 4
    assert [chart.title for chart in found.charts][:2] == ["loss", "m000"]
    assert len(found.charts) == MOST_CURVES


def test_a_long_run_is_a_short_path_that_keeps_its_spikes() -> None:
    parts = [part(number, loss=100.0 if number == 7777 else math.sin(number)) for number in range(20_000)]
    found = charts_of(parts)
    assert found is not None
    [curve] = found.charts[0].curves
    assert curve.dots == () and len(curve.path) < 20_000
    points = points_of(found.charts[0])
    assert min(y for _, y in points) == TOP and points[0][0] == LEFT and points[-1][0] == WIDTH - RIGHT


@given(
    st.lists(st.tuples(st.integers(0, 400), FLOATS), min_size=1, max_size=60, unique_by=lambda one: one[0])
)
def test_any_curve_lies_in_its_chart(values: list[tuple[int, float]]) -> None:
    found = charts_of([part(number, x=value) for number, value in values])
    assert found is not None
    [chart] = found.charts
    assert chart.x_ticks and chart.y_ticks and len(chart.y_ticks) <= 7
    points = points_of(chart) + [(x, TOP) for x, _ in chart.x_ticks] + [(LEFT, y) for y, _ in chart.y_ticks]
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1 for x, y in points)


@given(low=FLOATS, high=FLOATS)
def test_numbers_of_values_are_few_and_in_the_range(low: float, high: float) -> None:
    low, high = sorted((low, high))
    found = value_ticks(low, high)
    assert 1 <= len(found) <= 7 and found == sorted(found)
    slack = (high / 2 - low / 2) * 1e-6
    assert low - slack <= found[0] and found[-1] <= high + slack


@given(first=st.integers(0, 10**9), span=st.integers(0, 10**9))
def test_numbers_of_rounds_are_few_and_at_equal_distances(first: int, span: int) -> None:
    found = round_ticks(first, first + span)
    assert 1 <= len(found) <= 8 and first <= found[0] and found[-1] <= first + span
    assert len({after - before for before, after in pairwise(found)}) <= 1


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1))
def test_a_thinned_curve_has_the_ends_and_extremes_of_each_column(points: list[tuple[float, float]]) -> None:
    points.sort(key=lambda point: point[0])
    kept = thinned(points)
    assert set(kept) <= set(points) and [x for x, _ in kept] == sorted(x for x, _ in kept)
    for column in {int(x) for x, _ in points}:
        own = [y for x, y in points if int(x) == column]
        left = [y for x, y in kept if int(x) == column]
        assert (min(own), max(own)) == (min(left), max(left)) and len(left) <= 4
