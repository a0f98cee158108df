"""A snapshot as lines of a terminal of a certain size; a pure function of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from flower_gpu.gpu.request import format_bytes
from flower_gpu.monitor.top.gpus import gpu_lines
from flower_gpu.monitor.top.lines import UNICODE, Column, Glyphs, Line, joined, table
from flower_gpu.monitor.top.snapshot import RunRow, Snapshot, WaitingRow, WorkerRow

if TYPE_CHECKING:
    from rich.console import RenderableType

_GIB = 2**30
_PHASES: Final = {"starting": "yellow", "running": "green", "exiting": "cyan", "idle": "dim", "held": "blue"}
_OUTCOMES: Final = {"completed": "green", "failed": "red", "interrupted": "yellow", "gone": "red"}
#: Shown first of an evaluation's metrics.
_METRICS: Final = ("accuracy", "loss", "f1")
_SPACIOUS: Final = 40  # a terminal of so many lines has room for empty ones
_WIDE: Final = 100  # cells of a terminal in which nothing is said shortly
_ROOM_FOR_KEYS: Final = 40


def rendered(lines: Sequence[Line]) -> RenderableType:
    """Return lines as rich draws them."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(Text.assemble(*line.parts, no_wrap=True, overflow="crop") for line in lines))


def frame(
    snapshot: Snapshot, width: int, height: int | None, *, keys: str = "", glyphs: Glyphs = UNICODE
) -> list[Line]:
    """Return what is shown.

    Parameters
    ----------
    snapshot : Snapshot
        What was seen.
    width : int
        Cells of the terminal's lines.
    height : int or None
        Lines of the terminal; None: as many as it takes.
    keys : str
        What ends the view.
    glyphs : Glyphs
        What the terminal can show.
    """
    width = max(1, width)
    top = _header(snapshot, width, keys)
    top += gpu_lines(snapshot, width, None if height is None else max(1, height // 3), glyphs)
    blank = [Line()] if height is None or height >= _SPACIOUS else []
    runs = _runs(snapshot.runs, width)
    workers = _workers(snapshot, width, glyphs)
    waiting = _waiting(snapshot, width, glyphs)
    most: tuple[int | None, int | None, int | None] = (None, None, None)
    if height is not None:
        # Who works and who waits share what runs leave; who works gets two thirds where both need more.
        left = height - len(top) - 3 * len(blank)
        of_runs = min(runs.height, max(2, left // 4))
        left -= of_runs
        of_waiting = min(waiting.height, max(2, left // 3, left - workers.height))
        most = (of_runs, left - of_waiting, of_waiting)
    for section, limit in zip((runs, workers, waiting), most, strict=True):
        top += blank + section.lines(limit)
    return [line.cut(width, glyphs.more) for line in top[:height]]


@dataclass(frozen=True)
class _Section:
    """Lines under a title, and maybe the titles of columns."""

    head: list[Line]
    rows: list[Line] = field(default_factory=list)

    @property
    def height(self) -> int:
        return len(self.head) + len(self.rows)

    def lines(self, most: int | None) -> list[Line]:
        """Return as many lines as there is room for, the last with how many were left out."""
        if most is None or self.height <= most:
            return [*self.head, *self.rows]
        room = most - len(self.head) - 1
        if room < 1:
            return self.head[:1]  # which says how many there are
        more = Line().add(f"  ... {len(self.rows) - room} more", "dim")
        return [*self.head, *self.rows[:room], more]


def _header(snapshot: Snapshot, width: int, keys: str) -> list[Line]:
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    keys = keys if width >= _ROOM_FOR_KEYS else ""
    title = joined(
        width - len(keys) - 2,
        (0, "flower-gpu top", "bold"),
        (1, snapshot.host, ""),
        (2, clock, "dim"),
    )
    title.add(" " * (width - title.width - len(keys))).add(keys, "dim")
    lines = [title]
    if snapshot.ledger_problem:
        lines.append(Line().add(f"leases: {snapshot.ledger_problem}", "yellow"))
    return lines


# Runs -----------------------------------------------------------------------------------------------------


def _runs(runs: Sequence[RunRow], width: int) -> _Section:
    if not runs:
        return _Section([Line().add("Runs", "bold").add("  none of this account goes on here", "dim")])
    title = Line().add("Runs", "bold").add(f"  {len(runs)}", "dim")
    return _Section([title], [_run_line(run, width) for run in runs])


def _run_line(run: RunRow, width: int) -> Line:
    line = Line().add("  ")
    line.parts += joined(
        width - 2,
        (0, run.run, "cyan"),
        (6, run.kind, "dim"),
        (0, _read_part(run), "yellow"),
        (0, _round(run), ""),
        (2, _messages(run), ""),
        *((3 + place, text, "") for place, text in enumerate(_metrics(run, 3))),
        (0, run.outcome, _OUTCOMES.get(run.outcome, "")),
        (7, "" if run.seconds is None else duration(run.seconds), "dim"),
        (8, "" if run.pid is None else f"pid {run.pid}", "dim"),
        (9, run.folder, "dim"),
    ).parts
    return line


def _read_part(run: RunRow) -> str:
    return "" if run.read_part >= 1 else f"reading its trace: {100 * run.read_part:.0f} %"


def _round(run: RunRow) -> str:
    if run.round is None:
        return ""
    of = f"/{run.num_rounds}" if run.num_rounds is not None else ""
    return f"round {run.round}{of}"


def _messages(run: RunRow) -> str:
    if run.messages_done is not None:
        of = f"/{run.messages}" if run.messages is not None else ""
        return f"{run.task} {run.messages_done}{of} messages".strip()
    done = [f"{count} {task}" for task, count in run.calls_done.items()]
    return f"{', '.join(done)} done" if done else ""


def _metrics(run: RunRow, most: int) -> list[str]:
    rest = [name for name in run.metrics if name not in _METRICS]
    names = [*(name for name in _METRICS if name in run.metrics), *rest][:most]
    texts = [f"{name} {run.metrics[name]:.4g}" for name in names]
    if texts and run.metrics_round != run.round:
        texts[0] += f" in round {run.metrics_round}"
    return texts


# Workers --------------------------------------------------------------------------------------------------


def _workers(snapshot: Snapshot, width: int, glyphs: Glyphs) -> _Section:
    rows = snapshot.workers
    title = Line().add("Workers", "bold")
    if not rows:
        return _Section([title.add("  none", "dim")])
    counts = {phase: sum(row.phase == phase for row in rows) for phase in _PHASES}
    told = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
    title.add(f"  {told}", "dim")
    has_leases = any(row.lease for row in rows)
    title.add("; memory in GiB" if has_leases else "", "dim")

    def column(
        title: str, rank: int, text: Callable[[WorkerRow], str], align: str = ">", least: int = 0
    ) -> Column:
        return Column(title, [(text(row), "") for row in rows], rank, align, least)

    own = snapshot.account
    columns = [
        Column("run", [(row.run or "-", "cyan") for row in rows], 5, "<", 10),
        column("client", 0, lambda row: row.client or _whose(row, own), "<", 10),
        column("task", 2, lambda row: row.task or "-", "<", 8),
        column("round", 6, lambda row: "-" if row.round is None else str(row.round)),
        column("pid", 9, lambda row: "-" if row.pid is None else str(row.pid)),
    ]
    if has_leases or snapshot.gpus:
        which = 3 if len(snapshot.gpus) > 1 else 8
        columns += [
            column("gpu", which, lambda row: ",".join(map(str, row.gpus)) or "-"),
            column("share", 1, lambda row: _gib(row.lease_bytes)),
            Column("used", [(_gib(row.used_bytes), _too_much(row)) for row in rows], 4, ">"),
            column("peak", 7, lambda row: _gib(row.peak_bytes)),
        ]
    phases = [(_phase(row, is_short=width < _WIDE), _PHASES.get(row.phase, "")) for row in rows]
    columns += [
        column("age", 1, lambda row: duration(row.seconds)),
        Column("phase", phases, 0, "<", 16),
    ]
    titles, *lines = (Line([("  ", ""), *line.parts]) for line in table(columns, width - 2, glyphs.more))
    return _Section([title, titles], lines)


def _whose(row: WorkerRow | WaitingRow, own: str) -> str:
    """Return what a lease is for; of another account's nobody else is told that."""
    return row.label or "-" if row.user == own else f"user {row.user}"


def _phase(row: WorkerRow, *, is_short: bool) -> str:
    if row.progress_done is None:
        return row.phase
    of = "" if row.progress_total is None else f"/{row.progress_total}"
    progress = f"{row.progress} {row.progress_done}{of}".strip()
    # Who makes progress is running.
    return progress if is_short else f"{row.phase} {progress}"


def _too_much(row: WorkerRow) -> str:
    return "red" if (row.used_bytes or 0) > (row.lease_bytes or 0) else ""


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _GIB:.1f}"


# Those who wait -------------------------------------------------------------------------------------------


def _waiting(snapshot: Snapshot, width: int, glyphs: Glyphs) -> _Section:
    rows = snapshot.waiting
    title = Line().add("Waiting", "bold").add(f"  {len(rows) or 'nobody'}", "dim")
    if not rows:
        return _Section([title])
    own = snapshot.account
    columns = [
        Column("", [(f"{place}.", "") for place in range(1, len(rows) + 1)], 2, ">"),
        Column("", [(_asked(row), "") for row in rows], 0),
        Column("", [(_whose(row, own), "") for row in rows], 0, least=8),
        Column("", [(row.run or "-", "cyan") for row in rows], 3, least=8),
        Column("", [(f"pid {row.pid}", "dim") for row in rows], 4, ">"),
        Column("", [(duration(row.seconds), "") for row in rows], 1, ">"),
    ]
    _, *lines = table(columns, width - 2, glyphs.more)
    return _Section([title], [Line([("  ", ""), *line.parts]) for line in lines])


def _asked(row: WaitingRow) -> str:
    numbers = ",".join(map(str, row.gpus))
    where = f"GPU {numbers}" if numbers else "a GPU that is not usable now"
    if row.count > 1:
        where = f"{row.count} of {where}"
    if row.asked_bytes is not None:
        return f"{format_bytes(row.asked_bytes)} on {where}"
    if row.asked_alone or row.asked_share is None:
        return f"all on {where}"
    return f"{row.asked_share:g} on {where}"


def duration(seconds: float) -> str:
    """Write seconds for people: ``"0:05"``, ``"1:02:03"``, ``"3d 04h"``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
