"""The metrics of all rounds, in a file to which each round appends a line.

The index of a checkpoint has the number of bytes of the file that belong to it, and their checksum. Bytes
after that come from a process that was killed, or ran out of disk space, before it replaced the index. They
are never read, and the next round overwrites them. So the cost of a round does not grow with the number of
rounds.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from pathlib import Path
from typing import Final

from flwr.app import MetricRecord

from flower_gpu.strategies.resuming.states import FilePlace
from flower_gpu.strategies.rounds import RoundState

#: The kinds of metrics, as fields of a RoundState.
_FIELDS: Final = ("train_metrics", "evaluate_metrics", "client_metrics")

#: Metrics by field and round.
RoundMetrics = dict[str, dict[int, MetricRecord]]


class MetricsLog:
    """The writer and reader of the file. It knows how many rounds the checkpoint has."""

    def __init__(self) -> None:
        self._place: FilePlace | None = None  # part of the file to which the index refers
        self._counts = dict.fromkeys(_FIELDS, 0)  # number of rounds in that part, by field
        self._pending: tuple[FilePlace, dict[str, int]] | None = None  # the same after the last append

    def append(self, state: RoundState, new_path: Path) -> FilePlace:
        """Write the new metrics of a round, and return the part of the file that has all metrics.

        Later rounds come later in a field, so the new metrics are the last ones.

        ``new_path``: path of a new file, in case one is started.
        The new metrics count as written after :meth:`saved`.
        """
        place, written = self._place, self._counts
        counts = {field: len(getattr(state, field)) for field in _FIELDS}
        # Rounds may have lost their metrics since the last write.
        if place is None or any(counts[field] < written[field] for field in _FIELDS):
            place, written = FilePlace(new_path, 0, 0, 0), dict.fromkeys(_FIELDS, 0)
        entries = [
            (field, server_round, list(MetricRecord(dict(record)).items()))
            for field in _FIELDS
            for server_round, record in _last(getattr(state, field), counts[field] - written[field])
        ]
        line = f"{json.dumps(entries)}\n".encode() if entries else b""
        with place.path.open("r+b" if place.size_bytes else "wb") as file:
            file.truncate(place.size_bytes)
            file.seek(place.size_bytes)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        size_bytes, checksum = place.size_bytes + len(line), zlib.crc32(line, place.checksum)
        place = FilePlace(place.path, 0, size_bytes, checksum)
        self._pending = place, counts
        return place

    def saved(self) -> None:
        """Record that the index refers to the part that :meth:`append` returned last."""
        assert self._pending is not None
        self._place, self._counts = self._pending

    def restore(self, place: FilePlace, data: bytes) -> RoundMetrics:
        """Return the metrics in the data of a file. Later rounds are appended after them.

        Raises a TypeError, a ValueError or a similar error if :meth:`append` did not write the data.
        """
        restored: RoundMetrics = {field: {} for field in _FIELDS}
        for line in data.splitlines():
            for field, server_round, items in json.loads(line):
                restored[field][server_round] = MetricRecord(dict(items), keep_input=False)
        self._place = place
        self._counts = {field: len(metrics) for field, metrics in restored.items()}
        return restored


def _last(metrics: dict[int, MetricRecord], count: int) -> list[tuple[int, MetricRecord]]:
    """Return the last rounds with their metrics, without a look at the others."""
    return list(itertools.islice(reversed(metrics.items()), count))[::-1]
