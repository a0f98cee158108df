"""Lines and tables of styled text for a terminal of a certain width: less important parts give way.

Names come from others: every text goes through :func:`line`, so that there is nothing in it that a terminal
obeys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flower_gpu.printable import printable

_ROOMY: Final = 100  # cells of a terminal in which columns stand further apart
_INDENT: Final = ("  ", "")
_CODES: Final = {
    "bold": 1,
    "dim": 2,
    "reverse": 7,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
}

#: A text and its style, which may be empty.
Part = tuple[str, str]
#: One line, from the left to the right.
Line = list[Part]


def line(*parts: Part) -> Line:
    """Return a line of texts with their styles; empty ones are left out."""
    return [(printable(text), style) for text, style in parts if text]


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes: some letters are two wide."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def width_of(one: Line) -> int:
    """Return how many cells a line takes."""
    return sum(cells(text) for text, _ in one)


def cut(one: Line, width: int) -> Line:
    """Return a line that takes no more than so many cells; where something is cut off, there is a mark."""
    if width_of(one) <= width:
        return one
    kept: Line = []
    room = width - 1
    for text, style in one:
        taken = _beginning(text, room)
        kept.append((taken, style))
        room -= cells(taken)
        if taken != text:
            break
    return [*kept, ("…", "")] if width > 0 else []


def _beginning(text: str, room: int) -> str:
    if text.isascii():
        return text[: max(0, room)]
    end = 0
    for letter in text:
        room -= cells(letter)
        if room < 0:
            break
        end += 1
    return text[:end]


def plain(one: Line) -> str:
    """Return a line without its styles."""
    return "".join(text for text, _ in one)


def coloured(one: Line) -> str:
    """Return a line as a terminal draws it."""
    has_colours = not os.environ.get("NO_COLOR")
    codes = {name: code for name, code in _CODES.items() if code < 30 or has_colours}
    drawn = ""
    for text, style in one:
        numbers = ";".join(str(codes[name]) for name in style.split() if name in codes)
        drawn += f"\x1b[{numbers}m{text}\x1b[0m" if numbers else text
    return drawn


def joined(width: int, *fields: tuple[int, str, str], gap: str = "  ") -> Line:
    """Return the fields that fit beside each other.

    A field is its rank, its text and its style; an empty one is left out. The fields of the highest rank give
    way first, and of equal ones the last.
    """
    kept = [(rank, line((told, style))) for rank, told, style in fields if told]
    while len(kept) > 1 and sum(width_of(each) + len(gap) for _, each in kept) - len(gap) > width:
        _, place = max((rank, place) for place, (rank, _) in enumerate(kept))
        del kept[place]
    found: Line = []
    for _, each in kept:
        found += [(gap, ""), *each] if found else each
    return found


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

    def part(self, row: Any) -> Part:
        """Return a cell."""
        return printable(self.text(row)), self.style if isinstance(self.style, str) else self.style(row)


def table(columns: Sequence[Column], rows: Sequence[Any], width: int, mark: Part) -> list[Line]:
    """Lay rows out in columns, in no more than so many cells, below their titles.

    ``mark``: the title of the column that rows are sorted by, and what stands beside it.
    """
    gap, room = 2 if width >= _ROOMY else 1, width - len(_INDENT[0])
    titles = [one.title + mark[1] * (one.title == mark[0] != "") for one in columns]
    # The column that rows are sorted by does not give way.
    ranks = [0 if one.title == mark[0] != "" else one.rank for one in columns]
    parts = [[(title, "dim"), *map(one.part, rows)] for title, one in zip(titles, columns, strict=True)]
    full = [max(cells(text) for text, _ in column) for column in parts]
    kept = list(range(len(columns)))
    widths = _narrowed(columns, kept, full, room, gap)
    while sum(widths) + gap * (len(kept) - 1) > room and (rank := max(ranks[place] for place in kept)):
        kept = [place for place in kept if ranks[place] != rank]
        widths = _narrowed(columns, kept, full, room, gap)
    found = []
    for number in range(1 + len(rows)):
        one: Line = [_INDENT]
        for place, most in zip(kept, widths, strict=True):
            cell = cut([parts[place][number]], most)
            space = (" " * (most - width_of(cell)), "")
            one += [space, *cell] if columns[place].is_right else [*cell, space]
            one.append((" " * gap, ""))
        found.append(one[:-1])
    return found


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
