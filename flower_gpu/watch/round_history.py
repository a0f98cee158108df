"""The rounds of a run and its messages to clients, as far as its events tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from flower_gpu.trace import SERVER_EVALUATE
from flower_gpu.watch.fields import node_id, number, text, whole
from flower_gpu.watch.spans import FailureReasons, OpenRound, RoundPart, Tally

_MOST_METRICS: Final = 1000  # of an evaluation


class RoundHistory:
    """Rounds, their messages and their metrics. A method ``_on_<name>`` takes in the events of that name."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._sent = self._failed = 0  # messages of parts of rounds that have finished
        # Replies of the parts that are under way, by round, task and whether they are errors.
        self._replied: Counter[tuple[int | None, str, bool]] = Counter()
        self.failures = FailureReasons()  # of replies that are errors
        self.all_failed = ""  # why the run computes nothing, once that is so
        self.strategy: str | None = None
        self.strategy_started_at: float | None = None
        self.num_rounds: int | None = None
        self.resumed_round: int | None = None
        self.highest_round = 0  # of those that have finished, in all their parts
        self._latest_round = 0  # of which a part has finished
        self._has_strategy = False  # one that is under way
        self.last_metrics: dict[str, Mapping[str, Any]] = {}  # by task, as told
        self.open_round: OpenRound | None = None  # messages that are under way
        self.closed_round: OpenRound | None = None  # the ones before, all of which are over
        self._parts: dict[tuple[int | None, str], RoundPart] = {}  # that have finished, by round and task

    @property
    def rounds(self) -> list[RoundPart]:
        """What has finished of each round, by task; ``round`` is None for messages that say none."""
        return list(self._parts.values())

    @property
    def messages_sent(self) -> int:
        """How many messages are over: those of parts that have finished, and those with a reply."""
        return self._sent + self._replied.total()

    @property
    def messages_failed(self) -> int:
        """How many of these have failed."""
        return self._failed + sum(count for (*_, is_error), count in self._replied.items() if is_error)

    @property
    def evaluations(self) -> list[RoundPart]:
        """What has finished, of rounds with a number."""
        return [part for part in self._parts.values() if part.round is not None]

    def _on_strategy_started(self, time: float, event: Mapping[str, Any]) -> None:
        self.strategy, self.strategy_started_at = text(event.get("strategy")), time
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        self._has_strategy = True

    def _on_strategy_finished(self, time: float, event: Mapping[str, Any]) -> None:
        self._has_strategy = False
        self._finish_rounds(self._latest_round)

    def _on_strategy_resumed(self, time: float, event: Mapping[str, Any]) -> None:
        self.resumed_round = after = whole(event.get("round"))
        if after is not None:  # what had finished of later rounds is done again
            self._parts = {key: part for key, part in self._parts.items() if (key[0] or 0) <= after}

    def _on_all_failed(self, time: float, event: Mapping[str, Any]) -> None:
        self.all_failed = self.all_failed or text(event.get("reason"))

    def _on_round_started(self, time: float, event: Mapping[str, Any]) -> None:
        server_round = whole(event.get("round"))
        self.open_round = OpenRound(server_round, text(event.get("task")), whole(event.get("messages")), time)
        self._finish_rounds(min(self._latest_round, (server_round or 0) - 1))

    def _on_round_grew(self, time: float, event: Mapping[str, Any]) -> None:
        if (open_round := self._open_round_of(event)) is not None:
            open_round.messages = whole(event.get("messages"))

    def _on_reply(self, time: float, event: Mapping[str, Any]) -> None:
        has_failed = event.get("error") is not None
        self._replied[whole(event.get("round")), text(event.get("task")), has_failed] += 1
        if (open_round := self._open_round_of(event)) is not None:
            open_round.replies += 1
            open_round.failed += has_failed
            open_round.replied_at.append(time)
            if open_round.first_reply_at is None:
                open_round.first_reply_at = time
            if (node := node_id(event.get("node"))) is not None and (
                figures := _figures(event.get("metrics"))
            ):
                open_round.client_metrics[node] = figures
        if has_failed:
            self.failures.add(event)

    def _open_round_of(self, event: Mapping[str, Any]) -> OpenRound | None:
        told = (whole(event.get("round")), text(event.get("task")))
        one = self.open_round
        return one if one is not None and (one.round, one.task) == told else None

    def _on_round_finished(self, time: float, event: Mapping[str, Any]) -> None:
        task = text(event.get("task"))
        if self.open_round is not None and self.open_round.task == task:
            self.closed_round, self.open_round = self.open_round, None
        self._finish_part(time, event, task)

    def _on_round(self, time: float, event: Mapping[str, Any]) -> None:
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        self._finish_part(time, event, SERVER_EVALUATE)

    def _finish_part(self, time: float, event: Mapping[str, Any], task: str) -> None:
        server_round, metrics = whole(event.get("round")), event.get("metrics")
        self._latest_round = max(self._latest_round, server_round or 0)
        if not self._has_strategy:
            self._finish_rounds(self._latest_round)
        told = dict(islice(metrics.items(), _MOST_METRICS)) if isinstance(metrics, Mapping) else {}
        if told:
            self.last_metrics.pop(task, None)
            self.last_metrics[task] = told
        # A strategy and a simulation may both tell it.
        part = self._parts.setdefault((server_round, task), RoundPart(time, server_round, task))
        part.time, part.told = time, dict(islice({**part.told, **told}.items(), _MOST_METRICS))
        part.metrics = _figures(part.told)
        seconds = number(event.get("seconds"))
        part.seconds = part.seconds if seconds is None else seconds
        sent, failed = whole(event.get("messages")) or 0, whole(event.get("failed")) or 0
        part.messages += sent
        part.failed += failed
        self._sent += sent
        self._failed += failed
        for key in list(self._replied):
            if key[0] in (server_round, None) and key[1] == task:  # its round may be known at the end only
                del self._replied[key]

    def _finish_rounds(self, last: int) -> None:
        """Take note that all rounds up to this one are over; a resumed run does some again."""
        if last > self.highest_round:
            self.tally.rounds_finished += 1
            self.highest_round = last


def _figures(metrics: object) -> dict[str, float]:
    """Return the first of these metrics that are numbers."""
    told = islice(metrics.items(), _MOST_METRICS) if isinstance(metrics, Mapping) else ()
    figures = {str(name): number(value) for name, value in told}
    return {name: figure for name, figure in figures.items() if figure is not None}
