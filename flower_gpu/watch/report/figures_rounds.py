"""Picture of the metrics of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.printable import printable
from flower_gpu.watch.fields import metric_rank
from flower_gpu.watch.report import drawing
from flower_gpu.watch.report.drawing import Picture, task_name
from flower_gpu.watch.spans import RoundPart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOOKS: Final = {
    "server-evaluate": (drawing.BLUE, "o", "-"),
    "evaluate": (drawing.ORANGE, "s", "--"),
    "train": (drawing.GREEN, "^", "-."),
    "fit": (drawing.GREEN, "^", "-."),
}
_OTHER_LOOK: Final = (drawing.PURPLE, "D", ":")
_COLUMNS: Final = 3
_PLAIN: Final = (1e-3, 1e5)  # values that matplotlib writes as they are
_MOST_LETTERS: Final = 40  # of a metric's name: more would lie on the next panel's
_MOST_PANELS: Final = 12
_MOST_MARKED: Final = 60  # rounds of which each has a mark of its own
# What a metric is about is often said in front of it: then it is the same one, of other data.
_PREFIXES: Final = (
    "train",
    "eval",
    "evaluate",
    "test",
    "val",
    "validation",
    "fit",
    "centralized",
    "federated",
)
_SAME: Final = {"acc": "accuracy", "f1-score": "f1", "f1score": "f1", "f1-macro": "f1"}
_COUNTS: Final = ("num-examples", "examples", "num-samples")


@dataclass(frozen=True)
class Series:
    """The values of one metric, by round."""

    name: str
    task: str
    rounds: tuple[int, ...]
    values: tuple[float, ...]


def panels_of(evaluations: Sequence[RoundPart]) -> dict[str, list[Series]]:
    """Sort metrics into panels by title: one for each, and for the same one of server and clients together.

    Accuracy, loss and F1 come first. Numbers of examples, which are weights and no results, are left out.
    """
    values: dict[tuple[str, str], dict[int, float]] = {}
    for evaluation in evaluations:
        for name, value in evaluation.metrics.items():
            values.setdefault((evaluation.task, name), {})[evaluation.round or 0] = value
    panels: dict[str, list[Series]] = {}
    for (task, name), by_round in values.items():
        title = _plain_name(name)
        if title in _COUNTS:
            continue
        if any(one.task == task for one in panels.get(title, ())):
            title = name  # a second one of the same name and task
        rounds = sorted(by_round)
        series = Series(name, task, tuple(rounds), tuple(by_round[number] for number in rounds))
        panels.setdefault(title, []).append(series)
    return dict(sorted(panels.items(), key=lambda item: metric_rank(item[0])))


def rounds_picture(evaluations: Sequence[RoundPart], width_in: float) -> Picture | None:
    """Draw metrics by round; None where there are none."""
    from matplotlib.ticker import MaxNLocator

    panels = panels_of(evaluations)
    shown = list(panels.items())[:_MOST_PANELS]
    if not shown:
        return None
    columns = min(_COLUMNS, max(2, len(shown))) if width_in > drawing.NARROW_IN else 1
    rows = -(-len(shown) // columns)
    figure = drawing.new_figure(width_in, rows * 2.5)
    cells = figure.subplots(rows, columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for (title, series), axes in zip(shown, cells, strict=False):
        drawing.dress(axes, title="F1" if title == "f1" else printable(title)[:_MOST_LETTERS])
        for one in series:
            handles[task_name(one.task)] = _draw(axes, one)
        highest = max(abs(value) for one in series for value in one.values)
        if not _PLAIN[0] <= highest < _PLAIN[1]:  # else it has a factor above the axis, where the name is
            axes.yaxis.set_major_formatter("{x:.4g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        rounds = {number for one in series for number in one.rounds}
        if len(rounds) == 1:  # else its axis has fractions of it
            axes.set_xlim(min(rounds) - 1, max(rounds) + 1)
        axes.set_xlabel("round", fontsize=drawing.TEXT_PT)
    for axes in cells[len(shown) :]:
        axes.set_visible(False)
    drawing.arrange(figure, handles, left_in=0.7, gaps_in=(0.7, 0.7))
    left_out = len(panels) - len(shown)
    return Picture(
        "rounds",
        "Metrics by round",
        "Of the server's own evaluations, and of clients as the strategy has aggregated them."
        + (f" {left_out} more metrics are in the table only." if left_out else ""),
        "Metrics by round: " + ", ".join(printable(title) for title, _ in shown),
        figure,
    )


def _draw(axes: Axes, series: Series) -> Any:
    colour, marker, line = _LOOKS.get(series.task, _OTHER_LOOK)
    (drawn,) = axes.plot(
        series.rounds,
        series.values,
        color=colour,
        linestyle=line,
        linewidth=1.4,
        marker=marker if len(series.rounds) <= _MOST_MARKED else "",
        markersize=4,
    )
    return drawn


def _plain_name(name: str) -> str:
    plain = name.lower().replace("_", "-").replace("/", "-").replace(" ", "-")
    if plain in _COUNTS:
        return plain
    first, _, rest = plain.partition("-")
    plain = rest if rest and first in _PREFIXES else plain
    return _SAME.get(plain, plain)
