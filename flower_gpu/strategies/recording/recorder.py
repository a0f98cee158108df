"""The recorder: it turns the steps of a strategy and the messages of a grid into the events of a run.

A run's trace and display show rounds: how many messages were sent, how many clients replied or failed, and
the metrics. Flower has no object for that, so the recorder puts rounds together from two sources:

- the strategy, by the wrappers in ``strategies.py``. They report when a strategy configures a round and when
  it aggregates the replies (``phase_opened``, ``phase_announced``, ``phase_closed``);
- the grid, by ``recorded_grid.py``. It reports each message and how it ended (``sent``, ``replied``,
  ``missed``).

A :class:`Phase` has the messages of a kind in a round. The phase of a strategy is announced: it opens before
its messages are sent, and closes with the aggregate. An app with its own loop announces no phases. Then the
messages of a kind with the same round number belong together, or without such a number the messages of the
same call.

Several threads call the recorder: the ServerApp's thread, threads of Flower's legacy server, and threads in
which a grid reads messages. One reentrant lock guards everything. ``on_event`` is called under that lock, so
it gets the events one at a time, and must not wait for another thread that records.

The recorder also decides when a run is over because all clients fail. It never stops a thread. Instead,
:meth:`Recorder.check` raises the error in the next thread that sends a message or receives a reply.

The end of this module converts metrics of Flower's records to types that the trace and JSON files can hold.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.common.constant import ErrorCode

from flower_gpu import trace
from flower_gpu.apps.failures import AllFailed
from flower_gpu.errors import ClientsFailedError, shortened
from flower_gpu.flower.records import reason_of, records_in, round_of
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.trace import NO_REPLY, SERVER_EVALUATE, TRAIN, Event

#: A metric: a value of Flower's MetricRecord, or a string, which the NumPyClient API allows.
Metric = bool | int | float | str | None | list[int] | list[float]
Metrics = Mapping[str, Metric]

OnEvent = Callable[[Event], None]
_LATE: Final = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
#: The reason for the failure of messages if the app never pulled their replies.
NOT_PULLED: Final = f"{NO_REPLY} was pulled"


def write_event(event: Event) -> None:
    """Append an event of a recorder to the trace of the current run."""
    if folder := os.environ.get(RUN_DIR_VARIABLE):
        metrics = {"metrics": finite(event["metrics"], trace.spelled)} if "metrics" in event else {}
        trace.append(folder, {**event, **metrics})


@dataclass(eq=False)
class Phase:
    """The messages of a kind in a round. The kind is the part of the message type before the dot.

    ``announced``: True if a strategy has announced these messages, and will report the aggregate of their
    replies.
    ``announced_total``: number of messages that a strategy has announced.
    ``refused``: clients that replied with an error, without those that were only late.
    """

    server_round: int | None
    kind: str
    announced: bool
    total: int | None = None
    announced_total: int | None = None
    is_shown: bool = False
    is_judged: bool = False
    sent: int = 0
    ended: int = 0
    succeeded: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        """Whether all messages have ended."""
        return self.sent == self.ended

    def event(self, name: str, **fields: Any) -> Event:
        """Return an event of this round and kind."""
        return trace.make(name, round=self.server_round, task=self.kind, **fields)

    def finished(self, metrics: Metrics) -> Event:
        """Return the event for the end of the phase."""
        return self.event(
            "round_finished",
            clients=len(self.succeeded - self.failed),
            failed=len(self.failed),
            messages=self.sent,
            seconds=round(time.monotonic() - self.began_s, 3),
            metrics=metrics,
        )


class Recorder:
    """The source of a run's events about rounds. Safe to use from several threads.

    ``on_event``: called with each event, one at a time.
    ``partition_of``: returns a node's partition; without it, events name nodes by their ids.
    ``pointer``: returns where to read about the first failure, for the error that ends a run in which all
    clients fail; without it such a run goes on.
    """

    def __init__(
        self,
        on_event: OnEvent,
        partition_of: Callable[[int], int] | None = None,
        pointer: Callable[[], str] | None = None,
    ) -> None:
        #: The latest global model: ArrayRecord, Parameters or None. Earlier models are not kept.
        self.model: Any = None
        self._on_event = on_event
        #: Number of messages that are handled at a time, if known.
        self.concurrency: int | None = None
        #: Returns the expected seconds of calls, by kind and node ids. With None, messages keep the order of
        #: the strategy.
        self.expected_s: Callable[[str, list[int | None]], list[float]] | None = None
        self._partition_of = partition_of
        self._lock = threading.RLock()
        self._announced: dict[str, Phase] = {}
        self._open_phases: dict[tuple[str, Any], Phase] = {}
        self._closed_at_s: dict[str, float] = {}  # end of this strategy's last phase, by kind
        self._reported: set[tuple[str, int | None]] = set()  # kinds and rounds with a recorded end
        self._resumed_round = -1
        self._pointer = pointer
        self._rule = AllFailed()
        # Failed messages. Messages of an app's own loop count only if their reply was an error.
        self._failed = 0
        self._why_over: str | None = None
        self._ended_by: BaseException | None = None
        #: The last round in which every client failed.
        self.failed_round: int | None = None

    def check(self) -> None:
        """Raise an exception if all clients fail, or if a client failed in a way that ends the run.

        Raises RunEndedError on each call, so that an app that catches it cannot continue.
        """
        if self._ended_by is not None:
            raise self._ended_by
        if self._why_over is not None and self._pointer is not None:
            raise ClientsFailedError(f"{self._why_over}; {self._pointer()}")

    def tell(self, name: str, **fields: Any) -> None:
        """Pass on an event about the run as a whole."""
        with self._lock:
            self._on_event(trace.make(name, **fields))

    # Steps of a strategy

    def run_started(self, strategy: str, num_rounds: int | None, resumes: str | None = None) -> None:
        """Record that a strategy starts.

        ``resumes``: kind of strategy whose runs it can resume; None if it can resume no run.
        """
        with self._lock:
            self._reported.clear()
            self._closed_at_s.clear()
            self._resumed_round = -1
            self._on_event(
                trace.make("strategy_started", strategy=strategy, num_rounds=num_rounds, resumes=resumes)
            )

    def run_ended(self) -> None:
        """Record that the strategy has finished all its rounds."""
        with self._lock:
            self._on_event(trace.make("strategy_finished"))

    def run_resumed(self, server_round: int) -> None:
        """Record that the strategy resumes a run after this round."""
        with self._lock:
            self._resumed_round = server_round
            self._on_event(trace.make("strategy_resumed", round=server_round))

    def phase_opened(self, kind: str, server_round: int | None) -> None:
        """Record that messages of a kind will be sent for a round."""
        with self._lock:
            self._close_others()
            if (previous := self._announced.pop(kind, None)) is not None:
                self._close(previous, {})
            self._announced[kind] = Phase(server_round, kind, announced=True)

    def phase_announced(self, kind: str, total: int | None, updates: int | None = None) -> None:
        """Record the number of messages in the current phase of a kind.

        ``total``: number of messages; None if it is not known before they are sent.
        ``updates``: number of successful replies that end the phase, however many messages were sent. Such a
        phase begins at the end of the previous round, because its clients have trained since then. Most
        replies may have arrived when the strategy begins the round.
        """
        with self._lock:
            phase = self._announced.get(kind)
            if phase is not None and updates and kind in self._closed_at_s:
                phase.began_s = self._closed_at_s[kind]
            if phase is not None and (updates or total):
                phase.total = updates or total
                phase.announced_total = None if updates else total
                self._show(phase)

    def phase_closed(self, kind: str, server_round: int | None, metrics: Metrics) -> None:
        """Record a strategy's aggregate of the replies."""
        with self._lock:
            phase = self._announced.pop(kind, None)
            if phase is None:
                for key, other in self._open_phases.items():
                    if other.kind == kind and other.server_round in (None, server_round):
                        phase = self._open_phases.pop(key)
                        phase.server_round = server_round
                        break
            self._close(phase or Phase(server_round, kind, announced=True), metrics)
            self._closed_at_s[kind] = time.monotonic()

    def evaluated(
        self,
        server_round: int | None,
        metrics: Metrics,
        seconds: float | None = None,
        kind: str = SERVER_EVALUATE,
    ) -> None:
        """Record metrics that do not come from messages, unless they were recorded before."""
        with self._lock:
            is_old = server_round is not None and server_round <= self._resumed_round
            if not is_old and (kind, server_round) not in self._reported:
                self._reported.add((kind, server_round))
                phase = Phase(server_round, kind, announced=True)
                self._on_event({**phase.finished(metrics), "seconds": seconds})

    # Steps of a grid

    def sent(self, message: Message, batch: object) -> Phase:
        """Record that a message is sent, and return its phase.

        ``batch``: object that stands for the messages that are sent together.
        """
        kind = message.metadata.message_type.partition(".")[0]
        with self._lock:
            phase = self._announced.get(kind)
            if phase is None:
                phase = self._other(message, kind, batch)
            self._count(phase)
        return phase

    def taken(self, reply: Message, node_id: int) -> None:
        """Record a training message and its reply in the current round; it may be from an earlier round."""
        with self._lock:
            phase = self._announced.get(TRAIN)
            if phase is not None:
                self._count(phase)
                self.replied(phase, reply, node_id)

    def _count(self, phase: Phase) -> None:
        phase.sent += 1
        if phase.is_shown and phase.total is not None and phase.sent > phase.total:
            phase.total = phase.sent
            self._on_event(phase.event("round_grew", messages=phase.total))
        elif not phase.is_shown:
            phase.total = phase.sent
            self._show(phase)

    def replied(self, phase: Phase, reply: Message, node_id: int | None = None) -> None:
        """Record a reply.

        ``node_id``: node that got the message. It is needed because errors that the SuperLink itself creates
        name the SuperLink as their source.
        """
        node_id = reply.metadata.src_node_id if node_id is None else node_id
        if reply.has_error():
            reason = reason_of(reply)
            with self._lock:
                self._ended_by = self._ended_by or getattr(reply.error, "ends_run", None)
                is_late = reply.error.code in _LATE
                if not is_late:
                    phase.refused.add(node_id)
                self._failed += phase.announced or not is_late
                self._ended(phase, node_id, reason, traceback=getattr(reply.error, "traceback", ""))
        else:
            self._ended(phase, node_id, None, _metrics_in(reply))

    def missed(self, phase: Phase, node_id: int, why: str) -> None:
        """Record that a message gets no reply."""
        with self._lock:
            self._failed += phase.announced
            self._ended(phase, node_id, why)

    def may_be_settled(self, phase: Phase) -> None:
        """Record that all messages of a batch were sent and a reply has arrived."""
        with self._lock:
            if phase.is_idle and not phase.announced:
                self._judge(phase)

    def batch_ended(self, batch: object) -> None:
        """Record that a batch is complete: no more messages are sent, and all replies have arrived."""
        with self._lock:
            for key in [key for key in self._open_phases if key[1] is batch]:
                self._close(self._open_phases.pop(key), {})

    def close(self, *, is_whole: bool = True) -> None:
        """Record the open phases; after an error, only those that have all replies."""
        with self._lock:
            if is_whole:
                for phase in [*self._open_phases.values(), *self._announced.values()]:
                    self._close(phase, {})
            else:
                self._close_others()
            self._open_phases.clear()
            self._announced.clear()
            self._over(self._rule.never_succeeded(self._failed))

    def _other(self, message: Message, kind: str, batch: object) -> Phase:
        server_round = round_of(message)
        # Messages without a round number belong together if they are sent together.
        key = (kind, batch if server_round is None else server_round)
        if key not in self._open_phases:
            self._close_others()
            self._open_phases[key] = Phase(server_round, kind, announced=False)
        return self._open_phases[key]

    def _ended(
        self,
        phase: Phase,
        node_id: int,
        reason: str | None,
        metrics: Metrics = MappingProxyType({}),
        traceback: str = "",
    ) -> None:
        with self._lock:
            phase.ended += 1
            (phase.succeeded if reason is None else phase.failed).add(node_id)
            traceback_field = {"traceback": traceback} if traceback else {}
            node = self._partition(node_id)
            fields = {"node": node, "error": reason, "metrics": metrics, "aggregated": phase.announced}
            self._on_event(phase.event("reply", **fields, **traceback_field))
            if phase.announced_total is not None and phase.ended >= phase.announced_total:
                self._judge(phase)

    def _judge(self, phase: Phase) -> None:
        """Decide if the run is over, after all replies of a phase have arrived."""
        if not phase.is_judged:
            phase.is_judged = True
            if phase.refused and not phase.succeeded:
                self.failed_round = phase.server_round
            self._over(
                self._rule.replied(phase.kind, phase.server_round, len(phase.succeeded), len(phase.refused))
            )

    def _over(self, why: str | None) -> None:
        if why is not None and self._why_over is None:
            self._why_over = why
            self._on_event(trace.make("all_failed", reason=why))

    def place_of(self, node_id: int) -> int:
        """Return the sort key of a node: its partition if known, otherwise its id."""
        partition = self._partition(node_id)
        return node_id if partition is None else partition

    def name_of(self, node_id: int) -> str:
        """Return the name of a node in errors: it is called a client if its partition is known."""
        partition = None if self._partition_of is None else self._partition(node_id)
        return f"node {node_id}" if partition is None else f"client {partition}"

    def _partition(self, node_id: int) -> int | None:
        if self._partition_of is None:
            return node_id
        try:
            return self._partition_of(node_id)
        except KeyError:
            return None

    def _show(self, phase: Phase) -> None:
        if not phase.is_shown:
            phase.is_shown = True
            self._on_event(phase.event("round_started", messages=phase.total))

    def _close_others(self) -> None:
        for key in [key for key, phase in self._open_phases.items() if phase.is_idle]:
            self._close(self._open_phases.pop(key), {})

    def _close(self, phase: Phase, metrics: Metrics) -> None:
        # A strategy aggregates even if it sent no messages to evaluate. Such a phase is not recorded.
        self._judge(phase)
        if phase.sent or metrics:
            self._reported.add((phase.kind, phase.server_round))
            self._on_event(phase.finished(metrics))


