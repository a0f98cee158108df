"""Tables of a report, as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from flower_gpu.monitor.report.calls import PHASES
from flower_gpu.monitor.report.clients import ClientRow
from flower_gpu.monitor.report.figures_rounds import WHOSE
from flower_gpu.monitor.report.names import (
    UNKNOWN,
    bytes_text,
    duration_text,
    gpu_name,
    number_text,
    percent_text,
)
from flower_gpu.monitor.report.recorded import SentMessages
from flower_gpu.monitor.report.totals import Totals
from flower_gpu.monitor.spans import Evaluation
from flower_gpu.printable import printable

_MOST_ERRORS: Final = 20
_ERROR_CHARACTERS: Final = 300
_MOST_METRICS: Final = 16  # of a round


def escaped(text: str) -> str:
    """Return a text of others as it may stand in a page."""
    return html.escape(printable(text))


def gpu_table(totals: Totals) -> str:
    """Return the table of GPUs."""
    gpus = [one.gpu for one in totals.gpus]
    rows = []
    for one in totals.gpus:
        celsius = UNKNOWN if one.hottest_c is None else f"{one.hottest_c:.0f} °C"
        rows.append(
            [
                _text(gpu_name(one.gpu, gpus)),
                _text(one.gpu.name or UNKNOWN),
                _number(bytes_text(one.gpu.total_bytes)),
                _number(bytes_text(one.gpu.capacity_bytes)),
                _number(bytes_text(one.most_leased_bytes)),
                _number(percent_text(one.leased_share(totals.duration_s))),
                _number(percent_text(one.capacity_share(totals.duration_s))),
                _number(bytes_text(one.used_first_bytes)),
                _number(bytes_text(one.used_most_bytes)),
                _number(bytes_text(one.used_last_bytes)),
                _number(percent_text(one.busy)),
                _number(celsius),
            ]
        )
    head = [
        _head("GPU", is_text=True),
        _head("model", is_text=True),
        _head("memory"),
        _head("for leases"),
        _head("leased", "at most"),
        _head("leased", "of the time"),
        _head("leased", "of all it has"),
        _head("in use", "at the start"),
        _head("in use", "at most"),
        _head("in use", "at the end"),
        _head("busy", "mean"),
        _head("warm", "at most"),
    ]
    return _table(head, rows)


def rounds_table(
    evaluations: Sequence[Evaluation], messages: Mapping[tuple[int | None, str], SentMessages]
) -> str:
    """Return the table of rounds: what was sent, and what came of it."""
    found: dict[tuple[int | None, str], Evaluation] = {(one.round, one.task): one for one in evaluations}
    order = {task: place for place, task in enumerate(("train", "fit", "evaluate", "server-evaluate"))}
    rows = []
    for key in sorted({*found, *messages}, key=lambda key: (key[0] or 0, order.get(key[1], -1), key[1])):
        evaluation, sent = found.get(key), messages.get(key)
        is_own = sent is None or key[1] == "server-evaluate"
        rows.append(
            [
                _number(UNKNOWN if key[0] is None else str(key[0])),
                _text(WHOSE.get(key[1], key[1])),
                _number(UNKNOWN if is_own or sent is None else str(sent.messages)),
                _failures(None if is_own or sent is None else sent.failed),
                _number(duration_text(_seconds(evaluation, sent))),
                _text(_metrics(evaluation.metrics if evaluation else {}), is_wide=True),
            ]
        )
    head = [
        _head("round"),
        _head("what", is_text=True),
        _head("messages"),
        _head("failed"),
        _head("took"),
        _head("metrics", is_text=True),
    ]
    return _table(head, rows)


def errors_table(errors: Mapping[str, int]) -> str:
    """Return the table of what calls have ended with that have failed."""
    rows = [
        [_number(str(count)), _text(error[:_ERROR_CHARACTERS], is_wide=True)]
        for error, count in list(errors.items())[:_MOST_ERRORS]
    ]
    if left_out := list(errors.values())[_MOST_ERRORS:]:
        rows.append([_number(f"{sum(left_out):,}"), _text(f"{len(left_out):,} others")])
    return _table([_head("times"), _head("what happened", is_text=True)], rows)


def clients_table(clients: Sequence[ClientRow]) -> str:
    """Return the table of clients."""
    rows = []
    for one in clients:
        row = [_text(one.client or UNKNOWN), _number(str(one.calls))]
        for phase in PHASES:
            row += [_number(_short_s(one.median_s[phase])), _number(_short_s(one.max_s[phase]))]
        rows.append([*row, _number(bytes_text(one.peak_bytes)), _failures(one.failures)])
    head = [_head("client", is_text=True), _head("calls")]
    for phase in PHASES:
        head += [_head(phase, "median, s"), _head(phase, "most, s")]
    return _table([*head, _head("memory", "at most"), _head("failed")], rows)


def _seconds(evaluation: Evaluation | None, sent: SentMessages | None) -> float | None:
    if sent is not None and sent.seconds is not None:
        return sent.seconds
    return evaluation.seconds if evaluation is not None else None


def _metrics(metrics: Mapping[str, float]) -> str:
    texts = [f"{name} {number_text(value)}" for name, value in list(metrics.items())[:_MOST_METRICS]]
    left_out = len(metrics) - len(texts)
    return ", ".join(texts) + (f", {left_out} more" if left_out else "") or UNKNOWN


def _short_s(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds:,.2f}"


def _head(title: str, below: str = "", *, is_text: bool = False) -> str:
    small = f"<small>{escaped(below)}</small>" if below else ""
    kind = ' class="text"' if is_text else ""
    return f"<th{kind}>{escaped(title)}{small}</th>"


def _text(text: str, *, is_wide: bool = False) -> str:
    kind = "text wide" if is_wide else "text"
    return f'<td class="{kind}">{escaped(text)}</td>'


def _number(text: str) -> str:
    return f"<td>{escaped(text)}</td>"


def _failures(count: int | None) -> str:
    if count is None:
        return _number(UNKNOWN)
    return f'<td class="bad">{count}</td>' if count else "<td>0</td>"


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"<tr>{''.join(row)}</tr>" for row in rows]
    return "\n".join(
        [
            '<div class="table" tabindex="0"><table>',
            f"<thead><tr>{''.join(head)}</tr></thead>",
            "<tbody>",
            *lines,
            "</tbody></table></div>",
        ]
    )
