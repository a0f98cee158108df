"""Lines, tables and GPUs for a terminal of a certain width: less important parts give way without room.

Names come from others: every text goes through :func:`text`, or a cell of a table, so that there is nothing
in it that a terminal obeys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from flower_gpu.printable import printable
from flower_gpu.watch.top.snapshot import GPURow, HostRow, Snapshot

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_ROOMY: Final = 100  # cells of a terminal in which columns stand further apart
_INDENT: Final = "  "
_GIB = 2**30
_LONGEST_BAR: Final = 64
_NOTHING: Final = 0.05  # of a cell
_BESIDE: Final = 26  # cells beside a bar, for what is leased
#: The parts of a bar: letter, letter of a terminal that knows ASCII only, style, meaning.
_PARTS: Final = (
    ("█", "#", "green", "used"),
    ("▒", "+", "green", "leased"),
    ("▚", "o", "magenta", "other users"),
    ("▬", "=", "yellow", "other programs"),
    ("·", ".", "dim", "free"),
)


def text(*parts: tuple[str, str]) -> Text:
    """Return one line of texts with their styles; what is too long is cut off."""
    from rich.text import Text

    return Text.assemble(
        *((printable(part), style) for part, style in parts if part), no_wrap=True, overflow="ellipsis"
    )


def joined(width: int, *fields: tuple[int, str, str], gap: str = "  ") -> Text:
    """Return the fields that fit beside each other.

    A field is its rank, its text and its style; an empty one is left out. The fields of the highest rank give
    way first, and of equal ones the last.
    """
    kept = [(rank, text((told, style))) for rank, told, style in fields if told]
    while len(kept) > 1 and sum(each.cell_len + len(gap) for _, each in kept) - len(gap) > width:
        _, place = max((rank, place) for place, (rank, _) in enumerate(kept))
        del kept[place]
    return text((gap, "")).join(each for _, each in kept)


def duration(seconds: float) -> str:
    """Write seconds for people: ``"0:05"``, ``"1:02:03"``, ``"3d 04h"``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    cells: Sequence[tuple[str, str]]  # texts and their styles, from the top
    rank: int  # the columns of the highest rank give way first; those of rank 0 never
    justify: Literal["default", "right"] = "default"
    least: int = 0  # texts may be cut off down to so many cells; 0: not at all

    @property
    def width(self) -> int:
        """Cells that it takes if nothing is cut off."""
        from rich.cells import cell_len

        return max(len(self.title), *(cell_len(printable(told)) for told, _ in self.cells), 0)


def table(columns: Sequence[Column], width: int, *, has_titles: bool) -> Table:
    """Lay columns out beside each other, in no more than so many cells; two stay free in front."""
    from rich.table import Table

    gap, room = 2 if width >= _ROOMY else 1, width - len(_INDENT)
    kept, widths = list(columns), _narrowed(columns, room, gap)
    while sum(widths) + gap * (len(kept) - 1) > room and (rank := max(one.rank for one in kept)):
        kept = [column for column in kept if column.rank != rank]
        widths = _narrowed(kept, room, gap)
    widths[0] += len(_INDENT)
    made = Table.grid(padding=(0, gap, 0, 0))
    for column, cells in zip(kept, widths, strict=True):
        made.add_column(justify=column.justify, width=cells, no_wrap=True)
    # A cell of many lines for each column: rich takes several times as long for a cell of each line.
    made.add_row(*(_cell(column, has_titles, "" if place else _INDENT) for place, column in enumerate(kept)))
    return made


def _cell(column: Column, has_title: bool, indent: str) -> Text:
    from rich.text import Text

    lines = [(column.title, "dim")] if has_title else []
    parts = [
        part
        for told, style in (*lines, *column.cells)
        for part in ((indent, ""), (printable(told), style), ("\n", ""))
    ]
    return Text.assemble(*parts[:-1], no_wrap=True, overflow="ellipsis")


def _narrowed(columns: Sequence[Column], width: int, gap: int) -> list[int]:
    """Make columns narrower until they fit, the widest first, none below its least."""
    now = [column.width for column in columns]
    for _ in range(sum(now) + gap * (len(now) - 1) - width):
        can = [place for place, one in enumerate(columns) if one.least and now[place] > one.least]
        if not can:
            break
        now[max(can, key=now.__getitem__)] -= 1
    return now


# GPUs: a bar of memory, and numbers


def gpu_lines(snapshot: Snapshot, width: int, most: int | None, *, is_ascii: bool) -> list[Text]:
    """Return the GPUs: two lines each and what the bars mean, or one each where there are at most so many."""
    gpus = snapshot.gpus
    if not gpus:
        return [text(("No GPU: ", "bold"), (snapshot.gpu_problem or "see flower-gpu gpus", ""))]
    long = [line for gpu in gpus for line in long_lines(gpu, width, is_ascii)]
    if most is None or len(long) + 1 <= most:
        return [*long, meanings(is_ascii)]
    short = [_one_line(gpu, width, is_ascii) for gpu in gpus]
    if len(gpus) <= most:
        return short
    return [*short[: most - 1], text((f"  ... {len(gpus) - most + 1} more GPUs", "dim"))]


