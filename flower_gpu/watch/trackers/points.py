"""What a tracker is sent of a history: figures of rounds, of their clients and of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from flower_gpu.apps.failures import LABEL
from flower_gpu.trace import SERVER_EVALUATE, Event
from flower_gpu.watch.fields import first_line, node_id, number, text, whole
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import OpenRound, RoundPart
from flower_gpu.watch.trackers.tracker import ROUND, SECONDS, Axis, FailedMessage, Point, Value

#: With more clients in a round only their mean, least and most are sent: trackers get slow with many series.
MOST_CLIENTS: Final = 20
#: Seconds between two looks at the GPUs. The trace has one each half second.
GPU_INTERVAL_S: Final = 5.0
#: Failed messages that a tracker is told of; all of them are in ``failures.log``.
MOST_FAILED: Final = 100

_GIB: Final = 1 << 30
_ON_SERVER: Final = ("", "server")


#: What :class:`Points` is asked about; of other events it sends nothing.
EVENTS: Final = ("round_finished", "round", "gpu_sample", "strategy_started", "reply", "run_finished")


class Points:
    """A view on a history: first the history gets an event, then this is asked for what to send of it.

    ``client_of`` returns the client of a node's id, as calls in the trace name it.
    """

    def __init__(self, history: History, client_of: Callable[[int], str] = str) -> None:
        self._history = history
        self._client_of = client_of
        self._sent = 0
        self._looked_at: float | None = None
        self._failed = 0

    def of(self, event: Event) -> Iterator[Point]:
        """Yield the figures that an event has completed."""
        at = number(event.get("time"))
        if at is None:
            return
        match event.get("event"):
            case "round_finished":
                yield from self._of_part(at, event, text(event.get("task")))
            case "round" if self._history.strategy is None:  # else a strategy's recorder tells it, too
                yield from self._of_part(at, event, SERVER_EVALUATE)
            case "gpu_sample" if self._looked_at is None or at - self._looked_at >= GPU_INTERVAL_S:
                self._looked_at = at
                yield from self._point(SECONDS, self._seconds(at), at, self._gpus())
            case "run_finished":  # the last look at the GPUs, when all workers are gone
                yield from self._point(SECONDS, self._seconds(at), at, self._gpus())

    def failed(self, event: Event) -> FailedMessage | None:
        """Return the failed message that an event tells of; None where there is none, or were too many."""
        if event.get("event") != "reply" or event.get("error") is None or self._failed >= MOST_FAILED:
            return None
        self._failed += 1
        server_round, node = whole(event.get("round")), node_id(event.get("node"))
        client = "a client" if node is None else f"client {self._client_of(node)}"
        where = "" if server_round is None else f"round {server_round}, "
        error = LABEL.sub("", first_line(event.get("error")))  # it may name the client, too
        at = number(event.get("time")) or 0.0
        return FailedMessage(server_round or 0, at, f"{where}{text(event.get('task'))}, {client}: {error}")

    def described(self, event: Event) -> dict[str, Value]:
        """Return what an event tells of the run as a whole."""
        if event.get("event") != "strategy_started":
            return {}
        return {"strategy": self._history.strategy, "num_rounds": self._history.num_rounds}

    def _of_part(self, at: float, event: Event, task: str) -> Iterator[Point]:
        key = (whole(event.get("round")), task)
        part = next((one for one in self._history.rounds if (one.round, one.task) == key), None)
        if part is None:
            return
        values = _of_round(part)
        if (oom := self._history.tally.out_of_memory.total()) > 0:
            values["rounds/out_of_memory"] = float(oom)
        closed = self._history.closed_round
        if closed is not None and (closed.round, closed.task) == key and part.messages:
            values.update(self._of_clients(closed))
        if part.round is None:
            yield from self._point(SECONDS, self._seconds(at), at, values)
        else:
            yield from self._point(ROUND, part.round, at, values)

    def _of_clients(self, closed: OpenRound) -> dict[str, float]:
        """Return metrics, durations and memory of a round's clients, as in ``clients/train/loss/mean``."""
        figures: dict[str, dict[str, float]] = {}  # by name, then by client
        for node, metrics in closed.client_metrics.items():
            for name, value in metrics.items():
                figures.setdefault(name, {})[self._client_of(node)] = value
        for call in closed.calls:
            if call.client not in _ON_SERVER:
                if call.seconds is not None:
                    figures.setdefault("call_seconds", {})[call.client] = call.seconds
                if call.peak_bytes:
                    figures.setdefault("gpu_peak_gib", {})[call.client] = max(call.peak_bytes.values()) / _GIB
        values: dict[str, float] = {}
        for name, by_client in figures.items():
            found = list(by_client.values())
            prefix = f"clients/{closed.task}/{name}"
            values |= {
                f"{prefix}/mean": fmean(found),
                f"{prefix}/min": min(found),
                f"{prefix}/max": max(found),
            }
            if len(by_client) <= MOST_CLIENTS:
                values |= {f"{prefix}/client {client}": value for client, value in by_client.items()}
        return values

    def _gpus(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for gpu in self._history.gpus_of_run:
            samples = self._history.samples.get(gpu.uuid)
            if not samples:
                continue
            leased = sum(
                lease.memory_bytes.get(gpu.uuid, 0)
                for lease in self._history.leases
                if lease.granted_at is not None and lease.released_at is None
            )
            told = {
                "used_gib": None if samples[-1].used_bytes is None else samples[-1].used_bytes / _GIB,
                "leased_gib": leased / _GIB,
                "utilization_percent": samples[-1].utilization_percent,
                "temperature_c": samples[-1].temperature_c,
            }
            # Other hosts' GPUs have these numbers, too.
            whose = "" if gpu.host in ("", self._history.host) else f"{gpu.host}/"
            values |= {
                f"gpu/{whose}{gpu.index}/{name}": float(each)
                for name, each in told.items()
                if each is not None
            }
        return values

    def _seconds(self, at: float) -> int:
        return max(0, int(at - (self._history.started_at or at)))

    def _point(self, axis: Axis, step: int, at: float, values: Mapping[str, float]) -> Iterator[Point]:
        if values:
            yield Point(self._sent, axis, step, at, values)
            self._sent += 1


def _of_round(part: RoundPart) -> dict[str, float]:
    values = {f"{part.task}/{name}": value for name, value in part.metrics.items()}
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
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, str | int | float | bool):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, Sequence) and all(isinstance(each, Mapping) for each in value):
            for index, each in enumerate(value):
                found |= flat(each, f"{prefix}{key}.{index}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found
