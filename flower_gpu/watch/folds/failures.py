"""The failed messages of a run, grouped by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from flower_gpu.apps.failures import LABEL
from flower_gpu.errors import LAST_LINES, shortened
from flower_gpu.trace import Event
from flower_gpu.watch.fields import first_line, whole_number
from flower_gpu.watch.folds.limits import drop_oldest

# Limits for the stored failures.
_MAX_REASONS: Final = 200
_MAX_MESSAGES: Final = 100  # for each reason
_MAX_ERROR_CHARACTERS: Final = 1000
# Number of rounds that a resumed run can repeat. It usually repeats only the last round or two.
_MAX_REPEATED_ROUNDS: Final = 100
_OTHER_REASONS: Final = "other reasons"
# Texts in errors that differ from worker to worker.
_WORKER_DETAILS: Final = re.compile(rf" \(pid \d+\)| after \d+\.\d s(?=, before)|{LAST_LINES}.*", re.DOTALL)


def reason_of(error: str) -> str:
    """Return the first line of an error without client, pid and seconds, which differ between workers."""
    return _WORKER_DETAILS.sub("", LABEL.sub("", first_line(error)))


class FailureReasons:
    """Failed messages to clients, grouped by reason. A reason is an error without details of a worker."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # number of messages by reason
        #: Client, type, round and error of the first messages with each reason.
        self.named: dict[str, list[dict[str, Any]]] = {}
        # Counts by round for recent rounds only, because a resumed run may repeat them.
        self._counts_by_round: dict[int | None, Counter[str]] = {}

    def add(self, reply: Event) -> None:
        """Count a reply with an error."""
        error = shortened(first_line(reply.get("error")), _MAX_ERROR_CHARACTERS)
        reason = reason_of(error)
        if reason not in self.counts and len(self.counts) >= _MAX_REASONS:
            reason = _OTHER_REASONS
        server_round = whole_number(reply.get("round"))
        self.counts[reason] += 1
        self._counts_by_round.setdefault(server_round, Counter())[reason] += 1
        drop_oldest(self._counts_by_round, _MAX_REPEATED_ROUNDS)
        messages = self.named.setdefault(reason, [])
        if len(messages) < _MAX_MESSAGES:
            message = {"client": reply.get("node"), "type": reply.get("task"), "round": server_round}
            messages.append({**message, "error": error})

    def take_back(self, is_again: Callable[[int | None], bool]) -> None:
        """Remove the failures of rounds for which ``is_again`` returns True, because they are repeated."""
        for server_round in [key for key in self._counts_by_round if is_again(key)]:
            self.counts -= self._counts_by_round.pop(server_round)
        self.named = {
            reason: [message for message in self.named[reason] if not is_again(message["round"])]
            for reason in self.counts
        }