def host_line(snapshot: Snapshot, width: int) -> list[Text]:
    """Return a line with the cores and the main memory that are leased; none where that is not known."""
    host = snapshot.resources
    if host is None:
        return []
    return [joined(width, *cores_fields(host), (1, memory_text(host), ""))]


def cores_fields(host: HostRow) -> list[tuple[int, str, str]]:
    """Return what is told of cores, for :func:`joined`."""
    busy = "" if host.cores_busy_percent is None else f"busy {host.cores_busy_percent:.0f}%"
    leased = f"leased {host.cores_leased:.3g} of {host.cores:g}"
    return [(0, "Cores", "bold"), (0, leased, ""), (2, busy, "")]


def memory_text(host: HostRow) -> str:
    """Tell how much of the main memory is leased."""
    return f"memory leased {_gib(host.memory_leased_bytes)} of {_gib(host.memory_capacity_bytes)} GiB"


def cores_bar(host: HostRow, width: int, is_ascii: bool) -> Text:
    """Return a bar of the cores: those that are leased."""
    cells = _bar_cells(width)
    leased = round(cells * min(1.0, host.cores_leased / host.cores)) if host.cores else 0
    parts = []
    for which, count in (("leased", leased), ("free", cells - leased)):
        letter, plain, style, _ = next(part for part in _PARTS if part[3] == which)
        parts.append(((plain if is_ascii else letter) * count, style))
    return text(("  ", ""), *parts)


def meanings(is_ascii: bool) -> Text:
    """Return what the parts of bars mean."""
    told = [
        part
        for letter, plain, style, meaning in _PARTS
        for part in ((plain if is_ascii else letter, style), (f" {meaning}  ", "dim"))
    ]
    return text(("  ", ""), *told)


def who_line(gpu: GPURow, width: int) -> Text:
    """Return who has how much of a GPU, as the parts of its bar show it."""
    others = max(gpu.other_leased_bytes, gpu.other_used_bytes)
    told = [
        f"own leases: {_gib(gpu.own_used_bytes)} of {_gib(gpu.own_leased_bytes)} used",
        f"other users {_gib(others)}",
        f"other programs {_gib(gpu.programs_bytes)}",
    ]
    return text(("  ", "")).append_text(
        joined(width - 2, *((place, one, "dim") for place, one in enumerate(told)))
    )


def long_lines(gpu: GPURow, width: int, is_ascii: bool) -> list[Text]:
    """Return a GPU's two lines: numbers, and the bar of its memory; or one, with what is wrong with it."""
    title = [(0, _name(gpu), "bold"), (1, gpu.name or "model unknown", "")]
    if problem := _problem(gpu):
        return [joined(width, *title), text((f"  {problem}", "red"))]
    used = f"used {_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} GiB"
    busy, celsius = f"busy {_percent(gpu)}", _celsius(gpu, is_ascii)
    first = joined(width, *title, (0, used, ""), (0, busy, ""), (0, celsius, ""))
    bar = _bar(gpu, _bar_cells(width), is_ascii)
    leased = f"  leased {_gib(_leased(gpu))} of {_gib(gpu.capacity_bytes)} GiB"
    return [first, text(("  ", ""), *bar, (leased, ""))]


def _bar_cells(width: int) -> int:
    return max(1, min(_LONGEST_BAR, width - 2 - _BESIDE))


def _one_line(gpu: GPURow, width: int, is_ascii: bool) -> Text:
    if problem := _problem(gpu):
        return text((_name(gpu), "bold"), (f" {problem}", "red"))
    line = text((f"{_name(gpu):<7} ", "bold"), *_bar(gpu, max(4, min(40, width - 56)), is_ascii), (" ", ""))
    return line.append_text(
        joined(
            max(1, width - line.cell_len),
            (0, f"{_gib(gpu.used_bytes):>5}/{_gib(gpu.total_bytes)} GiB", ""),
            (1, f"leased {_gib(_leased(gpu)):>5}/{_gib(gpu.capacity_bytes)}", ""),
            (2, f"{_percent(gpu):>4}", ""),
            (3, _celsius(gpu, is_ascii), ""),
            gap=" ",
        )
    )


def _name(gpu: GPURow) -> str:
    return f"GPU {gpu.index}" + (" MIG" if gpu.mig_parent else "")


def _problem(gpu: GPURow) -> str:
    return gpu.problem or ("" if gpu.total_bytes else "its memory is not told")


def _leased(gpu: GPURow) -> int | None:
    return None if gpu.capacity_bytes is None else gpu.own_leased_bytes + gpu.other_leased_bytes


def _percent(gpu: GPURow) -> str:
    return "?" if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"


def _celsius(gpu: GPURow, is_ascii: bool) -> str:
    return "" if gpu.temperature_c is None else f"{gpu.temperature_c} {'' if is_ascii else '°'}C"


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / _GIB:.1f}"


def _bar(gpu: GPURow, cells: int, is_ascii: bool) -> list[tuple[str, str]]:
    """Return a bar of the GPU's memory, by who has it."""
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
    """Return how many cells of a bar each part of a total gets: one at least for more than nothing."""
    whole = max(total, sum(parts), 1)
    shares = [cells * part / whole for part in parts]
    lengths = [max(1, round(share)) if share > _NOTHING else 0 for share in shares]
    while sum(lengths) > cells:  # by rounding up: the longest has most to spare
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] -= 1
    return lengths
