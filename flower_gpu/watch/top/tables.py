"""Tables and lines for a terminal of a certain width: less important parts give way where there is no room.

Names come from others: every text goes through :func:`text`, or a cell of a table, so that there is nothing
in it that a terminal obeys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from flower_gpu.printable import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_ROOMY: Final = 100  # cells of a terminal in which columns stand further apart
_INDENT: Final = "  "


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
