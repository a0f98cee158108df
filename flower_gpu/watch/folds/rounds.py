"""Folds the events of rounds: their messages, replies and metrics.

A *part* of a round is all messages of the round with the same task, such as ``train``, or the server's own
evaluation.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from flower_gpu.apps.failures import COMPLETED
from flower_gpu.trace import SERVER_EVALUATE, SPELLED, Event
from flower_gpu.watch.fields import metric_rank, node_id, number, text, whole_number
from flower_gpu.watch.folds.failures import FailureReasons
from flower_gpu.watch.folds.limits import KEPT_ENTRIES, drop_oldest
from flower_gpu.watch.folds.run import RunFold
from flower_gpu.watch.folds.tally import Tally
from flower_gpu.watch.folds.worker_span import WorkerSpan

_MAX_METRICS: Final = 1000  # for each evaluation
_MAX_REPLY_TIMES: Final = 1000
# Limits for a history that does not keep all rounds. Displays draw curves over many rounds, but of a few
# metrics only.
_MOST_PARTS: Final = 1_500
_KEPT_METRICS: Final = 3


@dataclass
class RoundPart:
    """The results of a server-side evaluation, or of the messages with the same task in a round."""

    time: float
    round: int | None
    task: str
    metrics: dict[str, float] = field(default_factory=dict)  # finite numbers only
    reported_metrics: dict[str, Any] = field(default_factory=dict)  # all reported metrics
    seconds: float | None = None
    messages: int = 0  # number of sent messages
    failed: int = 0

    def finish(self, time: float, event: Event, messages: int, failed: int) -> None:
        """Add the facts of an event at the end of the part.

        A strategy and a simulation may both write such an event, each with some of the facts.
        """
        self.time = time
        reported = {**self.reported_metrics, **first_metrics(event.get("metrics"))}
        self.reported_metrics = first_metrics(reported)
        self.metrics = {name: x for name, x in numbers_of(self.reported_metrics).items() if math.isfinite(x)}
        seconds = number(event.get("seconds"))
        self.seconds = self.seconds if seconds is None else seconds
        self.messages += messages
        self.failed += failed

    def shrink(self) -> None:
        """Keep only the few metrics that curves need."""
        if self.reported_metrics:
            kept = sorted(self.metrics, key=metric_rank)[:_KEPT_METRICS]
            self.reported_metrics, self.metrics = {}, {name: self.metrics[name] for name in kept}


@dataclass
class OpenRound:
    """Messages in flight with the same task."""

    round: int | None
    task: str
    messages: int | None
    started_at: float
    replies: int = 0  # number of replies, which the trace of a simulated run does not contain
    failed: int = 0
    #: Times of the last replies.
    replied_at: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_REPLY_TIMES))
    client_metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers in replies, by node
    calls: list[WorkerSpan] = field(default_factory=list)  # finished calls

    @property
    def finished(self) -> int:
        """Number of finished messages, limited to the total because messages of a lost host run again."""
        done = max(len(self.calls), self.replies)
        return done if self.messages is None else min(done, self.messages)

    def reply(self, time: float, event: Event) -> None:
        """Count a reply and store its metrics."""
        self.replies += 1
        self.failed += event.get("error") is not None
        self.replied_at.append(time)
        node, numbers = node_id(event.get("node")), numbers_of(first_metrics(event.get("metrics")))
        if node is not None and numbers:
            self.client_metrics[node] = numbers


def first_metrics(metrics: object) -> dict[Any, Any]:
    """Return the first ``_MAX_METRICS`` metrics, because a trace may contain any number of names."""
    if not isinstance(metrics, Mapping):
        return {}
    first = islice(metrics.items(), _MAX_METRICS)
    return {name: SPELLED.get(value, value) if isinstance(value, str) else value for name, value in first}


def numbers_of(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numeric metrics, including infinite values and NaN."""
    numbers = {
        str(name): value if isinstance(value, float) else number(value) for name, value in metrics.items()
    }
    return {name: value for name, value in numbers.items() if value is not None}


