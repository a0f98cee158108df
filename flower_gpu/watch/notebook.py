"""What a notebook shows of a run that is over: a table of its rounds, two curves, and its report.

Colours of text and lines are those of the notebook (``currentColor``), so a dark one is as legible as a light
one. All is in attributes: notebooks take away style sheets and scripts of files that they do not trust.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import PosixPath
from typing import Any, Final

from flower_gpu.printable import duration_text, printable
from flower_gpu.watch.report.drawing import BLUE, GREEN, ORANGE, PURPLE, task_name
from flower_gpu.watch.report.figures_rounds import Series, panels_of
from flower_gpu.watch.spans import RoundPart

_FIRST: Final = ("loss", "accuracy")  # of the curves
_MOST_CURVES: Final = 2
_MOST_COLUMNS: Final = 6  # of metrics
_MOST_ROWS: Final = 12
_MOST_MARKED: Final = 30  # rounds of which each has a mark
_MOST_REASONS: Final = 3
_LOOKS: Final = {
    "server-evaluate": (BLUE, ""),
    "evaluate": (ORANGE, "6 3"),
    "train": (GREEN, "2 3"),
    "fit": (GREEN, "2 3"),
}
_CELL: Final = 'style="text-align: right; white-space: nowrap; padding: 2px 8px"'
_OTHER_LOOK: Final = (PURPLE, "8 3 2 3")
# Of a curve, in pixels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 190, 52, 12, 40, 34


class ReportPath(PosixPath):
    """The path of a report. As the last value of a notebook's cell, it shows the report itself."""

    def _repr_html_(self) -> str | None:
        try:
            page = self.read_text(encoding="utf-8")
        except OSError:  # it is no file any more: the notebook shows the path
            return None
        # The page itself, since not all notebooks serve files beside them.
        return (
            f'<iframe srcdoc="{escape(page)}" width="100%" height="720" '
            'style="border: 1px solid #8888; background: white"></iframe>'
        )


def result_html(app: str, summary: Mapping[str, Any], folder: str, parts: Sequence[RoundPart]) -> str:
    """Return the HTML that a notebook shows of a run; ``folder`` is empty where it has none."""
    panels = panels_of([part for part in parts if part.round is not None])
    first = [title for title in _FIRST if title in panels]
    titles = [*first, *(title for title in panels if title not in first)]
    curves = "".join(_curve(title, panels[title]) for title in titles[:_MOST_CURVES])
    return (
        f"<div>{_heading(app, summary, folder)}<div>{curves}</div>"
        f"{_table(parts, [series for title in titles for series in panels[title]])}</div>"
    )


def _heading(app: str, summary: Mapping[str, Any], folder: str) -> str:
    of = f" of {summary['num_rounds']}" if summary.get("num_rounds") else ""
    facts = [
        str(summary["outcome"]),
        f"{summary['rounds']}{of} rounds",
        f"{summary['clients']} clients",
        f"{summary['messages']} messages",
        duration_text(summary["seconds"]),
    ]
    lines = [f"<b>{_text(app)}</b>: {_text(', '.join(facts))}"]
    reasons = summary["failures"]
    lines += [f"{one['count']} failed: {_text(one['reason'])}" for one in reasons[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        lines.append(f"{len(reasons) - _MOST_REASONS} more reasons")
    if folder:
        lines.append(f"<code>{_text(folder)}</code>")
    return f"<p>{'<br>'.join(lines)}</p>"


def _table(parts: Sequence[RoundPart], series: Sequence[Series]) -> str:
    """Return a row for each round: what was sent, how long it took, and its metrics."""
    columns = series[:_MOST_COLUMNS]
    heads = ["round", "messages", "failed", "time"]
    heads += [f"{_text(one.name)}<br>{_text(task_name(one.task))}" for one in columns]
    values = [dict(zip(one.rounds, one.values, strict=True)) for one in columns]
    rounds: dict[int | None, list[RoundPart]] = {}
    for part in parts:
        rounds.setdefault(part.round, []).append(part)
    rows = []
    for number in sorted(rounds, key=lambda one: -1 if one is None else one):
        of_round = rounds[number]
        seconds = [part.seconds for part in of_round if part.seconds is not None]
        cells = [
            "" if number is None else str(number),
            str(sum(part.messages for part in of_round)),
            str(sum(part.failed for part in of_round)),
            duration_text(sum(seconds)) if seconds else "",
            *(f"{one[number]:.4g}" if number in one else "" for one in values),
        ]
        rows.append(f"<tr>{''.join(f'<td {_CELL}>{_text(cell)}</td>' for cell in cells)}</tr>")
    if not rows:
        return ""
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows[half:-half] = [f'<tr><td colspan="{len(heads)}">{len(rows) - 2 * half} more rounds</td></tr>']
    head = "".join(f"<th {_CELL}>{one}</th>" for one in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _curve(title: str, series: Sequence[Series]) -> str:
    """Return the values of one metric by round, as SVG."""
    rounds = sorted({number for one in series for number in one.rounds})
    values = [value for one in series for value in one.values]
    marks = _marks(min(values), max(values))
    low, high = marks[0], marks[-1]
    span = max(rounds[-1] - rounds[0], 1)

    def x(number: float) -> float:
        return _LEFT + (number - rounds[0]) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    shapes = [_label(_LEFT, 14, title, 'font-weight="bold"')]
    for value in marks:
        shapes.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="currentColor" stroke-opacity="0.25"/>'
        )
        shapes.append(_label(_LEFT - 6, y(value) + 4, f"{value:.6g}", 'text-anchor="end"'))
    for number in sorted({rounds[0], rounds[len(rounds) // 2], rounds[-1]}):
        shapes.append(_label(x(number), _HEIGHT - _BOTTOM + 16, str(number), 'text-anchor="middle"'))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    shapes.append(_label(middle, _HEIGHT - 4, "round", 'text-anchor="middle"'))
    for place, one in enumerate(series):
        colour, dashes = _LOOKS.get(one.task, _OTHER_LOOK)
        line = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        at = _LEFT + place * (_WIDTH - _LEFT) / max(len(series), 2)
        shapes.append(f'<line x1="{at:.1f}" x2="{at + 22:.1f}" y1="26" y2="26" {line}/>')
        shapes.append(_label(at + 27, 30, task_name(one.task)))
        points = [(x(number), y(value)) for number, value in zip(one.rounds, one.values, strict=True)]
        joined = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
        shapes.append(f'<polyline points="{joined}" fill="none" {line}/>')
        if len(points) <= _MOST_MARKED:
            shapes += [
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{colour}"/>' for left, top in points
            ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(title)} by round" '
        f'font-family="sans-serif" font-size="11">{"".join(shapes)}</svg>'
    )


def _marks(low: float, high: float) -> list[float]:
    """Return round numbers, some three or four, from at most ``low`` to at least ``high``."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= span / 3)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _label(left: float, top: float, text: str, more: str = "") -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" fill="currentColor" {more}>{_text(text)}</text>'


def _text(text: str) -> str:
    return escape(printable(text))
