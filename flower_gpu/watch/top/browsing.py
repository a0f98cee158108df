"""Which part of the tables of the live view is shown, and in which order, as keys have chosen it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

#: Cursor keys and others that send several bytes, a key together with Alt, or one byte.
_KEY: Final = re.compile(rb"\x1b[\[O][0-9;]*[@-~]|\x1b.|.", re.DOTALL)
_UP, _DOWN, _HOME, _END = ((b"\x1b[" + key, b"\x1bO" + key) for key in (b"A", b"B", b"H", b"F"))
_PAGE_UP, _PAGE_DOWN = b"\x1b[5~", b"\x1b[6~"
#: The less important ones last.
HELP: Final = ("q quits", "< > sort", "r reverse", "arrows PgUp PgDn Home End scroll", "Tab other table")
WORKERS, WAITING = "Workers", "Waiting"


def keys_of(data: bytes) -> Iterator[bytes]:
    """Divide a keyboard's bytes into keys."""
    yield from _KEY.findall(data)


class Browsing:
    """The table that keys are for, the first of its rows on the screen, and the order of each table.

    ``first`` is in range once the table is drawn.
    """

    def __init__(self) -> None:
        self.table = WORKERS
        self.first = 0
        self._page = 1  # rows that were drawn
        self._sortable: dict[str, list[str]] = {}  # columns of each table
        self._sorted_by: dict[str, str] = {}
        self._reversed: dict[str, bool] = {}

    def press(self, key: bytes) -> None:
        """Apply a key."""
        steps = dict.fromkeys(_UP, -1) | dict.fromkeys(_DOWN, 1) | dict.fromkeys(_HOME, -sys.maxsize)
        steps |= dict.fromkeys(_END, sys.maxsize) | {_PAGE_UP: -self._page, _PAGE_DOWN: self._page}
        steps |= {b"\x1b[1~": -sys.maxsize, b"\x1b[4~": sys.maxsize}
        if key in steps:
            self.first = max(0, self.first + steps[key])
        elif key == b"\t":
            self.table, self.first = WAITING if self.table == WORKERS else WORKERS, 0
        elif key in (b"<", b">", b",", b"."):  # with and without Shift
            columns = ["", *self._sortable.get(self.table, ())]
            place = columns.index(self.sorted_by(self.table)) if self.sorted_by(self.table) in columns else 0
            self._sorted_by[self.table] = columns[(place + (1 if key in b">." else -1)) % len(columns)]
            self._reversed[self.table] = False
        elif key in (b"r", b"R"):
            self._reversed[self.table] = not self._reversed.get(self.table, False)

    def window(self, table: str, count: int, room: int) -> range:
        """Return the rows of a table to show, of so many, where there is room for that many of them."""
        if table != self.table:
            return range(min(count, room))
        self._page = max(1, room)
        self.first = min(self.first, max(0, count - self._page))
        return range(self.first, min(count, self.first + room))

    def sorted_by(self, table: str) -> str:
        """Return the column that a table is sorted by; empty where its rows are as they came."""
        return self._sorted_by.get(table, "")

    def in_order(self, table: str, values: Mapping[str, Sequence[Any]], count: int) -> tuple[list[int], bool]:
        """Return the places of a table's rows in the chosen order, and whether their values fall.

        ``values``: of each column by which rows can be sorted, one for each row; unknown ones come last.
        """
        self._sortable[table] = [column for column, told in values.items() if any(map(_is_known, told))]
        is_reversed, told = self._reversed.get(table, False), values.get(self.sorted_by(table))
        if told is None:
            return list(range(count))[:: -1 if is_reversed else 1], False
        known = [place for place, value in enumerate(told) if _is_known(value)]
        unknown = [place for place, value in enumerate(told) if not _is_known(value)]
        # What is most comes first, and names by the alphabet.
        falls = is_reversed == any(isinstance(told[place], str) for place in known[:1])
        known.sort(key=lambda place: _size(told[place]), reverse=falls)
        return known + unknown, falls


def _is_known(value: Any) -> bool:
    return value not in (None, "")


def _size(value: Any) -> tuple[bool, int, Any]:
    """Return the sort key of a value: numbers of clients are texts, and 3 comes before 17."""
    is_name = isinstance(value, str) and not value.isdecimal()
    return is_name, len(value) if isinstance(value, str) and not is_name else 0, value
