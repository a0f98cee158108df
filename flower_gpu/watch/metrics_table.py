"""``metrics.csv``: a row for each kind of messages of each round.

While a run goes on, rows are appended, so that a round costs the same however many there were before. The
whole table is written anew only if a row has to change, or if a metric has a new name and so needs a column.
A process that was killed may leave half a row. A run that goes on begins with a whole table.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import StringIO
from typing import Any, Final

from flower_gpu import files
from flower_gpu.apps.folder import RunFolder
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import RoundPart

_OWN: Final = ("round", "kind")  # columns that are no metrics


class MetricsTable:
    """The table of a run. This process alone writes it, in one thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics
        self._names: dict[str, None] = {}  # of metrics, in the order of their columns
        # Metrics of the rows in the table, by round and task.
        self._rows: dict[tuple[int | None, str], dict[str, Any]] = {}
        self._size_bytes = -1  # of the table; -1: it is to be written anew

    def write(self, parts: Sequence[RoundPart]) -> None:
        """Write the whole table; none for a run without rounds."""
        if not parts and not self._path.exists():
            return
        self._rows = {(part.round, part.task): part.told for part in parts}
        self._names = dict.fromkeys(name for part in parts for name in part.told)
        head = [*_OWN, *(f"{name} (metric)" if name in _OWN else name for name in self._names)]
        data = _lines([head, *map(self._row, parts)])
        with files.replaced(self._path, has_one_writer=True) as new:
            new.write_bytes(data)
        self._size_bytes = len(data)

    def extend(self, history: History) -> None:
        """Append what has finished since the last time."""
        new: list[RoundPart] = []
        for part in history.newest_parts():
            if (part.round, part.task) in self._rows:
                break
            new.append(part)
        new.reverse()
        has_columns = all(name in self._names for part in new for name in part.told)
        if not (has_columns and self._is_as_written()):
            self.write(history.rounds)
        elif new:
            self._append(_lines(map(self._row, new)))
            self._rows |= {(part.round, part.task): part.told for part in new}

    def note(self, part: RoundPart) -> None:
        """Have the table written anew if a part has a row there, with other metrics."""
        if self._rows.get((part.round, part.task), part.told) != part.told:
            self._size_bytes = -1

    def _is_as_written(self) -> bool:
        """Return False if the table is out of date, or something else has changed it."""
        with suppress(OSError):
            return self._path.stat().st_size == self._size_bytes
        return False

    def _append(self, data: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError:
            with suppress(OSError):  # no half row stays on a full disk
                os.truncate(self._path, self._size_bytes)
            raise
        self._size_bytes += len(data)

    def _row(self, part: RoundPart) -> list[Any]:
        cells = [_cell(part.told[name]) if name in part.told else "" for name in self._names]
        return ["" if part.round is None else part.round, part.task, *cells]


def _lines(rows: Iterable[Sequence[Any]]) -> bytes:
    text = StringIO()
    for row in rows:
        # Before Python 3.13 the module quotes a carriage return only if it is part of the ends of its lines.
        is_odd = any("\r" in str(cell) for cell in row)
        quoting: Any = csv.QUOTE_ALL if is_odd else csv.QUOTE_MINIMAL
        csv.writer(text, lineterminator="\n", quoting=quoting).writerow(row)
    return text.getvalue().encode("utf-8", errors="replace")


def _cell(value: Any) -> Any:
    if value is None:
        return "nan"
    return json.dumps(value) if isinstance(value, list | bool) else value
