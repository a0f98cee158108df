"""The first picture of a report: the curve of each metric over the rounds.

Each metric has a small chart of its own, because metrics differ in scale. The charts stand side by side where
the page is wide, and one below the other on a telephone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flower_gpu.watch.fields import metric_rank
from flower_gpu.watch.folds.rounds import RoundPart
from flower_gpu.watch.report.ticks import ticks

#: Maximum number of metrics that are drawn. The table of rounds has all metrics.
MOST_CURVES: Final = 24
#: Size of a chart, and of the margins for the numbers on its left and below it, in units of the SVG.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 340, 190, 52, 34, 26, 10
_TITLE_LETTERS: Final = 44
#: Maximum number of rounds that are drawn as dots. With more rounds only the line is drawn.
_MAX_DOTS: Final = 40
#: Kinds of messages that have their own colour in the style sheet, in the order of the legend.
_TASKS: Final = ("server-evaluate", "evaluate", "train", "fit")
OTHER: Final = "other-task"


@dataclass(frozen=True)
class Curve:
    """The curve of a metric for one kind of messages."""

    task: str
    path: str  # SVG path of the line
    dots: Sequence[tuple[float, float]]  # points of the curve; empty if there are many rounds

    @property
    def kind(self) -> str:
        """Class of the curve in the style sheet."""
        return self.task if self.task in _TASKS else OTHER


@dataclass(frozen=True)
class Chart:
    """All curves of a metric. Lengths are in units of the SVG."""

    title: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Charts:
    """The charts of a run. Well-known metrics come first."""

    charts: Sequence[Chart]
    tasks: Sequence[str]  # tasks of all curves, for the legend
    left_out: int  # number of metrics without a chart

    def kind_of(self, task: str) -> str:
        """Return the class of a task in the style sheet."""
        return Curve(task, "", ()).kind


def charts_of(parts: Iterable[RoundPart]) -> Charts | None:
    """Return the charts of all metrics of numbered rounds, or None if no such round has metrics."""
    points: dict[str, dict[str, dict[int, float]]] = {}  # by metric, task and round
    for part in parts:
        if part.round is not None:
            for name, value in part.metrics.items():
                points.setdefault(name, {}).setdefault(part.task, {})[part.round] = value
    if not points:
        return None
    names = sorted(points, key=lambda name: (metric_rank(name), name))
    shown = names[:MOST_CURVES]
    rounds = [
        number
        for by_task in points.values()
        for values_by_round in by_task.values()
        for number in values_by_round
    ]
    axis = min(rounds), max(rounds)
    order = {task: place for place, task in enumerate(_TASKS)}
    tasks = sorted(
        {task for name in shown for task in points[name]},
        key=lambda task: (order.get(task, len(order)), task),
    )
    charts = [
        _chart(name, {task: points[name][task] for task in tasks if task in points[name]}, axis)
        for name in shown
    ]
    return Charts(charts, tasks, len(names) - len(shown))


def _chart(name: str, by_task: dict[str, dict[int, float]], rounds: tuple[int, int]) -> Chart:
    values = [value for values_by_round in by_task.values() for value in values_by_round.values()]
    low, high = min(values), max(values)
    first, last = rounds

    def x(number: int) -> float:
        share = (number - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        # Subtract halves, because the difference of two large numbers may overflow a float.
        span = high / 2 - low / 2
        share = (value / 2 - low / 2) / span if span > 0 else 0.5
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    curves = []
    for task, values_by_round in by_task.items():
        drawn = [(x(number), y(values_by_round[number])) for number in sorted(values_by_round)]
        path = "M" + "L".join(f"{at_x:.1f} {at_y:.1f}" for at_x, at_y in thinned(drawn))
        curves.append(Curve(task, path, drawn if len(drawn) <= _MAX_DOTS else ()))
    title = name if len(name) <= _TITLE_LETTERS else f"{name[: _TITLE_LETTERS - 1]}…"
    x_ticks = [(x(int(number)), f"{number:.0f}") for number in ticks(first, last, 6, least_step=1.0)]
    y_ticks = [(y(value), f"{value:.4g}") for value in ticks(low, high, 5)]
    return Chart(title, x_ticks, y_ticks, curves)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a curve, reduced to four points or fewer per column of pixels.

    Each column keeps its first, lowest, highest and last point. So the line looks the same, and no spike of a
    long run is lost.
    """
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for column in columns.values():
        ends = [
            column[0],
            min(column, key=lambda point: point[1]),
            max(column, key=lambda point: point[1]),
            column[-1],
        ]
        kept += sorted(dict.fromkeys(ends), key=lambda point: point[0])
    return kept
