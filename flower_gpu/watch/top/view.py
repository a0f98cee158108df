"""Rendering of a snapshot as lines of text that fit the size of a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from flower_gpu.printable import format_bytes
from flower_gpu.watch.fields import metric_rank
from flower_gpu.watch.top.browsing import HELP, WAITING, WORKERS, Browsing
from flower_gpu.watch.top.lines import Column, Part, cut, duration, joined, line, table
from flower_gpu.watch.top.snapshot import GPURow, RunRow, Snapshot, WaitingRow, WorkerRow

_GIB = 2**30
_PHASES: Final = {"starting": "yellow", "running": "green", "exiting": "cyan", "idle": "dim", "held": "blue"}
_OUTCOMES: Final = {"completed": "green", "failed": "red", "interrupted": "yellow", "gone": "red"}
#: Height in lines from which empty lines separate the sections.
_SPACIOUS: Final = 40
#: Width in cells from which texts are not abbreviated.
_WIDE: Final = 100
#: Height in lines from which the line of keys is shown.
_ROOM_FOR_HELP: Final = 16
#: Maximum length of a bar, in cells.
_LONGEST_BAR: Final = 64
#: Length in cells below which a part of a bar is not drawn.
_NOTHING: Final = 0.05
#: The parts of a bar: symbol, symbol for an ASCII terminal, style, meaning.
_PARTS: Final = (
    ("█", "#", "green", "used"),
    ("▒", "+", "green", "leased"),
    ("▚", "o", "magenta", "other users"),
    ("▬", "=", "yellow", "other programs"),
    ("·", ".", "dim", "free"),
)


@dataclass(frozen=True)
class Size:
    """The size of a terminal in cells and lines. ``height`` is None if the number of lines is not limited."""

    width: int
    height: int | None = None
    is_ascii: bool = False  # True if the terminal can show ASCII only


def draw(shown: Snapshot, size: Size, browsing: Browsing | None = None) -> list[Text]:
    """Return a snapshot as lines. With ``browsing``, a line about the keys is included."""
    width, height = size.width, size.height
    top = _header(shown, width)
    if browsing is not None and (height or 0) >= _ROOM_FOR_HELP:
        top.append(joined(width, *((rank, hint, "dim") for rank, hint in enumerate(HELP))))
    top += _gpus(shown, size) + _host(shown, width)
    browsing = browsing or Browsing()
    blank: list[Text] = [Text()] if height is None or height >= _SPACIOUS else []
    sections = {WORKERS: _workers(shown, size), WAITING: _waiting(shown, size)}
    runs = [line(("Runs", "bold"), (f"  {len(shown.runs) or 'none of this account runs here'}", "dim"))]
    runs += [_run(run, width) for run in shown.runs]
    if height is not None:
        remaining = height - len(top) - 3 * len(blank)
        runs = _shortened(runs, max(2, remaining // 4), "")
        limits = _limits(sections, browsing.table, remaining - len(runs))
    else:
        limits = dict.fromkeys(sections)
    lines = [*top, *blank, *runs]
    for name, section in sections.items():
        lines += [*blank, *section.lines(name, limits[name], browsing, size)]
    lines = [cut(text, width) for text in lines[:height]]
    if size.is_ascii:
        for text in lines:
            text.plain = text.plain.replace("…", "~")
    return lines


def _shortened(lines: list[Text], limit: int, noun: str) -> list[Text]:
    """Return up to ``limit`` lines. If lines are left out, the last line says how many."""
    if len(lines) <= limit:
        return lines
    return [*lines[: limit - 1], line((f"  ... {len(lines) - limit + 1} more{noun}", "dim"))]


def _header(shown: Snapshot, width: int) -> list[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(shown.time))
    title = joined(width, (0, "flower-gpu top", "bold"), (1, shown.host, ""), (2, clock, "dim"))
    problem = shown.ledger_problem
    return [title, line((f"leases: {problem}", "yellow"))] if problem else [title]


# GPUs


def _gpus(shown: Snapshot, size: Size) -> list[Text]:
    if not shown.gpus:
        return [line(("No GPU: ", "bold"), (shown.gpu_problem or "see flower-gpu gpus", ""))]
    letters = [(plain if size.is_ascii else letter, style, name) for letter, plain, style, name in _PARTS]
    legend = [part for letter, style, name in letters for part in ((letter, style), (f" {name}  ", "dim"))]
    lines = [_gpu(gpu, size) for gpu in shown.gpus]
    if size.height is not None:
        lines = _shortened(lines, max(1, size.height // 3 - 1), " GPUs")
    return [*lines, line(("  ", ""), *legend)]


def _gpu(gpu: GPURow, size: Size) -> Text:
    """Return the line of a GPU: a bar of its memory by holder, then its figures."""
    name = f"GPU {gpu.index}" + (" MIG" if gpu.mig_parent else "")
    if problem := gpu.problem or ("" if gpu.total_bytes else "its memory is not reported"):
        return line((name, "bold"), (f" {gpu.name or 'model unknown'}: ", ""), (problem, "red"))
    degree = "C" if size.is_ascii else "°C"
    leased = None if gpu.capacity_bytes is None else gpu.own_leased_bytes + gpu.other_leased_bytes
    bar = _bar(gpu, max(4, min(_LONGEST_BAR, size.width - 60)), size.is_ascii)
    start = line((f"{name:<6} ", "bold"), *bar, ("  ", ""))
    percent = "?" if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"
    return start + joined(
        max(1, size.width - start.cell_len),
        (0, f"used {_gib(gpu.used_bytes, '?')} of {_gib(gpu.total_bytes, '?')} GiB", ""),
        (1, f"leased {_gib(leased, '?')} of {_gib(gpu.capacity_bytes, '?')}", ""),
        (2, f"busy {percent}", ""),
        (3, "" if gpu.temperature_c is None else f"{gpu.temperature_c} {degree}", ""),
        (4, gpu.name, "dim"),
    )


def _bar(gpu: GPURow, cells: int, is_ascii: bool) -> list[Part]:
    parts = [
        gpu.own_used_bytes,
        max(0, gpu.own_leased_bytes - gpu.own_used_bytes),
        max(gpu.other_leased_bytes, gpu.other_used_bytes),
        gpu.programs_bytes or 0,
    ]
    lengths = divided(cells, parts, gpu.total_bytes or 1)
    lengths.append(cells - sum(lengths))
    return [
        ((plain if is_ascii else letter) * length, style)
        for (letter, plain, style, _), length in zip(_PARTS, lengths, strict=True)
    ]


def divided(cells: int, parts: Sequence[int], total: int) -> list[int]:
    """Return the length in cells of each part of a bar. A visible part gets a length of at least one.

    ``cells``: length of the whole bar.
    ``parts``: sizes of the parts, in the same unit as ``total``.
    ``total``: size of the whole bar. The bar stands for the sum of the parts if this is larger.
    """
    whole = max(total, sum(parts), 1)
    shares = [cells * part / whole for part in parts]
    lengths = [max(1, round(share)) if share > _NOTHING else 0 for share in shares]
    # Rounding up can make the bar too long. Shorten the longest part, because it changes least in proportion.
    while sum(lengths) > cells:
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] -= 1
    return lengths


def _host(shown: Snapshot, width: int) -> list[Text]:
    """Return a line about leased cores and main memory, or an empty list if they are unknown."""
    host = shown.resources
    if host is None:
        return []
    memory = f"{_gib(host.memory_leased_bytes)} of {_gib(host.memory_capacity_bytes, '?')} GiB"
    return [
        joined(
            width,
            (0, "Cores", "bold"),
            (0, f"leased {host.cores_leased:.3g} of {host.cores:g}", ""),
            (1, f"memory leased {memory}", ""),
        )
    ]


# Runs


def _run(run: RunRow, width: int) -> Text:
    read = "" if run.read_part >= 1 else f"reading its trace: {100 * run.read_part:.0f} %"
    metrics = [f"{name} {run.metrics[name]:.4g}" for name in sorted(run.metrics, key=metric_rank)[:3]]
    if metrics and run.metrics_round != run.round:
        metrics[0] += f" in round {run.metrics_round}"
    fields = joined(
        width - 2,
        (0, run.run, "cyan"),
        (6, run.kind, "dim"),
        (0, read, "yellow"),
        (0, "" if run.round is None else f"round {run.round}{_of(run.num_rounds)}", ""),
        (2, _messages(run), ""),
        (6, "" if run.cores is None else f"{run.cores:.3g} cores", ""),
        *((3 + place, metric, "") for place, metric in enumerate(metrics)),
        (0, run.outcome, _OUTCOMES.get(run.outcome, "")),
        (7, "" if run.seconds is None else duration(run.seconds), "dim"),
        (8, "" if run.pid is None else f"pid {run.pid}", "dim"),
        (9, run.folder, "dim"),
    )
    return Text("  ") + fields


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"


def _messages(run: RunRow) -> str:
    """Return the progress of this round in messages, or in calls if the trace has no messages."""
    if run.messages_done is not None:
        return f"{run.task} {run.messages_done}{_of(run.messages)} done".strip()
    calls = [f"{count} {task}" for task, count in run.calls_done.items()]
    return f"{', '.join(calls)} done" if calls else ""


# Tables


@dataclass(frozen=True)
class _Section:
    """A table with a title."""

    summary: str  # number of rows, shown beside the title
    rows: Sequence[Any]
    columns: Sequence[Column]

    @property
    def height(self) -> int:
        return 1 + len(self.rows) + bool(self.rows)

    def lines(self, name: str, limit: int | None, browsing: Browsing, size: Size) -> list[Text]:
        """Return up to ``limit`` lines. The chosen table shows its window, the other table its first rows."""
        count, is_chosen = len(self.rows), browsing.table == name and limit is not None
        is_cut = limit is not None and self.height > limit
        room = max(0, (limit or 0) - (2 if is_chosen else 3)) if is_cut else count
        window = browsing.window(name, count, room)
        where = f"  {window.start + 1}-{window.stop} of {count}" if is_chosen and is_cut and window else ""
        title = line(
            (name, "bold reverse" if is_chosen else "bold"), (where, ""), (f"  {self.summary}", "dim")
        )
        if not window:
            return [title][:limit]
        values = {column.title: list(map(column.key, self.rows)) for column in self.columns if column.key}
        places, is_descending = browsing.in_order(name, values, count)
        mark = ("^v" if size.is_ascii else "▲▼")[is_descending]
        rows = [self.rows[place] for place in places[window.start : window.stop]]
        lines = [title, *table(self.columns, rows, size.width, (browsing.sorted_by(name), mark))]
        if is_cut and not is_chosen:
            lines.append(line((f"  ... {count - room} more", "dim")))
        return lines


def _limits(sections: dict[str, _Section], chosen: str, available: int) -> dict[str, int | None]:
    """Return the maximum number of lines by table. If both are too long, the chosen table gets two thirds."""
    (other,) = (name for name in sections if name != chosen)
    other_lines = min(sections[other].height, max(2, available // 3, available - sections[chosen].height))
    return {chosen: max(0, available - other_lines), other: max(0, min(available, other_lines))}


def _workers(shown: Snapshot, size: Size) -> _Section:
    rows = shown.workers
    counts = Counter(row.phase for row in rows)
    summary = ", ".join(f"{counts[phase]} {phase}" for phase in _PHASES if counts[phase])
    has_leases, has_hosts = any(row.lease_bytes for row in rows), any(row.host for row in rows)
    gpu_rank = 3 if len(shown.gpus) > 1 or has_hosts else 8
    account, is_short = shown.account, size.width < _WIDE
    columns = [
        Column("run", 5, lambda row: row.run or "-", lambda row: row.run, "cyan", False, 10),
        Column("host", 4, lambda row: row.host or "-", lambda row: row.host, "cyan", False, 14),
        Column(
            "client",
            0,
            lambda row: row.client or _lease_label(row, account),
            lambda row: row.client,
            "",
            False,
            10,
        ),
        Column("task", 2, lambda row: row.task or "-", None, "", False, 8),
        Column("round", 6, lambda row: _number(row.round), lambda row: row.round),
        Column("pid", 9, lambda row: _number(row.pid)),
        Column("gpu", gpu_rank, lambda row: _numbers(row) or "-"),
        Column("share", 1, lambda row: _gib(row.lease_bytes), lambda row: row.lease_bytes),
        Column("used", 4, lambda row: _gib(row.used_bytes), lambda row: row.used_bytes, _usage_style),
        Column("cores", 5, lambda row: _number(row.cores), lambda row: row.cores),
        Column("age", 1, lambda row: duration(row.seconds), lambda row: row.seconds),
        Column(
            "phase",
            0,
            lambda row: _phase(row, is_short=is_short),
            lambda row: row.phase,
            lambda row: _PHASES.get(row.phase, ""),
            False,
            16,
        ),
    ]
    is_shown = {
        "host": has_hosts,
        **dict.fromkeys(("gpu", "share", "used"), has_leases or bool(shown.gpus)),
        "cores": any(row.cores is not None for row in rows),
    }
    summary += "; memory in GiB" * has_leases
    return _Section(
        summary or "none", rows, [column for column in columns if is_shown.get(column.title, True)]
    )


def _usage_style(row: WorkerRow) -> str:
    return "red" if (row.used_bytes or 0) > (row.lease_bytes or 0) else ""


def _lease_label(row: WorkerRow | WaitingRow, account: str) -> str:
    """Return the label of a lease, or its user if it belongs to another account."""
    return row.label or "-" if row.user == account else f"user {row.user}"


def _phase(row: WorkerRow, *, is_short: bool) -> str:
    if row.progress_done is None:
        return row.phase
    progress = f"{row.progress} {row.progress_done}{_of(row.progress_total)}".strip()
    # Progress implies that the worker is running, so a narrow view omits the phase.
    return progress if is_short else f"{row.phase} {progress}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _gib(nbytes: int | None, unknown: str = "-") -> str:
    return unknown if nbytes is None else f"{nbytes / _GIB:.1f}"


def _numbers(row: WorkerRow | WaitingRow) -> str:
    return ",".join(map(str, row.gpus))


def _waiting(shown: Snapshot, size: Size) -> _Section:
    rows, account = shown.waiting, shown.account
    places = {id(row): place for place, row in enumerate(rows, start=1)}
    columns = [
        Column("", 2, lambda row: f"{places[id(row)]}."),
        Column("asks for", 0, _asked, None, "", False, 12),
        Column("for", 0, lambda row: _lease_label(row, account), lambda row: row.label, "", False, 8),
        Column("run", 3, lambda row: row.run or "-", lambda row: row.run, "cyan", False, 8),
        Column("pid", 4, lambda row: str(row.pid), None, "dim"),
        Column("age", 1, lambda row: duration(row.seconds), lambda row: row.seconds),
    ]
    return _Section(str(len(rows) or "nobody"), rows, columns)


def _asked(row: WaitingRow) -> str:
    if not row.count:
        cores = "" if row.asked_cores is None else f"{row.asked_cores:.3g} cores"
        memory = "" if row.asked_host_memory_bytes is None else f"{format_bytes(row.asked_host_memory_bytes)}"
        return ", ".join(filter(None, [cores, memory]))
    where = f"GPU {_numbers(row)}" if row.gpus else "a GPU that is not usable now"
    if row.count > 1:
        where = f"{row.count} of {where}"
    if row.asked_bytes is not None:
        return f"{format_bytes(row.asked_bytes)} on {where}"
    if row.asked_alone or row.asked_share is None:
        return f"all on {where}"
    return f"{row.asked_share:g} on {where}"