class RoundFold:
    """The rounds of a run: the open one, and the results of the finished ones.

    Without ``keep_all``, only recent parts are kept.
    """

    def __init__(self, run: RunFold, tally: Tally, *, keep_all: bool) -> None:
        self._run = run
        self._tally = tally
        self._keep_all = keep_all
        self.strategy: str | None = None
        self.strategy_started_at: float | None = None
        self.num_rounds: int | None = None
        self.resumed_round: int | None = None
        self.highest_round = 0  # highest round with all parts finished
        self.latest_round = 0  # highest round with a finished part
        # Highest round in the tally. It does not go down when a resumed run repeats rounds.
        self._counted_round = 0
        self._has_strategy = False  # True while a strategy is running
        self.open_round: OpenRound | None = None  # part of a round with messages in flight
        self.closed_round: OpenRound | None = None  # the previous open round, now finished
        self._parts: dict[tuple[int | None, str], RoundPart] = {}  # finished parts by round and task
        # The following values could be computed from all parts. They are kept up to date instead, because
        # displays read them often and a run may have thousands of rounds.
        self._last_metrics: dict[str, tuple[float, Mapping[str, Any]]] = {}  # time and metrics, by task
        self._open_ends: dict[int, float] = {}  # end of the latest finished part, by unfinished round
        #: Time at which the last finished round ended.
        self.rounds_ended_at: float | None = None
        self._sent = self._failed = 0  # number of messages in finished parts
        self._sent_before_resume = 0  # number of messages in parts that finished before the last resume
        # Number of replies in unfinished parts. The keys are round, task, and True for error
        # replies.
        self._replied: Counter[tuple[int | None, str, bool]] = Counter()
        # Numbers of sent and failed messages, as reported at the end of the run
        self._final_counts: tuple[int, int] | None = None
        self.failures = FailureReasons()  # reasons that error replies give
        self.all_failed = ""  # reason to end the run, reported if all clients fail

    @property
    def parts(self) -> list[RoundPart]:
        """Finished parts of all rounds. The ``round`` of a part is None if its messages had no round."""
        return list(self._parts.values())

    @property
    def numbered_parts(self) -> list[RoundPart]:
        """Finished parts of all numbered rounds."""
        return [part for part in self._parts.values() if part.round is not None]

    def newest_parts(self) -> Iterator[RoundPart]:
        """Return an iterator over the finished parts of all rounds, newest first."""
        return reversed(self._parts.values())

    def part(self, server_round: int | None, task: str) -> RoundPart | None:
        """Return the finished part of a round for a task, or None."""
        return self._parts.get((server_round, task))

    @property
    def last_metrics(self) -> dict[str, Mapping[str, Any]]:
        """The last reported metrics of each task, sorted by time."""
        by_time = sorted(self._last_metrics.items(), key=lambda item: item[1][0])
        return {task: metrics for task, (_, metrics) in by_time}

    @property
    def messages_sent(self) -> int:
        """Number of finished messages: messages of finished parts, and other messages with a reply."""
        return self._sent + self._replied.total() if self._final_counts is None else self._final_counts[0]

    @property
    def messages_failed(self) -> int:
        """Number of failed messages."""
        if self._final_counts is not None:
            return self._final_counts[1]
        return self._failed + sum(count for (*_, is_error), count in self._replied.items() if is_error)

    @property
    def messages_per_s(self) -> float | None:
        """Number of messages finished per second since the run was started or last resumed."""
        seconds = self._run.seconds
        return (self.messages_sent - self._sent_before_resume) / seconds if seconds else None

    def fold(self, time: float, event: Event) -> None:
        """Take in an event."""
        match event.get("event"):
            case "run_started":
                self._start_run(event)
            case "strategy_started":
                self.strategy, self.strategy_started_at = text(event.get("strategy")), time
                self._learn_num_rounds(event)
                self._has_strategy = True
            case "strategy_resumed":
                self._resume(whole_number(event.get("round")))
            case "round_started":
                self._open(time, event)
            case "round_grew" if (open_round := self._open_round_of(event)) is not None:
                open_round.messages = whole_number(event.get("messages"))
            case "reply":
                self._reply(time, event)
            case "round_finished":
                task = text(event.get("task"))
                if self.open_round is not None and self.open_round.task == task:
                    self.closed_round, self.open_round = self.open_round, None
                self._finish_part(time, event, task)
            case "round":  # the server's own evaluation of a round
                self._learn_num_rounds(event)
                self._finish_part(time, event, SERVER_EVALUATE)
            case "strategy_finished":
                self._has_strategy = False
                self._finish_rounds(self.latest_round)
            case "all_failed":
                self.all_failed = self.all_failed or text(event.get("reason"))
            case "run_finished":
                self._finish_run(event)

    def _start_run(self, event: Event) -> None:
        self._final_counts, self.all_failed = None, ""
        # A resumed run sends messages of unfinished parts again, and messages that belong to no round. So
        # remove their results.
        if self._run.has_one_host:
            self._replied.clear()
            self._discard(lambda server_round: server_round is None)
        self._sent_before_resume = self._sent
        self._learn_num_rounds(event)

    def _finish_run(self, event: Event) -> None:
        # The reported counts are more reliable than the counts from the trace, which may lack replies.
        if (messages := whole_number(event.get("messages"))) is not None:
            self._final_counts = messages, whole_number(event.get("failed")) or 0
        if self._run.outcome == COMPLETED:
            self._finish_rounds(self.latest_round)
        self.open_round = None

    def _learn_num_rounds(self, event: Event) -> None:
        self.num_rounds = whole_number(event.get("num_rounds")) or self.num_rounds

    def _resume(self, after: int | None) -> None:
        self.resumed_round = after
        if after is not None:
            self.latest_round = self.highest_round = min(self.highest_round, after)
            self._discard(lambda server_round: (server_round or 0) > after)

    def _discard(self, is_repeated: Callable[[int | None], bool]) -> None:
        """Remove the results of rounds that a resumed run repeats."""
        for key in [key for key in self._parts if is_repeated(key[0])]:
            part = self._parts.pop(key)
            self._sent -= part.messages
            self._sent_before_resume -= part.messages
            self._failed -= part.failed
        self.failures.take_back(is_repeated)
        self._last_metrics.clear()
        self._open_ends.clear()
        self.rounds_ended_at = None
        for part in self._parts.values():
            self._note_end(part)

    def _open(self, time: float, event: Event) -> None:
        server_round = whole_number(event.get("round"))
        messages = whole_number(event.get("messages"))
        self.open_round = OpenRound(server_round, text(event.get("task")), messages, time)
        self._finish_rounds(min(self.latest_round, (server_round or 0) - 1))

    def _open_round_of(self, event: Event) -> OpenRound | None:
        key = (whole_number(event.get("round")), text(event.get("task")))
        current = self.open_round
        return current if current is not None and (current.round, current.task) == key else None

    def _reply(self, time: float, event: Event) -> None:
        has_failed = event.get("error") is not None
        self._replied[whole_number(event.get("round")), text(event.get("task")), has_failed] += 1
        if (open_round := self._open_round_of(event)) is not None:
            open_round.reply(time, event)
        if has_failed:
            self.failures.add(event)

    def _finish_part(self, time: float, event: Event, task: str) -> None:
        server_round = whole_number(event.get("round"))
        self.latest_round = max(self.latest_round, server_round or 0)
        if not self._has_strategy:
            self._finish_rounds(self.latest_round)
        messages, failed = whole_number(event.get("messages")) or 0, whole_number(event.get("failed")) or 0
        part = self._parts.setdefault((server_round, task), RoundPart(time, server_round, task))
        part.finish(time, event, messages, failed)
        self._note_end(part)
        self._sent += messages
        self._failed += failed
        for key in list(self._replied):
            # A reply without a round counts for this part, because only the end of a part may name the round.
            if key[0] in (server_round, None) and key[1] == task:
                del self._replied[key]
        if not self._keep_all:
            self._forget_old(part)

    def _forget_old(self, finished: RoundPart) -> None:
        """Drop the oldest part above the limit, and most metrics of parts that are no longer recent."""
        drop_oldest(self._parts, _MOST_PARTS)
        drop_oldest(self._last_metrics, KEPT_ENTRIES)
        drop_oldest(self._open_ends, KEPT_ENTRIES)
        *recent, oldest = islice(self.newest_parts(), KEPT_ENTRIES + 1)
        if len(recent) == KEPT_ENTRIES:
            oldest.shrink()
            # An event may also extend a part of an earlier round.
            if all(part is not finished for part in recent):
                finished.shrink()

    def _note_end(self, part: RoundPart) -> None:
        """Update ``_last_metrics`` and ``_open_ends`` with a finished part."""
        if part.reported_metrics and part.time >= self._last_metrics.get(part.task, (part.time,))[0]:
            # Remove the key first, so that the order of the keys follows the times.
            self._last_metrics.pop(part.task, None)
            self._last_metrics[part.task] = part.time, part.reported_metrics
        if part.round is not None:
            self._open_ends[part.round] = max(part.time, self._open_ends.get(part.round, part.time))
            self._end_rounds()

    def _end_rounds(self) -> None:
        finished = [server_round for server_round in self._open_ends if server_round <= self.highest_round]
        for server_round in finished:
            ended_at = self._open_ends.pop(server_round)
            self.rounds_ended_at = max(ended_at, self.rounds_ended_at or ended_at)

    def _finish_rounds(self, last: int) -> None:
        """Mark all rounds up to ``last`` as finished."""
        self.highest_round = max(self.highest_round, last)
        self._end_rounds()
        if last > self._counted_round:
            self._tally.rounds_finished += 1
            self._counted_round = last
