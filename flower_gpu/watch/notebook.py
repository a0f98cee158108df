"""Shows a finished run in a notebook: a table of its rounds, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import PosixPath
from typing import Any, Final

from flower_gpu.printable import duration_text, printable
from flower_gpu.watch.fields import metric_rank
from flower_gpu.watch.folds.rounds import RoundPart
from flower_gpu.watch.report.page import task_name
from flower_gpu.watch.result import result_lines

_MAX_METRIC_COLUMNS: Final = 6
_MAX_ROWS: Final = 12
# Each cell has a style attribute, because notebooks remove the style sheets of untrusted files.
_CELL: Final = 'style="text-align: right; white-space: nowrap; padding: 2px 8px"'


class ReportPath(PosixPath):
    """The path of a report. A notebook cell that ends with this value shows the report itself."""

    def _repr_html_(self) -> str | None:
        try:
            page = self.read_text(encoding="utf-8")
        except OSError:
            # The file no longer exists, so the notebook shows the path.
            return None
        # The page is embedded, because some notebooks do not serve files from the folder of the notebook.
        return (
            f'<iframe srcdoc="{escape(page)}" width="100%" height="720" '
            'style="border: 1px solid #8888; background: white"></iframe>'
        )


def result_html(app: str, summary: Mapping[str, Any], folder: str, parts: Sequence[RoundPart]) -> str:
    """Return the summary and the rounds of a run as HTML.

    ``folder``: the path of the results, or empty for a run without a folder.
    """
    places = [("results", folder)] if folder else []
    lines = "\n".join([f"<b>{_text(app)}</b>", *map(_text, result_lines(summary, places=places))])
    return f"<div><pre>{lines}</pre>{_table(parts)}</div>"


def _table(parts: Sequence[RoundPart]) -> str:
    """Return a table with the messages, the duration and the metrics of each round."""
    names_and_tasks = dict.fromkeys((name, part.task) for part in parts for name in part.metrics)
    columns = sorted(names_and_tasks, key=lambda column: metric_rank(column[0]))[:_MAX_METRIC_COLUMNS]
    heads = ["round", "messages", "failed", "time"]
    heads += [f"{_text(name)}<br>{_text(task_name(task))}" for name, task in columns]
    rounds: dict[int | None, list[RoundPart]] = {}
    for part in parts:
        rounds.setdefault(part.round, []).append(part)
    rows = []
    for number in sorted(rounds, key=lambda number: -1 if number is None else number):
        round_parts = rounds[number]
        seconds = [part.seconds for part in round_parts if part.seconds is not None]
        values = {(name, part.task): value for part in round_parts for name, value in part.metrics.items()}
        cells = [
            "" if number is None else str(number),
            str(sum(part.messages for part in round_parts)),
            str(sum(part.failed for part in round_parts)),
            duration_text(sum(seconds)) if seconds else "",
            *(f"{values[column]:.4g}" if column in values else "" for column in columns),
        ]
        rows.append(f"<tr>{''.join(f'<td {_CELL}>{_text(cell)}</td>' for cell in cells)}</tr>")
    if not rows:
        return ""
    if len(rows) > _MAX_ROWS:
        half = _MAX_ROWS // 2
        rows[half:-half] = [f'<tr><td colspan="{len(heads)}">{len(rows) - 2 * half} more rounds</td></tr>']
    head = "".join(f"<th {_CELL}>{text}</th>" for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _text(text: str) -> str:
    return escape(printable(text))
