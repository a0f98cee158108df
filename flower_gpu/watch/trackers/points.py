"""What a tracker is sent of a history: figures of rounds, of their clients and of GPUs, and failures."""

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
from flower_gpu.watch.fields import first_line, node_id, number, text, whole
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import OpenRound, RoundPart, numbers_of

#: With more clients in a run only their mean, least and most are sent: trackers get slow with many series.
#: The clients of a round do not count: with sampling, each round would have other series.
MOST_CLIENTS: Final = 20
_GPU_INTERVAL_S: Final = 5.0  # between two looks at the GPUs; the trace has one each half second
_MOST_FAILED: Final = 100  # messages that a tracker is told of; all of them are in ``failures.log``
_GIB: Final = 1 << 30
_ON_SERVER: Final = ("", "server")
ROUND, SECONDS = "round", "seconds"  # what steps count

#: What :class:`Points` is asked about; of other events it sends nothing.
EVENTS: Final = ("round_finished", "round", "gpu_sample", "reply", "run_finished")

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Point:
    """Figures of one moment, by name, such as ``train/loss``; or a message to a client that failed."""

    number: int  # points before this one, also of the run before it was resumed
    axis: str  # what ``step`` counts: rounds, or whole seconds since the run has begun
    step: int
    time: float  # Unix seconds
    values: Mapping[str, float]
    failure: str = ""  # round, type of the message, client and error, in one line; then there are no values


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows."""

    folder: RunFolder
    app: str
    config: Mapping[str, Value]  # what the run was started with, flat
    ids: Mapping[str, str]  # what Tracker.start returned when the run began; empty for a new run


class Tracker(Protocol):
    """One tracker.

    The constructor is called before anything of the run starts: it imports the library, and raises
    :class:`~flower_gpu.errors.ConfigError` where the library cannot be used. The methods are called in one
    thread, one after the other, and may raise any exception.
    """

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the tracker's own run, or go on with it; called again after an exception.

        Returns its ids, and under ``see`` the address or the command by which to look at it.
        """

    def log(self, points: deque[Point]) -> None:
        """Deliver points, the oldest first, and remove each from the left once it is delivered.

        After an exception, another call goes on with the points that are left.
        """

    def close(self, outcome: str) -> None:
        """End the tracker's own run; ``outcome`` is empty for a run that does not say how it has ended."""


class Points:
    """A view on a history: after each event of the history it returns the figures to send.

    ``client_of`` returns the client of a node's id, as calls in the trace name it.
    """

    def __init__(self, history: History, client_of: Callable[[int], str] = str) -> None:
        self.history = history
        self._client_of = client_of
        self._sent = self._failed = 0
        self._looked_at: float | None = None
        self._clients: set[str] = set()  # that have replied

    def of(self, event: Event) -> Iterator[Point]:
        """Yield the figures that an event has completed, or the failed message that it tells of."""
        at = number(event.get("time"))
        if at is None:
            return
        match event.get("event"):
            case "round_finished":
                yield from self._of_part(at, event, text(event.get("task")))
            case "round" if self.history.strategy is None:  # else a strategy's recorder tells it, too
                yield from self._of_part(at, event, SERVER_EVALUATE)
            case "gpu_sample" if self._looked_at is None or at - self._looked_at >= _GPU_INTERVAL_S:
                self._looked_at = at
                yield from self._point(None, at, self._gpus())
            case "run_finished":  # the last look at the GPUs, when all workers are gone
                yield from self._point(None, at, self._gpus())
            case "reply" if event.get("error") is not None and self._failed < _MOST_FAILED:
                self._failed += 1
                server_round, node = whole(event.get("round")), node_id(event.get("node"))
                client = "a client" if node is None else f"client {self._client_of(node)}"
                where = "" if server_round is None else f"round {server_round}, "
                error = LABEL.sub("", first_line(event.get("error")))  # it may name the client, too
                failure = f"{where}{text(event.get('task'))}, {client}: {error}"
                yield from self._point(server_round or 0, at, {}, failure)

    def _of_part(self, at: float, event: Event, task: str) -> Iterator[Point]:
        key = (whole(event.get("round")), task)
        part = self.history.part(*key)
        if part is None:
            return
        values = _of_round(part)
        if (oom := self.history.tally.out_of_memory.total()) > 0:
            values["rounds/out_of_memory"] = float(oom)
        closed = self.history.closed_round
        if closed is not None and (closed.round, closed.task) == key and part.messages:
            values |= self._of_clients(closed)
        yield from self._point(part.round, at, values)

    def _of_clients(self, closed: OpenRound) -> dict[str, float]:
        """Return metrics, durations and memory of a round's clients, as in ``clients/train/loss/mean``."""
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
        has_own_series = max(self.history.clients or 0, len(self._clients)) <= MOST_CLIENTS
        values: dict[str, float] = {}
        for name, by_client in figures.items():
            # Comparing with nan says nothing: the mean is nan then, and the extremes are those of the others.
            prefix, found = f"clients/{closed.task}/{name}", list(by_client.values())
            known = [value for value in found if not math.isnan(value)] or found
            values |= {
                f"{prefix}/mean": sum(found) / len(found),
                f"{prefix}/min": min(known),
                f"{prefix}/max": max(known),
            }
            if has_own_series:
                values |= {f"{prefix}/client {client}": value for client, value in by_client.items()}
        return values

    def _gpus(self) -> dict[str, float]:
        values: dict[str, float] = {}
        held = [one for one in self.history.leases if one.granted_at is not None and one.released_at is None]
        for gpu in self.history.gpus_of_run:
            if not (samples := self.history.samples.get(gpu.uuid)):
                continue
            told = {
                "used_gib": None if samples[-1].used_bytes is None else samples[-1].used_bytes / _GIB,
                "leased_gib": sum(lease.memory_bytes.get(gpu.uuid, 0) for lease in held) / _GIB,
                "utilization_percent": samples[-1].utilization_percent,
                "temperature_c": samples[-1].temperature_c,
            }
            # Other hosts' GPUs have these numbers, too.
            whose = "" if gpu.host in ("", self.history.host) else f"{gpu.host}/"
            names = f"gpu/{whose}{gpu.index}"
            values |= {f"{names}/{name}": float(each) for name, each in told.items() if each is not None}
        return values

    def _point(
        self, server_round: int | None, at: float, values: Mapping[str, float], failure: str = ""
    ) -> Iterator[Point]:
        if values or failure:
            seconds = max(0, int(at - (self.history.started_at or at)))
            axis, step = (SECONDS, seconds) if server_round is None else (ROUND, server_round)
            yield Point(self._sent, axis, step, at, values, failure)
            self._sent += 1


def _of_round(part: RoundPart) -> dict[str, float]:
    values = {f"{part.task}/{name}": value for name, value in numbers_of(part.told).items()}
    if part.seconds is not None:
        values[f"rounds/{part.task}/seconds"] = part.seconds
    if part.messages:
        values[f"rounds/{part.task}/messages"] = float(part.messages)
        values[f"rounds/{part.task}/failed"] = float(part.failed)
    return values


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return a nested config as one mapping: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``; others as texts."""
    found: dict[str, Value] = {}
    for key, value in config.items():
        name = encodable(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif isinstance(value, str):
            found[name] = encodable(value)
        elif value is None or isinstance(value, int | float | bool):
            found[name] = value
        elif isinstance(value, Sequence) and all(isinstance(each, Mapping) for each in value):
            found |= flat({str(index): each for index, each in enumerate(value)}, f"{name}.")
        else:
            found[name] = encodable(str(value))
    return found
