"""The scroll position and the sort order of the live view's tables, as chosen with the keyboard."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

#: A key: an escape sequence such as a cursor key sends, a key pressed together with Alt, or a single byte.
_KEY: Final = re.compile(rb"\x1b[\[O][0-9;]*[@-~]|\x1b.|.", re.DOTALL)
_UP, _DOWN, _HOME, _END = ((b"\x1b[" + key, b"\x1bO" + key) for key in (b"A", b"B", b"H", b"F"))
_PAGE_UP, _PAGE_DOWN = b"\x1b[5~", b"\x1b[6~"
#: Hints about keys, the less important ones last. A narrow terminal drops hints from the end.
HELP: Final = ("q quits", "< > sort", "r reverse", "arrows PgUp PgDn Home End scroll", "Tab other table")
WORKERS, WAITING = "Workers", "Waiting"


def keys_of(data: bytes) -> Iterator[bytes]:
    """Yield the keys in bytes that were read from a keyboard."""
    yield from _KEY.findall(data)


class Browsing:
    """The table that receives the keys, its first row on the screen, and the sort order of each table.

    ``first`` can be too large after a key. :meth:`window` clips it when the table is drawn.
    """

    def __init__(self) -> None:
        self.table = WORKERS
        self.first = 0
        self._page = 1  # number of rows that were drawn
        self._sortable: dict[str, list[str]] = {}  # columns by table
        self._sorted_by: dict[str, str] = {}
        self._reversed: dict[str, bool] = {}

    def press(self, key: bytes) -> None:
        """Scroll, sort, or switch to the other table, according to a key. Other keys have no effect."""
        steps = dict.fromkeys(_UP, -1) | dict.fromkeys(_DOWN, 1) | dict.fromkeys(_HOME, -sys.maxsize)
        steps |= dict.fromkeys(_END, sys.maxsize) | {_PAGE_UP: -self._page, _PAGE_DOWN: self._page}
        steps |= {b"\x1b[1~": -sys.maxsize, b"\x1b[4~": sys.maxsize}
        if key in steps:
            self.first = max(0, self.first + steps[key])
        elif key == b"\t":
            self.table, self.first = WAITING if self.table == WORKERS else WORKERS, 0
        # The comma and the period are on the same keys, without Shift.
        elif key in (b"<", b">", b",", b"."):
            columns = ["", *self._sortable.get(self.table, ())]
            place = columns.index(self.sorted_by(self.table)) if self.sorted_by(self.table) in columns else 0
            self._sorted_by[self.table] = columns[(place + (1 if key in b">." else -1)) % len(columns)]
            self._reversed[self.table] = False
        elif key in (b"r", b"R"):
            self._reversed[self.table] = not self._reversed.get(self.table, False)

    def window(self, table: str, count: int, room: int) -> range:
        """Return the range of rows to show if a table has ``count`` rows and ``room`` of them fit."""
        if table != self.table:
            return range(min(count, room))
        self._page = max(1, room)
        self.first = min(self.first, max(0, count - self._page))
        return range(self.first, min(count, self.first + room))

    def sorted_by(self, table: str) -> str:
        """Return the column by which a table is sorted, or "" if its rows keep their original order."""
        return self._sorted_by.get(table, "")

    def in_order(self, table: str, values: Mapping[str, Sequence[Any]], count: int) -> tuple[list[int], bool]:
        """Return the indices of a table's rows in the chosen order, and True if the order is descending.

        ``values``: for each sortable column, the values of all rows. Rows with an unknown value come last.
        """
        self._sortable[table] = [column for column, cells in values.items() if any(map(_is_known, cells))]
        is_reversed, cells = self._reversed.get(table, False), values.get(self.sorted_by(table))
        if cells is None:
            return list(range(count))[:: -1 if is_reversed else 1], False
        known = [place for place, value in enumerate(cells) if _is_known(value)]
        unknown = [place for place, value in enumerate(cells) if not _is_known(value)]
        # By default the largest number comes first, and names are in alphabetical order.
        is_descending = is_reversed == any(isinstance(cells[place], str) for place in known[:1])
        known.sort(key=lambda place: _sort_key(cells[place]), reverse=is_descending)
        return known + unknown, is_descending


def _is_known(value: Any) -> bool:
    return value not in (None, "")


def _sort_key(value: Any) -> tuple[bool, int, Any]:
    """Return the sort key of a value. Client numbers are strings, and "3" has to come before "17"."""
    is_name = isinstance(value, str) and not value.isdecimal()
    return is_name, len(value) if isinstance(value, str) and not is_name else 0, value
