"""``metrics.csv``: a row for each task in each round.

During a run, rows are appended, so the cost of a round does not grow with the number of earlier rounds. The
whole table is written again only if a row changes, or if a new metric needs a column. A killed process may
leave an incomplete row. So a resumed run writes the whole table first.
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
from flower_gpu.watch.folds.rounds import RoundFold, RoundPart

_KEY_COLUMNS: Final = ("round", "kind")


class MetricsTable:
    """The table of a run. Only this process writes it, and only in a single thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics
        self._names: dict[str, None] = {}  # names of the metrics in the order of their columns
        # Metrics of the rows in the table, by round and task.
        self._rows: dict[tuple[int | None, str], dict[str, Any]] = {}
        self._size_bytes = -1  # size of the table, or -1 if the whole table has to be written again

    def write(self, parts: Sequence[RoundPart]) -> None:
        """Write the whole table. A run without rounds gets no table."""
        if not parts and not self._path.exists():
            return
        self._rows = {(part.round, part.task): part.reported_metrics for part in parts}
        self._names = dict.fromkeys(name for part in parts for name in part.reported_metrics)
        names = (f"{name} (metric)" if name in _KEY_COLUMNS else name for name in self._names)
        head = [*_KEY_COLUMNS, *names]
        data = _lines([head, *map(self._row, parts)])
        with files.replaced(self._path, has_one_writer=True) as new:
            new.write_bytes(data)
        self._size_bytes = len(data)

    def extend(self, rounds: RoundFold) -> None:
        """Append the parts that have finished since the last call."""
        new: list[RoundPart] = []
        for part in rounds.newest_parts():
            if (part.round, part.task) in self._rows:
                break
            new.append(part)
        new.reverse()
        has_columns = all(name in self._names for part in new for name in part.reported_metrics)
        if not (has_columns and self._is_as_written()):
            self.write(rounds.parts)
        elif new:
            self._append(_lines(map(self._row, new)))
            self._rows |= {(part.round, part.task): part.reported_metrics for part in new}

    def note(self, part: RoundPart) -> None:
        """Mark the table for rewriting if it has a row for this part with different metrics."""
        if self._rows.get((part.round, part.task), part.reported_metrics) != part.reported_metrics:
            self._size_bytes = -1

    def _is_as_written(self) -> bool:
        """Return False if the table is outdated, or was changed by another program."""
        with suppress(OSError):
            return self._path.stat().st_size == self._size_bytes
        return False

    def _append(self, data: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError:
            # On a full disk, remove the incomplete row.
            with suppress(OSError):
                os.truncate(self._path, self._size_bytes)
            raise
        self._size_bytes += len(data)

    def _row(self, part: RoundPart) -> list[Any]:
        cells = [
            _cell(part.reported_metrics[name]) if name in part.reported_metrics else ""
            for name in self._names
        ]
        return ["" if part.round is None else part.round, part.task, *cells]


def _lines(rows: Iterable[Sequence[Any]]) -> bytes:
    text = StringIO()
    for row in rows:
        # Before Python 3.13, the csv module quotes a carriage return only if the line terminator contains it.
        has_carriage_return = any("\r" in str(cell) for cell in row)
        quoting: Any = csv.QUOTE_ALL if has_carriage_return else csv.QUOTE_MINIMAL
        csv.writer(text, lineterminator="\n", quoting=quoting).writerow(row)
    return text.getvalue().encode("utf-8", errors="replace")


def _cell(value: Any) -> Any:
    if value is None:
        return "nan"
    return json.dumps(value) if isinstance(value, list | bool) else value
