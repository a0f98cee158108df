"""Messages to clients that failed, as the trace of a launched run tells of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from flower_gpu.launch.display import Display, task_label
from flower_gpu.run.failures import AllFailed, Failure, FailureLog
from flower_gpu.simulation.events import NO_REPLY

_SERVER: Final = (None, "server")
_LABEL: Final = re.compile(r"\S+ of client (?P<client>\S+): ")  # in front of what calls of ours say


class Failures:
    """Shows failures, keeps them, and knows when nobody succeeds.

    One failed message is told up to three times, in this order: by its worker, by the process that Flower has
    started for it, and by the server, whose grid got an error for a reply. The first one knows most, and the
    others are not heard.

    Parameters
    ----------
    path : Path
        Where they are kept.
    display : Display
        Where they are shown.
    client_of : callable
        Returns the client of a node's id.
    traceback_of : callable
        Returns the last traceback of a client, for failures that only the server tells of.

    Attributes
    ----------
    messages, failed : int
        How many messages were sent to clients, and how many failed.
    why_over : str or None
        Why the run computes nothing, once that is so.
    """

    def __init__(
        self,
        path: Path,
        display: Display,
        client_of: Callable[[int], str] = str,
        traceback_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.messages = self.failed = 0
        self.why_over: str | None = None
        self._display = display
        self._client_of = client_of
        self._traceback_of = traceback_of
        self._log = FailureLog(path, self._say)
        self._was_said = False
        self._refused = 0
        self._rule = AllFailed()
        self._of_worker: Counter[str] = Counter()
        self._of_client: Counter[str] = Counter()
        self._replies: Counter[tuple[Any, Any, bool]] = Counter()

    def see(self, event: Mapping[str, Any]) -> None:
        """Take an event of the trace."""
        match event.get("event"):
            case "worker_finished":
                # What follows when memory ran out is in an event of its own.
                if event.get("outcome") != "out of memory" and (failure := Failure.from_event(event)):
                    self._see_worker(event, failure)
            case "client_failed":
                failure = _failure(event, str(event.get("client")))
                if not self._of_worker.pop(failure.client, 0):
                    self._add(failure)
                self._of_client[failure.client] += 1
            case "reply":
                self._see_reply(event)
            case "round_finished":
                self._see_round(event)
            case _:
                pass

    def close(self) -> None:
        """Note that the run has come to its end."""
        self.why_over = self.why_over or self._rule.never_succeeded(self._refused)

    @property
    def sentence(self) -> str:
        """Why the run was ended, and where to read on."""
        return f"{self.why_over}; {self._log.pointer}"

    def _see_worker(self, event: Mapping[str, Any], failure: Failure) -> None:
        if event.get("client") in _SERVER:  # it fails the run, which says why
            self._display.error(f"{task_label(event)} failed: {_first_line(failure.error)}")
        else:
            self._of_worker[failure.client] += 1
            self._add(failure)

    def _see_reply(self, event: Mapping[str, Any]) -> None:
        error = event.get("error")
        if error is None or not str(error).startswith(NO_REPLY):
            self._replies[event.get("round"), event.get("task"), error is None] += 1
            self._refused += error is not None
        if error is None:
            return
        found = _LABEL.match(str(error))
        client = found["client"] if found else self._client_of(event.get("node") or 0)
        is_told = self._of_worker.pop(client, 0) or self._of_client[client]
        if self._of_client[client]:
            self._of_client[client] -= 1
        if not is_told:
            has_reply = not str(error).startswith(NO_REPLY)
            self._add(_failure(event, client, self._traceback_of(client) if has_reply else ""))

    def _see_round(self, event: Mapping[str, Any]) -> None:
        task, number = str(event.get("task")), event.get("round")
        self.messages += event.get("messages") or 0
        self.failed += event.get("failed") or 0
        succeeded, failed = (
            self._replies.pop((number, event.get("task"), good), 0) for good in (True, False)
        )
        why = self._rule.replied(task, number, succeeded, failed)
        self.why_over = self.why_over or why

    def _add(self, failure: Failure) -> None:
        self._was_said = False
        # That there is no reply says little: more is said by what has ended, or by its end.
        self._log.add(failure, is_said=not failure.error.startswith(NO_REPLY))
        if not self._was_said:
            self._display.error(f"{failure.title}: {_first_line(failure.error)}")

    def _say(self, text: str) -> None:
        self._was_said = True
        self._display.traceback(text)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no reason given"


def _failure(event: Mapping[str, Any], client: str, traceback: str = "") -> Failure:
    number, at = event.get("round"), event.get("time")
    return Failure(
        client=client,
        task=str(event.get("task")),
        round=number if isinstance(number, int) else None,
        error=str(event.get("error") or ""),
        traceback=str(event.get("traceback") or traceback),
        **({"time": at} if isinstance(at, float) else {}),
    )
