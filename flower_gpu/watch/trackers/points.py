"""Data points for trackers: figures of rounds, of their clients and of GPUs, and failed messages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from flower_gpu.apps.failures import LABEL
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import encodable
from flower_gpu.trace import SERVER_EVALUATE, Event
from flower_gpu.watch.fields import first_line, node_id, number, text, whole_number
from flower_gpu.watch.folds.rounds import OpenRound, RoundPart, numbers_of
from flower_gpu.watch.history import History

#: Maximum number of clients of a run for which each client has its own series. With more clients, only their
#: mean, minimum and maximum are sent, because trackers get slow with many series. The number of clients in a
#: round does not matter, because with sampling each round would have different series.
MOST_CLIENTS: Final = 20
#: Seconds between two points about the GPUs. The trace has a sample every half second.
_GPU_INTERVAL_S: Final = 5.0
#: Maximum number of failed messages that a tracker receives. ``failures.log`` has all of them.
_MAX_FAILED: Final = 100
_GIB: Final = 1 << 30
_ON_SERVER: Final = ("", "server")
#: Units of ``Point.step``.
ROUND, SECONDS = "round", "seconds"

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Point:
    """Figures of one moment by name, such as ``train/loss``, or a failed message to a client."""

    number: int  # number of earlier points, including points before the run was resumed
    axis: str  # unit of ``step``: rounds, or whole seconds since the start of the run
    step: int
    time: float  # Unix seconds
    values: Mapping[str, float]  # empty for a failed message
    failure: str = ""  # round, type of the message, client and error of a failed message, in one line


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows."""

    folder: RunFolder
    app: str
    config: Mapping[str, Value]  # settings of the run, flattened
    ids: Mapping[str, str]  # result of Tracker.start when the run began; empty for a new run


class Tracker(Protocol):
    """A tracker such as TensorBoard, which receives the points of one run.

    The constructor is called before any part of the run starts. It imports the library, and raises
    :class:`~flower_gpu.errors.ConfigError` if the library cannot be used. All methods are called from the
    same thread, and may raise any exception.
    """

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open or continue the tracker's own run. Called again after an exception.

        Returns the ids of the tracker's run, and under ``see`` the address or the command to view it.
        """

    def log(self, points: deque[Point]) -> None:
        """Deliver points, oldest first, and remove each point from the left when it has been delivered.

        After an exception, the next call continues with the remaining points.
        """

    def close(self, outcome: str) -> None:
        """End the tracker's own run. ``outcome``: the outcome of the run, or "" if it is unknown."""


