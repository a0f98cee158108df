"""What a notebook shows of a run that is over: a table of its rounds, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import PosixPath
from typing import Any, Final

from flower_gpu.printable import duration_text, printable
from flower_gpu.watch.fields import metric_rank
from flower_gpu.watch.report.page import task_name
from flower_gpu.watch.result import result_lines
from flower_gpu.watch.spans import RoundPart

_MOST_COLUMNS: Final = 6  # of metrics
_MOST_ROWS: Final = 12
# In attributes: notebooks take away style sheets of files that they do not trust.
_CELL: Final = 'style="text-align: right; white-space: nowrap; padding: 2px 8px"'


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
    places = [("results", folder)] if folder else []
    lines = "\n".join([f"<b>{_text(app)}</b>", *map(_text, result_lines(summary, places=places))])
    return f"<div><pre>{lines}</pre>{_table(parts)}</div>"


def _table(parts: Sequence[RoundPart]) -> str:
    """Return a row for each round: what was sent, how long it took, and its metrics."""
    found = dict.fromkeys((name, part.task) for part in parts for name in part.metrics)
    columns = sorted(found, key=lambda one: metric_rank(one[0]))[:_MOST_COLUMNS]
    heads = ["round", "messages", "failed", "time"]
    heads += [f"{_text(name)}<br>{_text(task_name(task))}" for name, task in columns]
    rounds: dict[int | None, list[RoundPart]] = {}
    for part in parts:
        rounds.setdefault(part.round, []).append(part)
    rows = []
    for number in sorted(rounds, key=lambda one: -1 if one is None else one):
        of_round = rounds[number]
        seconds = [part.seconds for part in of_round if part.seconds is not None]
        values = {(name, part.task): value for part in of_round for name, value in part.metrics.items()}
        cells = [
            "" if number is None else str(number),
            str(sum(part.messages for part in of_round)),
            str(sum(part.failed for part in of_round)),
            duration_text(sum(seconds)) if seconds else "",
            *(f"{values[one]:.4g}" if one in values else "" for one in columns),
        ]
        rows.append(f"<tr>{''.join(f'<td {_CELL}>{_text(cell)}</td>' for cell in cells)}</tr>")
    if not rows:
        return ""
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows[half:-half] = [f'<tr><td colspan="{len(heads)}">{len(rows) - 2 * half} more rounds</td></tr>']
    head = "".join(f"<th {_CELL}>{one}</th>" for one in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _text(text: str) -> str:
    return escape(printable(text))