#: Prefixes of records with the results of a NumPyClient, which have their metrics in a ConfigRecord.
_OF_NUMPY_CLIENTS: Final = ("fitres.", "evaluateres.")


def _metrics_in(reply: Message) -> dict[str, Metric]:
    records: dict[str, MetricRecord | ConfigRecord] = dict(records_in(reply, MetricRecord))
    if any(name.startswith(_OF_NUMPY_CLIENTS) for name in records):
        records |= {
            name: record
            for name, record in records_in(reply, ConfigRecord).items()
            if name.startswith(_OF_NUMPY_CLIENTS) and name.endswith(".metrics")
        }
        return {key: plain(value) for record in records.values() for key, value in record.items()}
    alone = len(records) == 1
    return {
        key if alone else f"{name}.{key}": plain(value)
        for name, record in records.items()
        for key, value in record.items()
    }


def clean(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics as Python's own types. A value that is not a metric is converted to a string."""
    return {str(key): plain(value) for key, value in metrics.items()}


def plain(value: Any) -> Any:
    """Return a metric as a value of Python's own types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a number of NumPy or torch
        try:
            return plain(value.item())
        except (TypeError, ValueError, RuntimeError):
            pass
    return shortened(str(value))


def finite(value: Any, replacement: Callable[[float], Any] = lambda number: None) -> Any:
    """Return a value that JSON can hold. Objects are converted to strings.

    ``replacement``: returns the substitute for a number that is not finite; null by default.
    """
    if isinstance(value, Mapping):
        return {str(key): finite(item, replacement) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item, replacement) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    converted = plain(value)
    if isinstance(converted, float) and not math.isfinite(converted):
        return replacement(converted)
    return converted
