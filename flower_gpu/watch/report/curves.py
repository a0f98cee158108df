"""The first picture of a report: the curve of each metric over the rounds.

Each metric has a small chart of its own, because metrics differ in scale. The charts stand side by side where
the page is wide, and one below the other on a telephone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flower_gpu.watch.fields import metric_rank
from flower_gpu.watch.spans import RoundPart

#: More metrics are not drawn; the table of rounds has them.
MOST_CURVES: Final = 24
#: The size of a chart, and of the space for the numbers at its left and below it.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 340, 190, 52, 34, 26, 10
_TITLE_LETTERS: Final = 44
_MOST_DOTS: Final = 40  # with more rounds the line is enough
#: Kinds of messages with a colour of their own in the style sheet, in the order of the legend.
_TASKS: Final = ("server-evaluate", "evaluate", "train", "fit")
OTHER: Final = "other-task"


@dataclass(frozen=True)
class Curve:
    """One metric of one kind of messages."""

    task: str
    path: str  # of its line
    dots: Sequence[tuple[float, float]]  # empty for many rounds

    @property
    def kind(self) -> str:
        """Its class in the style sheet."""
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
    """The charts of a run, the best known metrics first."""

    charts: Sequence[Chart]
    tasks: Sequence[str]  # of all curves, for the legend
    left_out: int  # metrics that are not drawn

    def kind_of(self, task: str) -> str:
        """Return the class of a task in the style sheet."""
        return Curve(task, "", ()).kind


def charts_of(parts: Iterable[RoundPart]) -> Charts | None:
    """Return the curves of all metrics of rounds with a number; None if there is none."""
    points: dict[str, dict[str, dict[int, float]]] = {}  # by metric, task and round
    for part in parts:
        if part.round is not None:
            for name, value in part.metrics.items():
                points.setdefault(name, {}).setdefault(part.task, {})[part.round] = value
    if not points:
        return None
    names = sorted(points, key=lambda name: (metric_rank(name), name))
    shown = names[:MOST_CURVES]
    rounds = [number for by_task in points.values() for own in by_task.values() for number in own]
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
    values = [value for own in by_task.values() for value in own.values()]
    low, high = min(values), max(values)
    first, last = rounds

    def x(number: int) -> float:
        share = (number - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        # Halves: the difference of two large numbers may be more than a float can hold.
        span = high / 2 - low / 2
        share = (value / 2 - low / 2) / span if span > 0 else 0.5
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    curves = []
    for task, own in by_task.items():
        drawn = [(x(number), y(own[number])) for number in sorted(own)]
        path = "M" + "L".join(f"{at_x:.1f} {at_y:.1f}" for at_x, at_y in thinned(drawn))
        curves.append(Curve(task, path, drawn if len(drawn) <= _MOST_DOTS else ()))
    title = name if len(name) <= _TITLE_LETTERS else f"{name[: _TITLE_LETTERS - 1]}…"
    x_ticks = [(x(number), str(number)) for number in round_ticks(first, last)]
    y_ticks = [(y(value), f"{value:.4g}") for value in value_ticks(low, high)]
    return Chart(title, x_ticks, y_ticks, curves)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a curve, of each column of the picture at most four that give the same line.

    These are the first, the lowest, the highest and the last one, so no spike of a long run is lost.
    """
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for own in columns.values():
        ends = [own[0], min(own, key=lambda point: point[1]), max(own, key=lambda point: point[1]), own[-1]]
        kept += sorted(dict.fromkeys(ends), key=lambda point: point[0])
    return kept


def value_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers from ``low`` to ``high``; ``low`` alone where both are the same."""
    span = high - low
    if not 0 < span < math.inf:
        return [low] if low == high else [low, high]
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next((size * power for size in (1, 2, 5) if size * power * 5 >= span), 10 * power)
    if (
        not step > 0 or not math.isfinite(low / step) or low + step == low
    ):  # closer than floats can tell apart
        return [low, high]
    begin = math.ceil(low / step)
    found = [number * step for number in range(begin, begin + 7)]
    # The last one may be beyond the range by the rounding of binary numbers: 3 * 0.1 is more than 0.3.
    is_in = [value for value in found if value <= high or math.isclose(value, high, rel_tol=1e-12)]
    return [min(max(value, low), high) for value in is_in] or [low, high]


def round_ticks(first: int, last: int) -> list[int]:
    """Return at most seven numbers of rounds, at equal distances, from ``first`` to ``last``."""
    span = last - first
    power = 10 ** max(0, len(str(span)) - 2)
    step = next((size * power for size in (1, 2, 5, 10, 20, 50) if size * power * 6 >= span), 100 * power)
    begin = -(-first // step) * step
    return list(range(begin, last + 1, step)) or [first]
