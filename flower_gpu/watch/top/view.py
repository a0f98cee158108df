"""A snapshot as rich draws it on a terminal of a certain size."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from flower_gpu.leases.request import format_bytes
from flower_gpu.watch.top import wide
from flower_gpu.watch.top.host_rows import RunHostRow
from flower_gpu.watch.top.past import Past
from flower_gpu.watch.top.snapshot import RunRow, Snapshot, WaitingRow, WorkerRow
from flower_gpu.watch.top.tables import Column, duration, gpu_lines, host_line, joined, table, text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

_GIB = 2**30
_PHASES: Final = {"starting": "yellow", "running": "green", "exiting": "cyan", "idle": "dim", "held": "blue"}
_OUTCOMES: Final = {"completed": "green", "failed": "red", "interrupted": "yellow", "gone": "red"}
#: Shown first of an evaluation's metrics.
_METRICS: Final = ("accuracy", "loss", "f1")
_SPACIOUS: Final = 40  # a terminal of so many lines has room for empty ones
_WIDE: Final = 100  # cells of a terminal in which nothing is said shortly
_ROOM_FOR_KEYS: Final = 40


@dataclass(frozen=True)
class Frame:
    """What is shown."""

    snapshot: Snapshot
    keys: str = ""  # what ends the view
    has_screen: bool = True  # no more lines than the terminal has
    past: Past | None = None  # what a wide terminal has graphs of

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw it."""
        shown, width = self.snapshot, options.max_width
        height = console.size.height if self.has_screen else None
        top: list[RenderableType] = [*_header(shown, width, self.keys)]
        most = None if height is None else max(1, height // 3)
        block = wide.block_lines(shown, width, height) if self.past is not None else 0
        if self.past is not None and block:
            top += wide.lines(shown, self.past, width, block, is_ascii=options.ascii_only)
        else:
            top += gpu_lines(shown, width, most, is_ascii=options.ascii_only)
            top += host_line(shown, width)
        blank = [text()] if height is None or height >= _SPACIOUS else []
        hosts = [_hosts(shown.hosts, width)] if shown.hosts else []
        sections = [_runs(shown.runs, width), *hosts, _workers(shown, width), _waiting(shown, width)]
        taken = len(top) + len(sections) * len(blank)
        limits = _limits(sections, None if height is None else height - taken)
        yield from top
        for section, limit in zip(sections, limits, strict=True):
            yield from blank
            yield from section.lines(limit)


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

    title: Text
    count: int = 0  # of rows
    draw: Callable[[int], RenderableType] = field(default=lambda most: text())  # the first of them
    has_heads: bool = False  # the columns have titles

    @property
    def height(self) -> int:
        return 1 + self.count + self.has_heads

    def lines(self, most: int | None) -> Iterator[RenderableType]:
        """Yield as many lines as there is room for, the last with how many were left out."""
        yield self.title  # says how many there are
        if most is None or self.height <= most:
            room, left_out = self.count, 0
        else:
            room = max(0, most - 2 - self.has_heads)
            left_out = self.count - room
        if room:
            yield self.draw(room)
        if room and left_out:
            yield text((f"  ... {left_out} more", "dim"))


def _limits(sections: Sequence[_Section], left: int | None) -> list[int | None]:
    """Divide lines among runs, hosts, workers and waiting.

    Runs get a quarter of them at most, and hosts a third of the rest, or what nobody else needs. Those that
    work and wait share what is left: workers get two thirds where both need more.
    """
    if left is None:
        return [None] * len(sections)
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
        return _Section(text(("Runs", "bold"), ("  none of this account goes on here", "dim")))

    def draw(most: int) -> RenderableType:
        from rich.console import Group

        return Group(*(_run_line(run, width) for run in runs[:most]))

    return _Section(text(("Runs", "bold"), (f"  {len(runs)}", "dim")), len(runs), draw)


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
        (6, "" if run.seconds_left is None else f"{duration(run.seconds_left)} left", ""),
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
    rest = [name for name in run.metrics if name not in _METRICS]
    names = [*(name for name in _METRICS if name in run.metrics), *rest][:most]
    texts = [f"{name} {run.metrics[name]:.4g}" for name in names]
    if texts and run.metrics_round != run.round:
        texts[0] += f" in round {run.metrics_round}"
    return texts


def _hosts(rows: Sequence[RunHostRow], width: int) -> _Section:
    lost, has_gpus = sum(row.lost is not None for row in rows), any(row.gpus for row in rows)
    told = ", ".join([str(len(rows))] + [f"{lost} lost"] * bool(lost))
    title = text(("Hosts", "bold"), (f"  {told}{'; memory in GiB' if has_gpus else ''}", "dim"))
    return _Section(title, len(rows), lambda most: _host_table(rows[:most], width, has_gpus), has_heads=True)


def _host_table(rows: Sequence[RunHostRow], width: int, has_gpus: bool) -> RenderableType:
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
    return table(columns, width, has_titles=True)


def _workers(snapshot: Snapshot, width: int) -> _Section:
    rows = snapshot.workers
    if not rows:
        return _Section(text(("Workers", "bold"), ("  none", "dim")))
    counts = Counter(row.phase for row in rows)
    told = ", ".join(f"{counts[phase]} {phase}" for phase in _PHASES if counts[phase])
    has_leases = any(row.gpus or row.lease_bytes for row in rows)
    title = text(("Workers", "bold"), (f"  {told}{'; memory in GiB' if has_leases else ''}", "dim"))
    return _Section(
        title,
        len(rows),
        lambda most: _worker_table(snapshot, rows[:most], width, has_leases=has_leases),
        has_heads=True,
    )


def _worker_table(
    snapshot: Snapshot, rows: Sequence[WorkerRow], width: int, *, has_leases: bool
) -> RenderableType:
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
    return table(columns, width, has_titles=True)


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


def _waiting(snapshot: Snapshot, width: int) -> _Section:
    rows, own = snapshot.waiting, snapshot.account
    title = text(("Waiting", "bold"), (f"  {len(rows) or 'nobody'}", "dim"))

    def draw(most: int) -> RenderableType:
        shown = rows[:most]
        columns = [
            _figures("", 2, [f"{place}." for place in range(1, len(shown) + 1)]),
            Column("", [(_asked(row), "") for row in shown], 0),
            Column("", [(_whose(row, own), "") for row in shown], 0, least=8),
            Column("", [(row.run or "-", "cyan") for row in shown], 3, least=8),
            _figures("", 4, [f"pid {row.pid}" for row in shown], "dim"),
            _figures("", 1, [duration(row.seconds) for row in shown]),
        ]
        return table(columns, width, has_titles=False)

    return _Section(title, len(rows), draw)


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
