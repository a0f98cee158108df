"""A snapshot as rich draws it on a terminal of a certain size."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.printable import format_bytes
from flower_gpu.watch.fields import metric_rank
from flower_gpu.watch.top import wide
from flower_gpu.watch.top.browsing import HELP, Browsing
from flower_gpu.watch.top.host_rows import RunHostRow
from flower_gpu.watch.top.past import Past
from flower_gpu.watch.top.snapshot import RunRow, Snapshot, WaitingRow, WorkerRow
from flower_gpu.watch.top.tables import Column, duration, gpu_lines, host_line, joined, table, text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

_GIB = 2**30
_Mark = tuple[str, str]  # a column's title, and what is written after it
_PHASES: Final = {"starting": "yellow", "running": "green", "exiting": "cyan", "idle": "dim", "held": "blue"}
_OUTCOMES: Final = {"completed": "green", "failed": "red", "interrupted": "yellow", "gone": "red"}
_SPACIOUS: Final = 40  # a terminal of so many lines has room for empty ones
_WIDE: Final = 100  # cells of a terminal in which nothing is said shortly
_ROOM_FOR_KEYS: Final = 40
_ROOM_FOR_HELP: Final = 16  # lines


@dataclass(frozen=True)
class Frame:
    """What is shown."""

    snapshot: Snapshot
    keys: str = ""  # what ends the view
    has_screen: bool = True  # no more lines than the terminal has
    past: Past | None = None  # what a wide terminal has graphs of
    browsing: Browsing | None = None  # what keys have chosen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw it."""
        shown, width = self.snapshot, options.max_width
        height = console.size.height if self.has_screen else None
        browsing = self.browsing or Browsing()
        top: list[RenderableType] = [*_header(shown, width, self.keys)]
        if self.browsing is not None and height is not None and height >= _ROOM_FOR_HELP:
            top.append(joined(width, *((rank, told, "dim") for rank, told in enumerate(HELP))))
        most = None if height is None else max(1, height // 3)
        block = wide.block_lines(shown, width, height) if self.past is not None else 0
        if self.past is not None and block:
            top += wide.lines(shown, self.past, width, block, is_ascii=options.ascii_only)
        else:
            top += gpu_lines(shown, width, most, is_ascii=options.ascii_only)
            top += host_line(shown, width)
        blank = [text()] if height is None or height >= _SPACIOUS else []
        hosts = [_hosts(shown.hosts, width)] if shown.hosts else []
        waiting = _waiting(shown, width, has_heads=bool(browsing.sorted_by("Waiting")))
        sections = [_runs(shown.runs, width), *hosts, _workers(shown, width), waiting]
        names = [section.name for section in sections]
        browsing.drawing(names)
        curves = wide.curves(shown.runs, width, height, is_ascii=options.ascii_only) if block else []
        left = None if height is None else height - len(top) - len(curves) - len(sections) * len(blank)
        limits = _limits(sections, left, names.index(browsing.table) if browsing.table else None)
        yield from top[:height]
        for section, limit in zip(sections, limits, strict=True):
            if left is not None and limit is not None:
                limit = max(0, min(limit, left))  # there may not be a line for each
                left -= limit
            yield from blank
            yield from section.lines(limit, browsing, "^v" if options.ascii_only else "▲▼")
            if section is sections[0]:
                yield from curves


def plain_lines(frame: Frame, width: int) -> list[str]:
    """Return a frame as text, as it is where nobody limits its height."""
    from rich.console import Console

    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(frame, crop=True, no_wrap=True)
    return [line.rstrip() for line in capture.get().splitlines()]


@dataclass(frozen=True)
class _Section:
    """Lines under a title."""

    name: str
    told: str  # how many there are
    rows: Sequence[Any] = ()
    # Draws the rows of these places; the column that they are sorted by has a mark.
    draw: Callable[[Sequence[int], _Mark], RenderableType] = field(default=lambda places, mark: text())
    has_heads: bool = False  # the columns have titles

    @property
    def height(self) -> int:
        return 1 + len(self.rows) + self.has_heads

    def lines(self, most: int | None, browsing: Browsing, marks: str) -> Iterator[RenderableType]:
        """Yield as many lines as there is room for: the window of the chosen table, else the first rows."""
        if most is not None and most < 1:
            return
        is_chosen, count = browsing.table == self.name, len(self.rows)
        is_cut = most is not None and self.height > most
        # The last line has how many were left out; of the chosen table, the title says which these are.
        room = max(0, (most or 0) - (1 if is_chosen else 2) - self.has_heads) if is_cut else count
        window = browsing.window(self.name, count, room)
        position = f"  {window.start + 1}-{window.stop} of {count}" if is_chosen and window and is_cut else ""
        yield text(
            (self.name, "bold reverse" if is_chosen else "bold"), (position, ""), (f"  {self.told}", "dim")
        )
        if window:
            places, falls = browsing.in_order(self.name, self.rows)
            yield self.draw(places[window.start : window.stop], (browsing.sorted_by(self.name), marks[falls]))
        if room < count and window and not is_chosen:
            yield text((f"  ... {count - room} more", "dim"))


def _limits(sections: Sequence[_Section], left: int | None, chosen: int | None) -> list[int | None]:
    """Divide lines among runs, hosts, workers and waiting.

    Runs get a quarter of them at most, and hosts a third of the rest, or what nobody else needs. Those that
    work and wait share what is left: workers get two thirds where both need more. A chosen table gets all
    that it needs but for the titles of the others, and a run or two.
    """
    if left is None:
        return [None] * len(sections)
    if chosen is not None:
        limits: list[int | None] = [1] * len(sections)
        left -= len(sections)
        for number, most in ((0, min(2, left // 3)), (chosen, left), *enumerate([left] * len(sections))):
            more = max(0, min(most, left, sections[number].height - (limits[number] or 0)))
            limits[number], left = (limits[number] or 0) + more, left - more
        return limits
    runs, *hosts, workers, waiting = (section.height for section in sections)
    of_runs = min(runs, max(2, left // 4))
    left -= of_runs
    of_hosts = [min(height, max(2, left // 3, left - workers - waiting)) for height in hosts]
    left -= sum(of_hosts)
    of_waiting = min(waiting, max(2, left // 3, left - workers))
    return [of_runs, *of_hosts, left - of_waiting, of_waiting]


def _header(snapshot: Snapshot, width: int, keys: str) -> list[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    keys = keys if width >= _ROOM_FOR_KEYS else ""
    title = joined(
        width - len(keys) - 2,
        (0, "flower-gpu top", "bold"),
        (1, snapshot.host, ""),
        (2, clock, "dim"),
    )
    title.append(" " * (width - title.cell_len - len(keys))).append(keys, "dim")
    problem = snapshot.ledger_problem
    return [title, text((f"leases: {problem}", "yellow"))] if problem else [title]


def _runs(runs: Sequence[RunRow], width: int) -> _Section:
    if not runs:
        return _Section("Runs", "none of this account goes on here")

    def draw(places: Sequence[int], mark: _Mark) -> RenderableType:
        from rich.console import Group

        return Group(*(_run_line(runs[place], width) for place in places))

    return _Section("Runs", str(len(runs)), runs, draw)


def _run_line(run: RunRow, width: int) -> Text:
    read = "" if run.read_part >= 1 else f"reading its trace: {100 * run.read_part:.0f} %"
    line = joined(
        width - 2,
        (0, run.run, "cyan"),
        (6, run.kind, "dim"),
        (0, read, "yellow"),
        (0, "" if run.round is None else f"round {run.round}{_of(run.num_rounds)}", ""),
        (2, _messages(run, is_short=width < _WIDE), ""),
        (6, "" if run.cores is None else f"cores {run.cores:.3g}", ""),
        (5, "" if run.seconds_left is None else f"{duration(run.seconds_left)} left", ""),
        *((3 + place, metric, "") for place, metric in enumerate(_metrics(run, 3))),
        (0, run.outcome, _OUTCOMES.get(run.outcome, "")),
        (7, "" if run.seconds is None else duration(run.seconds), "dim"),
        (8, "" if run.pid is None else f"pid {run.pid}", "dim"),
        (9, run.folder, "dim"),
    )
    return text(("  ", "")).append_text(line)


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"


def _messages(run: RunRow, *, is_short: bool) -> str:
    if run.messages_done is None:
        calls = [f"{count} {task}" for task, count in run.calls_done.items()]
        return f"{', '.join(calls)} done" if calls else ""
    done = f"{run.messages_done}{_of(run.messages)}"
    if run.messages_to_come is None:
        return f"{run.task} {done} messages".strip()
    to_come = f"{run.messages_to_come} to come"
    if is_short:
        return f"{run.task} {done}, {to_come}".strip()
    now = [(run.messages_running, "running"), (run.messages_waiting, "waiting")]
    parts = [f"{run.task} {done} done".strip(), *(f"{count} {what}" for count, what in now if count), to_come]
    return ", ".join(parts)


def _metrics(run: RunRow, most: int) -> list[str]:
    texts = [f"{name} {run.metrics[name]:.4g}" for name in sorted(run.metrics, key=metric_rank)[:most]]
    if texts and run.metrics_round != run.round:
        texts[0] += f" in round {run.metrics_round}"
    return texts


def _hosts(rows: Sequence[RunHostRow], width: int) -> _Section:
    lost, has_gpus = sum(row.lost is not None for row in rows), any(row.gpus for row in rows)
    told = ", ".join([str(len(rows))] + [f"{lost} lost"] * bool(lost))

    def draw(places: Sequence[int], mark: _Mark) -> RenderableType:
        columns = _host_columns([rows[place] for place in places], has_gpus)
        return table(_marked(columns, mark), width, has_titles=True)

    return _Section("Hosts", told + "; memory in GiB" * has_gpus, rows, draw, has_heads=True)


def _host_columns(rows: Sequence[RunHostRow], has_gpus: bool) -> list[Column]:
    columns = [
        Column("host", [(row.host, "cyan") for row in rows], 0, least=20),
        _figures(
            "under way",
            0,
            ["-" if row.lost is not None else f"{row.messages}/{row.concurrency}" for row in rows],
        ),
        _figures("done", 1, [str(row.calls_done) for row in rows]),
        Column(
            "failed", [(str(row.calls_failed), "red" if row.calls_failed else "") for row in rows], 1, "right"
        ),
        _figures("cores", 5, ["-" if row.cores is None else str(row.cores) for row in rows]),
    ]
    if len({row.run for row in rows}) > 1:
        columns.insert(0, Column("run", [(row.run, "cyan") for row in rows], 5, least=10))
    if has_gpus:
        busy = [row.utilization_percent for row in rows]
        used = [f"{_gib(row.used_bytes)}/{_gib(row.total_bytes)}" for row in rows]
        columns += [
            _figures("gpus", 4, [str(row.gpus) for row in rows]),
            _figures("share", 3, [_gib(row.leased_bytes) for row in rows]),
            _figures("used", 2, ["-" if told == "-/-" else told for told in used]),
            _figures("busy", 2, ["-" if percent is None else f"{percent:.0f}%" for percent in busy]),
        ]
    ages = ["-" if row.seconds is None else duration(row.seconds) for row in rows]
    columns.append(_figures("age", 6, ages))
    if any(lost := ["" if row.lost is None else f"lost: {row.lost}" for row in rows]):
        columns.append(Column("", [(told, "red") for told in lost], 0, least=16))
    return columns


def _workers(snapshot: Snapshot, width: int) -> _Section:
    rows = snapshot.workers
    if not rows:
        return _Section("Workers", "none")
    counts = Counter(row.phase for row in rows)
    told = ", ".join(f"{counts[phase]} {phase}" for phase in _PHASES if counts[phase])
    has_leases = any(row.gpus or row.lease_bytes for row in rows)

    def draw(places: Sequence[int], mark: _Mark) -> RenderableType:
        columns = _worker_columns(snapshot, [rows[place] for place in places], width, has_leases=has_leases)
        return table(_marked(columns, mark), width, has_titles=True)

    return _Section("Workers", told + "; memory in GiB" * has_leases, rows, draw, has_heads=True)


def _worker_columns(
    snapshot: Snapshot, rows: Sequence[WorkerRow], width: int, *, has_leases: bool
) -> list[Column]:
    own, is_short = snapshot.account, width < _WIDE
    has_hosts = any(row.host for row in rows)
    columns = [
        Column("run", [(row.run or "-", "cyan") for row in rows], 5, least=10),
        *([Column("host", [(row.host or "-", "cyan") for row in rows], 4, least=14)] if has_hosts else []),
        Column("client", [(row.client or _whose(row, own), "") for row in rows], 0, least=10),
        Column("task", [(row.task or "-", "") for row in rows], 2, least=8),
        _figures("round", 6, ["-" if row.round is None else str(row.round) for row in rows]),
        _figures("pid", 9, ["-" if row.pid is None else str(row.pid) for row in rows]),
    ]
    if has_leases or snapshot.gpus:
        used = [
            (_gib(row.used_bytes), "red" if (row.used_bytes or 0) > (row.lease_bytes or 0) else "")
            for row in rows
        ]
        columns += [
            _figures(
                "gpu", 3 if len(snapshot.gpus) > 1 or has_hosts else 8, [_numbers(row) or "-" for row in rows]
            ),
            _figures("share", 1, [_gib(row.lease_bytes) for row in rows]),
            Column("used", used, 4, "right"),
            _figures("peak", 7, [_gib(row.peak_bytes) for row in rows]),
        ]
    if any(row.cores is not None for row in rows):
        columns.append(_figures("cores", 5, [_cores(row.cores) for row in rows]))
    phases = [(_phase(row, is_short=is_short), _PHASES.get(row.phase, "")) for row in rows]
    columns += [
        _figures("age", 1, [duration(row.seconds) for row in rows]),
        Column("phase", phases, 0, least=16),
    ]
    return columns


def _marked(columns: Sequence[Column], mark: _Mark) -> list[Column]:
    """Mark the column that the rows are sorted by; it does not give way."""
    title, letter = mark
    return [
        replace(one, title=f"{title}{letter}", rank=0) if title and one.title == title else one
        for one in columns
    ]


def _figures(title: str, rank: int, figures: Sequence[str], style: str = "") -> Column:
    return Column(title, [(figure, style) for figure in figures], rank, "right")


def _whose(row: WorkerRow | WaitingRow, own: str) -> str:
    """Return what a lease is for; of another account's nobody else is told that."""
    return row.label or "-" if row.user == own else f"user {row.user}"


def _phase(row: WorkerRow, *, is_short: bool) -> str:
    if row.progress_done is None:
        return row.phase
    progress = f"{row.progress} {row.progress_done}{_of(row.progress_total)}".strip()
    # A worker that makes progress is running.
    return progress if is_short else f"{row.phase} {progress}"


def _cores(cores: float | None) -> str:
    return "-" if cores is None else f"{cores:.3g}"


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _GIB:.1f}"


def _numbers(row: WorkerRow | WaitingRow) -> str:
    return ",".join(map(str, row.gpus))


def _waiting(snapshot: Snapshot, width: int, *, has_heads: bool) -> _Section:
    rows, own = snapshot.waiting, snapshot.account

    def draw(places: Sequence[int], mark: _Mark) -> RenderableType:
        shown = [rows[place] for place in places]
        columns = [
            _figures("", 2, [f"{place + 1}." for place in places]),
            Column("", [(_asked(row), "") for row in shown], 0),
            Column("for" * has_heads, [(_whose(row, own), "") for row in shown], 0, least=8),
            Column("run" * has_heads, [(row.run or "-", "cyan") for row in shown], 3, least=8),
            _figures("", 4, [f"pid {row.pid}" for row in shown], "dim"),
            _figures("age" * has_heads, 1, [duration(row.seconds) for row in shown]),
        ]
        return table(_marked(columns, mark), width, has_titles=has_heads)

    return _Section("Waiting", str(len(rows) or "nobody"), rows, draw, has_heads and bool(rows))


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
