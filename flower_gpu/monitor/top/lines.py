"""Lines of a terminal: texts with styles, as wide as they may be, and nothing in them that it would obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from flower_gpu.printable import printable


@dataclass(frozen=True)
class Glyphs:
    """The letters of which bars are made, and others that not every terminal has.

    Parameters
    ----------
    used, leased, other, program, free : str
        Memory: used under a lease of this account, leased to it and not used, leased to other accounts, used
        by other programs, free.
    more : str
        In the place of what was cut off.
    degree : str
        Before the C of a temperature.
    """

    used: str = "█"
    leased: str = "▒"
    other: str = "▚"
    program: str = "▬"
    free: str = "·"
    more: str = "…"
    degree: str = "°"


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs(used="#", leased="+", other="o", program="=", free=".", more="~", degree="")


def width_of(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fitted(text: str, width: int, align: str = "<", more: str = UNICODE.more) -> str:
    """Return a text in exactly so many cells: cut off, or with spaces after it (``"<"``) or before it."""
    text = printable(text)
    has = width_of(text)
    if has <= width:
        room = " " * (width - has)
        return text + room if align == "<" else room + text
    if width <= 0:
        return ""
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1) + more


@dataclass
class Line:
    """One line, put together from left to right."""

    parts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, text: str, style: str = "") -> Line:
        """Append a text; return the line."""
        if text:
            self.parts.append((printable(text), style))
        return self

    @property
    def width(self) -> int:
        """How many cells it takes."""
        return sum(width_of(text) for text, _ in self.parts)

    @property
    def text(self) -> str:
        """The line without styles, and without spaces at its end."""
        return "".join(text for text, _ in self.parts).rstrip()

    def cut(self, width: int, more: str = UNICODE.more) -> Line:
        """Return it no wider than this."""
        if self.width <= width:
            return self
        line, left = Line(), width
        for text, style in self.parts:
            has = width_of(text)
            if has >= left:  # something follows, or this is too long itself
                return line.add(fitted(text + " ", left, more=more), style)
            line.add(text, style)
            left -= has
        return line


def joined(width: int, *fields: tuple[int, str, str], gap: str = "  ") -> Line:
    """Return the fields that fit beside each other; the least important ones are left out first.

    Parameters
    ----------
    width : int
        Cells that there are.
    *fields : tuple of (int, str, str)
        How important it is (0: as long as anything), the text, its style. Empty texts are left out.
    gap : str
        Between two fields.
    """
    kept = [(rank, printable(text), style) for rank, text, style in fields if text]

    def taken() -> int:
        return sum(width_of(text) for _, text, _ in kept) + len(gap) * max(0, len(kept) - 1)

    while len(kept) > 1 and taken() > width:
        # Of equally important ones, the last.
        rank = max(rank for rank, _, _ in kept)
        at = max(index for index, (its, _, _) in enumerate(kept) if its == rank)
        del kept[at]
    line = Line()
    for index, (_, text, style) in enumerate(kept):
        line.add(gap if index else "").add(text, style)
    return line


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Parameters
    ----------
    title : str
        Over it.
    cells : sequence of (str, str)
        Texts and their styles, from the top.
    rank : int
        How important it is; where the table is too wide, the columns of the highest rank go first, those of
        rank 0 never.
    align : str
        ``"<"`` or ``">"``.
    least : int
        Texts may be cut off down to so many cells; 0: not at all.
    """

    title: str
    cells: Sequence[tuple[str, str]]
    rank: int
    align: str = "<"
    least: int = 0

    @property
    def width(self) -> int:
        """Cells that it takes if nothing is cut off."""
        return max([width_of(self.title), *(width_of(printable(text)) for text, _ in self.cells)])


def table(columns: Sequence[Column], width: int, more: str = UNICODE.more) -> list[Line]:
    """Lay columns out beside each other; the first line has the titles."""
    gap = "  " if width >= 100 else " "
    kept = list(columns)
    while True:
        room = width - len(gap) * (len(kept) - 1)
        widths = _narrowed([(column.width, column.least) for column in kept], room)
        rank = max(column.rank for column in kept)
        if sum(widths) <= room or rank == 0:
            break
        kept = [column for column in kept if column.rank != rank]
    lines = [Line() for _ in range(1 + len(kept[0].cells))]
    for index, (column, cells) in enumerate(zip(kept, widths, strict=True)):
        for line, (text, style) in zip(lines, [(column.title, "dim"), *column.cells], strict=True):
            line.add(gap if index else "").add(fitted(text, cells, column.align, more), style)
    return [line.cut(width, more) for line in lines]


def _narrowed(widths: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Make columns narrower until they fit, the widest first, none below its least."""
    now = [width for width, _ in widths]
    while sum(now) > room:
        can = [index for index, (_, least) in enumerate(widths) if least and now[index] > least]
        if not can:
            break
        now[max(can, key=now.__getitem__)] -= 1
    return now
