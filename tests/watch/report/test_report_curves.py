"""The charts of metrics at the top of a report."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.watch.folds.rounds import RoundPart
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
    thinned,
)
from flower_gpu.watch.report.ticks import ticks

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def part(number: int | None, task: str = "train", **metrics: float) -> RoundPart:
    return RoundPart(0.0, number, task, metrics)


def points_of(chart: Chart, index: int = 0) -> list[tuple[float, float]]:
    """Return the points in the path of a curve."""
    pairs = chart.curves[index].path.removeprefix("M").split("L")
    return [(float(x), float(y)) for x, y in (pair.split(" ") for pair in pairs)]


def test_each_metric_has_a_chart_with_a_curve_for_each_task() -> None:
    parts = [
        part(0, "server-evaluate", loss=4.0),
        *(part(number, "train", loss=3.0 / number, seconds=1.0) for number in (1, 2)),
        *(part(number, "server-evaluate", loss=2.0, accuracy=number / 2) for number in (1, 2)),
        part(None, "query", loss=9.0),
        part(2, "mine", loss=1.0),
    ]
    section = charts_of(parts)
    assert section is not None and section.left_out == 0
    assert [chart.title for chart in section.charts] == ["accuracy", "loss", "seconds"]
    assert section.tasks == ["server-evaluate", "train", "mine"]
    loss = section.charts[1]
    assert [(curve.task, curve.kind, len(curve.dots)) for curve in loss.curves] == [
        ("server-evaluate", "server-evaluate", 3),
        ("train", "train", 2),
        ("mine", "other-task", 1),
    ]
    assert section.kind_of("mine") == "other-task" and section.kind_of("fit") == "fit"
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


def test_the_first_of_many_metrics_are_drawn_and_the_others_are_counted() -> None:
    section = charts_of([part(1, **{f"m{number:03}": 1.0 for number in range(MOST_CURVES + 3)}, loss=2.0)])
    assert section is not None and section.left_out == 4
    assert [chart.title for chart in section.charts][:2] == ["loss", "m000"]
    assert len(section.charts) == MOST_CURVES


def test_the_path_of_a_long_run_is_short_and_keeps_spikes() -> None:
    parts = [part(number, loss=100.0 if number == 7777 else math.sin(number)) for number in range(20_000)]
    section = charts_of(parts)
    assert section is not None
    [curve] = section.charts[0].curves
    assert curve.dots == () and len(curve.path) < 20_000
    points = points_of(section.charts[0])
    assert min(y for _, y in points) == TOP and points[0][0] == LEFT and points[-1][0] == WIDTH - RIGHT


@given(
    st.lists(
        st.tuples(st.integers(0, 400), FLOATS), min_size=1, max_size=60, unique_by=lambda point: point[0]
    )
)
def test_any_curve_lies_in_its_chart(values: list[tuple[int, float]]) -> None:
    section = charts_of([part(number, x=value) for number, value in values])
    assert section is not None
    [chart] = section.charts
    assert chart.x_ticks and chart.y_ticks and len(chart.y_ticks) <= 7
    points = points_of(chart) + [(x, TOP) for x, _ in chart.x_ticks] + [(LEFT, y) for y, _ in chart.y_ticks]
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1 for x, y in points)


@given(low=FLOATS, high=FLOATS)
def test_value_ticks_are_few_and_in_the_range(low: float, high: float) -> None:
    low, high = sorted((low, high))
    tick_values = ticks(low, high, 5)
    assert 1 <= len(tick_values) <= 7 and tick_values == sorted(tick_values)
    slack = (high / 2 - low / 2) * 1e-6
    assert low - slack <= tick_values[0] and tick_values[-1] <= high + slack


@given(first=st.integers(0, 10**9), span=st.integers(0, 10**9))
def test_round_ticks_are_few_and_equidistant(first: int, span: int) -> None:
    tick_rounds = ticks(first, first + span, 6, least_step=1.0)
    assert 1 <= len(tick_rounds) <= 8 and first <= tick_rounds[0] and tick_rounds[-1] <= first + span
    assert len({following - previous for previous, following in pairwise(tick_rounds)}) <= 1


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1))
def test_a_thinned_curve_keeps_the_extremes_of_each_column(points: list[tuple[float, float]]) -> None:
    points.sort(key=lambda point: point[0])
    kept = thinned(points)
    assert set(kept) <= set(points) and [x for x, _ in kept] == sorted(x for x, _ in kept)
    for column in {int(x) for x, _ in points}:
        all_y = [y for x, y in points if int(x) == column]
        kept_y = [y for x, y in kept if int(x) == column]
        assert (min(all_y), max(all_y)) == (min(kept_y), max(kept_y)) and len(kept_y) <= 4