class Points:
    """A view of a history that yields the points to send after each event.

    ``client_of``: function that returns the client for a node id, as named by the calls in the trace.
    """

    def __init__(self, history: History, client_of: Callable[[int], str] = str) -> None:
        self.history = history
        self._client_of = client_of
        self._sent = self._failed = 0
        self._looked_at: float | None = None
        self._clients: set[str] = set()  # clients that have replied

    def of(self, event: Event) -> Iterator[Point]:
        """Yield the points for an event: the figures that it completes, or the failed message."""
        at = number(event.get("time"))
        if at is None:
            return
        match event.get("event"):
            case "round_finished":
                yield from self._of_part(at, event, text(event.get("task")))
            # If the run has a strategy, the strategy's recorder reports this round as well.
            case "round" if self.history.rounds.strategy is None:
                yield from self._of_part(at, event, SERVER_EVALUATE)
            case "gpu_sample" if self._looked_at is None or at - self._looked_at >= _GPU_INTERVAL_S:
                self._looked_at = at
                yield from self._point(None, at, self._gpus())
            # The last sample shows the GPUs after all workers have ended.
            case "run_finished":
                yield from self._point(None, at, self._gpus())
            case "reply" if event.get("error") is not None and self._failed < _MAX_FAILED:
                self._failed += 1
                server_round, node = whole_number(event.get("round")), node_id(event.get("node"))
                client = "a client" if node is None else f"client {self._client_of(node)}"
                where = "" if server_round is None else f"round {server_round}, "
                # The label of the error may repeat the client.
                error = LABEL.sub("", first_line(event.get("error")))
                failure = f"{where}{text(event.get('task'))}, {client}: {error}"
                yield from self._point(server_round or 0, at, {}, failure)

    def _of_part(self, at: float, event: Event, task: str) -> Iterator[Point]:
        key = (whole_number(event.get("round")), task)
        part = self.history.rounds.part(*key)
        if part is None:
            return
        values = _round_values(part)
        if (oom := self.history.tally.out_of_memory.total()) > 0:
            values["rounds/out_of_memory"] = float(oom)
        closed = self.history.rounds.closed_round
        if closed is not None and (closed.round, closed.task) == key and part.messages:
            values |= self._of_clients(closed)
        yield from self._point(part.round, at, values)

    def _of_clients(self, closed: OpenRound) -> dict[str, float]:
        """Return metrics, durations and memory of a round's clients by name (``clients/train/loss/mean``)."""
        figures: dict[str, dict[str, float]] = {}  # by name, then by client
        for node, metrics in closed.client_metrics.items():
            for name, value in metrics.items():
                figures.setdefault(name, {})[self._client_of(node)] = value
        for call in closed.calls:
            if call.client in _ON_SERVER:
                continue
            if call.seconds is not None:
                figures.setdefault("call_seconds", {})[call.client] = call.seconds
            if call.peak_bytes:
                figures.setdefault("gpu_peak_gib", {})[call.client] = max(call.peak_bytes.values()) / _GIB
        self._clients.update(*figures.values())
        has_own_series = max(self.history.run.clients or 0, len(self._clients)) <= MOST_CLIENTS
        values: dict[str, float] = {}
        for name, by_client in figures.items():
            # Comparisons with nan are always false. So the extremes ignore nan, while the mean becomes nan.
            prefix, numbers = f"clients/{closed.task}/{name}", list(by_client.values())
            known = [value for value in numbers if not math.isnan(value)] or numbers
            values |= {
                f"{prefix}/mean": sum(numbers) / len(numbers),
                f"{prefix}/min": min(known),
                f"{prefix}/max": max(known),
            }
            if has_own_series:
                values |= {f"{prefix}/client {client}": value for client, value in by_client.items()}
        return values

    def _gpus(self) -> dict[str, float]:
        values: dict[str, float] = {}
        held_leases = [
            lease
            for lease in self.history.leases.spans
            if lease.granted_at is not None and lease.released_at is None
        ]
        for gpu in self.history.hosts.gpus_of_run:
            if not (samples := self.history.hosts.samples.get(gpu.uuid)):
                continue
            readings = {
                "used_gib": None if samples[-1].used_bytes is None else samples[-1].used_bytes / _GIB,
                "leased_gib": sum(lease.memory_bytes.get(gpu.uuid, 0) for lease in held_leases) / _GIB,
                "utilization_percent": samples[-1].utilization_percent,
                "temperature_c": samples[-1].temperature_c,
            }
            # GPUs of other hosts have the same indices, so their names include the host.
            prefix = "" if gpu.host in ("", self.history.run.host) else f"{gpu.host}/"
            names = f"gpu/{prefix}{gpu.index}"
            values |= {
                f"{names}/{name}": float(reading) for name, reading in readings.items() if reading is not None
            }
        return values

    def _point(
        self, server_round: int | None, at: float, values: Mapping[str, float], failure: str = ""
    ) -> Iterator[Point]:
        if values or failure:
            seconds = max(0, int(at - (self.history.run.started_at or at)))
            axis, step = (SECONDS, seconds) if server_round is None else (ROUND, server_round)
            yield Point(self._sent, axis, step, at, values, failure)
            self._sent += 1


def _round_values(part: RoundPart) -> dict[str, float]:
    values = {f"{part.task}/{name}": value for name, value in numbers_of(part.reported_metrics).items()}
    if part.seconds is not None:
        values[f"rounds/{part.task}/seconds"] = part.seconds
    if part.messages:
        values[f"rounds/{part.task}/messages"] = float(part.messages)
        values[f"rounds/{part.task}/failed"] = float(part.failed)
    return values


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return a nested config as a flat mapping: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``.

    Values of unsupported types become strings.
    """
    values: dict[str, Value] = {}
    for key, value in config.items():
        name = encodable(f"{prefix}{key}")
        if isinstance(value, Mapping):
            values |= flat(value, f"{name}.")
        elif isinstance(value, str):
            values[name] = encodable(value)
        elif value is None or isinstance(value, int | float | bool):
            values[name] = value
        elif isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
            values |= flat({str(index): item for index, item in enumerate(value)}, f"{name}.")
        else:
            values[name] = encodable(str(value))
    return values
