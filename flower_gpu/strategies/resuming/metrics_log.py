"""The metrics of all rounds, in a file to which each round appends a line.

The index of a checkpoint has the number of bytes of the file that belong to it, and their checksum. Bytes
after that come from a process that was killed, or ran out of disk space, before it replaced the index. They
are never read, and the next round overwrites them. So the cost of a round does not grow with the number of
rounds.
"""

from __future__ import annotations

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
    """The writer and reader of the file. It remembers which metrics the checkpoint has."""

    def __init__(self) -> None:
        self._place: FilePlace | None = None  # part of the file to which the index refers
        self._written = _no_metrics()
        # The last append, for saved(): part of the file, its new metrics, and whether the file is new.
        self._pending: tuple[FilePlace, RoundMetrics, bool] | None = None

    def append(self, state: RoundState, new_path: Path) -> FilePlace:
        """Write the new metrics of a round, and return the part of the file that has all metrics.

        ``new_path``: path of a new file, in case one is started.
        The new metrics count as written after :meth:`saved`.
        """
        place = self._place
        new = {field: _new_metrics(getattr(state, field), self._written[field]) for field in _FIELDS}
        is_anew = place is None or any(not self._goes_on(field, new[field], state) for field in _FIELDS)
        if place is None or is_anew:
            place = FilePlace(new_path, 0, 0, 0)
            new = {field: dict(getattr(state, field)) for field in _FIELDS}
        entries = [
            (field, server_round, list(MetricRecord(dict(record)).items()))
            for field, metrics in new.items()
            for server_round, record in metrics.items()
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
        self._pending = place, new, is_anew
        return place

    def saved(self) -> None:
        """Record that the index refers to the part that :meth:`append` returned last."""
        assert self._pending is not None
        self._place, new, is_anew = self._pending
        if is_anew:
            self._written = _no_metrics()
        for field, metrics in new.items():
            self._written[field].update(metrics)

    def restore(self, place: FilePlace, data: bytes) -> RoundMetrics:
        """Return the metrics in the data of a file. Later rounds are appended after them.

        Raises a TypeError, a ValueError or a similar error if :meth:`append` did not write the data.
        """
        restored = _no_metrics()
        for line in data.splitlines():
            for field, server_round, items in json.loads(line):
                restored[field][server_round] = MetricRecord(dict(items), keep_input=False)
        self._place = place
        self._written = {field: dict(metrics) for field, metrics in restored.items()}
        return restored

    def _goes_on(self, field: str, new: dict[int, MetricRecord], state: RoundState) -> bool:
        """Return True if no round has lost its metrics since the last write."""
        written = self._written[field]
        added = sum(server_round not in written for server_round in new)
        return len(written) + added == len(getattr(state, field))


def _no_metrics() -> RoundMetrics:
    return {field: {} for field in _FIELDS}


def _new_metrics(
    metrics: dict[int, MetricRecord], written: dict[int, MetricRecord]
) -> dict[int, MetricRecord]:
    """Return the metrics after the last written ones. A later round comes later in ``metrics``."""
    new: list[tuple[int, MetricRecord]] = []
    for server_round, record in reversed(metrics.items()):
        known = written.get(server_round)
        if known is not None and (known is record or known == record):
            break
        new.append((server_round, record))
    return dict(reversed(new))
