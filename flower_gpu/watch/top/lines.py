"""Lines and tables of styled text for a terminal of a certain width: less important parts give way.

Names come from others: every text goes through :func:`line`, so that there is nothing in it that a terminal
obeys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from flower_gpu.printable import printable

_ROOMY: Final = 100  # cells of a terminal in which columns stand further apart
_INDENT: Final = "  "

#: A text and its style, which may be empty.
Part = tuple[str, str]


def line(*parts: Part) -> Text:
    """Return a line of texts with their styles."""
    return Text.assemble(*((printable(text), style) for text, style in parts))


def cut(one: Text, width: int) -> Text:
    """Return a line that takes no more than so many cells; where something is cut off, there is a mark."""
    kept = one.copy()
    kept.truncate(width, overflow="ellipsis" if width > 0 else "crop")
    return kept


def coloured(one: Text) -> str:
    """Return a line as a terminal draws it."""
    console = _console(bool(os.environ.get("NO_COLOR")))
    with console.capture() as drawn:
        console.print(one, end="", no_wrap=True, overflow="ignore", crop=False)
    return drawn.get()


@cache
def _console(no_color: bool) -> Console:
    return Console(color_system="standard", force_terminal=True, no_color=no_color, highlight=False)


def joined(width: int, *fields: tuple[int, str, str], gap: str = "  ") -> Text:
    """Return the fields that fit beside each other.

    A field is its rank, its text and its style; an empty one is left out. The fields of the highest rank give
    way first, and of equal ones the last.
    """
    kept = [(rank, line((told, style))) for rank, told, style in fields if told]
    while len(kept) > 1 and sum(each.cell_len + len(gap) for _, each in kept) - len(gap) > width:
        _, place = max((rank, place) for place, (rank, _) in enumerate(kept))
        del kept[place]
    return Text(gap).join(each for _, each in kept)


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
    rank: int  # the columns of the highest rank give way first; those of rank 0 never
    text: Callable[[Any], str]  # of a row
    key: Callable[[Any], Any] | None = None  # what rows are sorted by; None: they are not
    style: str | Callable[[Any], str] = ""
    is_right: bool = True
    least: int = 0  # texts may be cut off down to so many cells; 0: not at all

    def cell(self, row: Any) -> Text:
        """Return the text in a row."""
        return line((self.text(row), self.style if isinstance(self.style, str) else self.style(row)))


def table(columns: Sequence[Column], rows: Sequence[Any], width: int, mark: Part) -> list[Text]:
    """Lay rows out in columns, in no more than so many cells, below their titles.

    ``mark``: the title of the column that rows are sorted by, and what stands beside it.
    """
    gap, room = 2 if width >= _ROOMY else 1, width - len(_INDENT)
    titles = [one.title + mark[1] * (one.title == mark[0] != "") for one in columns]
    # The column that rows are sorted by does not give way.
    ranks = [0 if one.title == mark[0] != "" else one.rank for one in columns]
    cells = [[line((title, "dim")), *map(one.cell, rows)] for title, one in zip(titles, columns, strict=True)]
    full = [max(cell.cell_len for cell in column) for column in cells]
    kept = list(range(len(columns)))
    widths = _narrowed(columns, kept, full, room, gap)
    while sum(widths) + gap * (len(kept) - 1) > room and (rank := max(ranks[place] for place in kept)):
        kept = [place for place in kept if ranks[place] != rank]
        widths = _narrowed(columns, kept, full, room, gap)
    for place, most in zip(kept, widths, strict=True):
        cells[place] = [cut(cell, most) for cell in cells[place]]
        for cell in cells[place]:
            cell.align("right" if columns[place].is_right else "left", most)
    return [
        Text(_INDENT) + Text(" " * gap).join(of_row)
        for of_row in zip(*(cells[place] for place in kept), strict=True)
    ]


def _narrowed(
    columns: Sequence[Column], kept: Sequence[int], full: Sequence[int], width: int, gap: int
) -> list[int]:
    """Make columns narrower until they fit, the widest first, none below its least."""
    now = {place: full[place] for place in kept}
    for _ in range(sum(now.values()) + gap * (len(now) - 1) - width):
        can = [place for place in kept if columns[place].least and now[place] > columns[place].least]
        if not can:
            break
        now[max(can, key=now.__getitem__)] -= 1
    return list(now.values())
