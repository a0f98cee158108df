"""Sums up a run while it goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flower_gpu.errors import shortened
from flower_gpu.run.failures import outcome_text
from flower_gpu.simulation.events import (
    Event,
    Metrics,
    PhaseFinished,
    Replied,
    RunResumed,
    RunStarted,
)

_MOST_REASONS: Final = 200
_MOST_NAMED: Final = 100  # of one reason; metrics.jsonl names them all
_MOST_CHARACTERS: Final = 1000  # of one message; failures.log has more
_OTHER_REASONS: Final = "other reasons"
# What message_call puts in front: without it, the same failure of many clients is one.
_LABEL: Final = re.compile(r"^\S+ of client \S+: ")
_PID = re.compile(r" \(pid \d+\)")


@dataclass
class _Reason:
    count: int = 0
    named: list[dict[str, Any]] = field(default_factory=list)


class Totals:
    """Counts of a run, and the metrics it ended with. Not safe to use from several threads.

    Parameters
    ----------
    clients : int
        How many virtual clients there are.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._began_s = time.monotonic()
        self._strategy: str | None = None
        self._num_rounds: int | None = None
        self._rounds = 0
        self._messages = 0
        self._messages_before = 0
        self._failed = 0
        self._reasons: dict[str, _Reason] = {}
        self._metrics: dict[str, Metrics] = {}
        self._resumed_round: int | None = None

    def on_event(self, event: Event) -> None:
        """Take an event."""
        match event:
            case RunStarted():
                self._strategy, self._num_rounds = event.strategy, event.num_rounds
            case RunResumed():
                self._resumed_round = event.server_round
            case Replied(error=str()):
                self._fail(event.server_round, event.kind, event.partition, event.error or "")
            case PhaseFinished():
                self._finish(event.server_round, event.kind, event.messages, event.metrics)
            case _:
                pass

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take over what an earlier part of the run has written down."""
        for line in lines:
            server_round, kind = line.get("round"), str(line.get("kind"))
            if kind == "failure":
                self._fail(server_round, str(line.get("type")), line.get("client"), str(line.get("error")))
            elif kind not in ("client", "resumed"):
                self._finish(server_round, kind, line.get("messages") or 0, line.get("metrics") or {})
        self._messages_before = self._messages

    def as_dict(self, outcome: str, **facts: Any) -> dict[str, Any]:
        """Return the summary.

        Parameters
        ----------
        outcome : str
            ``"completed"``, ``"failed"`` or ``"interrupted"``. The summary says of a completed run also how
            many messages failed.
        **facts
            What else is known.
        """
        seconds = time.monotonic() - self._began_s
        here = self._messages - self._messages_before
        return {
            "outcome": outcome_text(outcome, self._failed, self._messages),
            "strategy": self._strategy,
            "rounds": self._rounds,
            "num_rounds": self._num_rounds,
            "resumed_after_round": self._resumed_round,
            "clients": self._clients,
            "messages": self._messages,
            "failed": self._failed,
            "failures": [
                {"reason": reason, "count": found.count, "messages": found.named}
                for reason, found in sorted(self._reasons.items(), key=lambda item: -item[1].count)
            ],
            "seconds": round(seconds, 3),  # of this process: a resumed run has had more
            "messages_per_s": round(here / seconds, 3) if seconds > 0 else None,
            **facts,
            "metrics": {kind: dict(metrics) for kind, metrics in self._metrics.items()},
        }

    def _finish(self, server_round: int | None, kind: str, messages: int, metrics: Metrics) -> None:
        self._messages += messages
        self._rounds = max(self._rounds, server_round or 0)
        if metrics:
            self._metrics[kind] = metrics

    def _fail(self, server_round: int | None, kind: str, client: int | None, error: str) -> None:
        self._failed += 1
        error = shortened(error, _MOST_CHARACTERS)
        reason = _PID.sub("", _LABEL.sub("", error))  # else each worker's would be another one
        if reason not in self._reasons and len(self._reasons) >= _MOST_REASONS:
            reason = _OTHER_REASONS
        found = self._reasons.setdefault(reason, _Reason())
        found.count += 1
        if len(found.named) < _MOST_NAMED:
            found.named.append({"client": client, "type": kind, "round": server_round, "error": error})
