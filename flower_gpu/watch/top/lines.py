"""Lines and tables of styled text that fit the width of a terminal by dropping less important parts.

Names can come from other accounts. Every text passes through :func:`line`, which replaces control characters,
so a name cannot send commands to the terminal.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from flower_gpu.printable import printable

#: Width in cells from which columns are two cells apart instead of one.
_ROOMY: Final = 100
_INDENT: Final = "  "

#: A text and its style, which may be empty.
Part = tuple[str, str]


def line(*parts: Part) -> Text:
    """Return a line of texts with their styles."""
    return Text.assemble(*((printable(text), style) for text, style in parts))


def cut(text: Text, width: int) -> Text:
    """Return a copy of a line that is cut to ``width`` cells. An ellipsis marks the cut."""
    short = text.copy()
    short.truncate(width, overflow="ellipsis" if width > 0 else "crop")
    return short


def coloured(text: Text) -> str:
    """Return a line with the escape sequences for its styles."""
    console = _console(bool(os.environ.get("NO_COLOR")))
    with console.capture() as drawn:
        console.print(text, end="", no_wrap=True, overflow="ignore", crop=False)
    return drawn.get()


@cache
def _console(no_color: bool) -> Console:
    # After a capture, rich also writes to its file, and standard output may be a terminal that has gone.
    return Console(
        file=io.StringIO(), color_system="standard", force_terminal=True, no_color=no_color, highlight=False
    )


def joined(width: int, *fields: tuple[int, str, str], gap: str = "  ") -> Text:
    """Return a line of the fields that fit into ``width`` cells.

    ``fields``: rank, text and style of each field. Fields with an empty text are omitted. If the line is too
    long, the field with the highest rank is dropped first, and among equal ranks the last field.
    """
    kept = [(rank, line((text, style))) for rank, text, style in fields if text]
    while len(kept) > 1 and sum(field.cell_len + len(gap) for _, field in kept) - len(gap) > width:
        _, place = max((rank, place) for place, (rank, _) in enumerate(kept))
        del kept[place]
    return Text(gap).join(field for _, field in kept)


def duration(seconds: float) -> str:
    """Return a duration in readable form: ``"0:05"``, ``"1:02:03"``, ``"3d 04h"``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, and functions that return its text for a row."""

    title: str
    rank: int  # columns with the highest rank are dropped first; columns with rank 0 stay
    text: Callable[[Any], str]  # text of a row
    key: Callable[[Any], Any] | None = None  # sort key of a row; None if the column is not sortable
    style: str | Callable[[Any], str] = ""
    is_right: bool = True  # True if the texts are aligned to the right
    least: int = 0  # minimum width in cells if texts are cut; 0 if texts are never cut

    def cell(self, row: Any) -> Text:
        """Return the styled text of this column for a row."""
        return line((self.text(row), self.style if isinstance(self.style, str) else self.style(row)))


def table(columns: Sequence[Column], rows: Sequence[Any], width: int, mark: Part) -> list[Text]:
    """Return the lines of a table, ``width`` cells wide: the titles, then one line for each row.

    ``mark``: the title of the column by which the rows are sorted, and the symbol to show beside it.
    """
    gap, room = 2 if width >= _ROOMY else 1, width - len(_INDENT)
    titles = [column.title + mark[1] * (column.title == mark[0] != "") for column in columns]
    # The column by which the rows are sorted always stays.
    ranks = [0 if column.title == mark[0] != "" else column.rank for column in columns]
    cells = [
        [line((title, "dim")), *map(column.cell, rows)] for title, column in zip(titles, columns, strict=True)
    ]
    full = [max(cell.cell_len for cell in texts) for texts in cells]
    kept = list(range(len(columns)))
    widths = _narrowed(columns, kept, full, room, gap)
    while sum(widths) + gap * (len(kept) - 1) > room and (rank := max(ranks[place] for place in kept)):
        kept = [place for place in kept if ranks[place] != rank]
        widths = _narrowed(columns, kept, full, room, gap)
    for place, cell_width in zip(kept, widths, strict=True):
        cells[place] = [cut(cell, cell_width) for cell in cells[place]]
        for cell in cells[place]:
            cell.align("right" if columns[place].is_right else "left", cell_width)
    return [
        Text(_INDENT) + Text(" " * gap).join(row_cells)
        for row_cells in zip(*(cells[place] for place in kept), strict=True)
    ]


def _narrowed(
    columns: Sequence[Column], kept: Sequence[int], full: Sequence[int], width: int, gap: int
) -> list[int]:
    """Return the widths of the kept columns after narrowing the widest ones, each down to its minimum."""
    widths = {place: full[place] for place in kept}
    for _ in range(sum(widths.values()) + gap * (len(widths) - 1) - width):
        candidates = [
            place for place in kept if columns[place].least and widths[place] > columns[place].least
        ]
        if not candidates:
            break
        widths[max(candidates, key=widths.__getitem__)] -= 1
    return list(widths.values())
