"""The lines about single events of a launch: failures of clients, and calls that ran out of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from flower_gpu.apps.failures import LABEL, Failure
from flower_gpu.printable import format_bytes
from flower_gpu.trace import NO_REPLY, Event
from flower_gpu.watch.fields import SERVER, call_label, first_line, number, text
from flower_gpu.watch.shown_run import ShownRun

_NO_CHECKPOINT: Final = "note: this run has no checkpoint, so it cannot be resumed; run.log says why"
#: What follows a call that ran out of memory, by ``then`` in its event.
_CONSEQUENCES: Final = {
    "again": "it runs again",
    "on the CPU": "it runs again on the CPU",
    "failed": "it has failed",
}


class EventLines:
    """Says a line about each event that needs one, and each failure once. All failures go to the run's log.

    A failed message is reported up to three times, in this order: by its worker, by the process that Flower
    has started for it, and by the server, which got an error instead of a reply. The first report has the
    most details, so the others are not shown.

    ``client_of``: returns the client of a node's id.
    ``traceback_of``: returns the last traceback of a client, for failures that only the server reports.
    """

    def __init__(
        self,
        shown: ShownRun,
        client_of: Callable[[int], str] = str,
        traceback_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._shown = shown
        self._client_of = client_of
        self._traceback_of = traceback_of
        self._has_strategy = shown.history.rounds.strategy is not None
        self._of_worker: Counter[str] = Counter()
        self._of_client: Counter[str] = Counter()

    @property
    def why_over(self) -> str | None:
        """Reason for which all clients fail, and the log with details. None while a client may succeed."""
        reason = self._shown.history.rounds.all_failed
        return f"{reason}; {self._shown.failures.pointer}" if reason else None

    def see(self, event: Event) -> None:
        """Say the line about an event of the trace, if it needs one.

        The history must have received the event before.
        """
        match event.get("event"):
            case "strategy_started":
                if event.get("resumes") is None and not self._has_strategy:
                    self._shown.say(_NO_CHECKPOINT)
                self._has_strategy = True
            case "out_of_memory":
                say = self._shown.complain if event.get("then") == "failed" else self._shown.say
                say(self._out_of_memory(event))
            case "worker_finished":
                # If memory ran out, another event reports the consequence.
                if event.get("outcome") not in ("ok", "cancelled", "out of memory", None):
                    self._see_worker(event, Failure.from_event(event, str(event.get("client"))))
            case "client_failed":
                failure = Failure.from_event(event, str(event.get("client")))
                if not self._of_worker.pop(failure.client, 0):
                    self._add(failure)
                self._of_client[failure.client] += 1
            case "reply" if event.get("error") is not None:
                self._see_reply(event, str(event["error"]))

    def _out_of_memory(self, event: Event) -> str:
        gpu = self._shown.history.hosts.gpus.get(text(event.get("uuid")))
        where = "its GPU" if gpu is None or gpu.index < 0 else f"GPU {gpu.index}"
        then, cap_bytes = text(event.get("then")), number(event.get("cap_bytes"))
        cap = "" if cap_bytes is None else f" with {format_bytes(int(cap_bytes))}"
        return f"{call_label(event)} ran out of memory on {where}{cap}: {_CONSEQUENCES.get(then, then)}"

    def _see_worker(self, event: Event, failure: Failure) -> None:
        # A failed call of the server fails the run, and the run reports the reason.
        if event.get("client") in (None, SERVER):
            self._shown.complain(f"{call_label(event)} failed: {_reason(failure)}")
        else:
            self._of_worker[failure.client] += 1
            self._add(failure)

    def _see_reply(self, event: Event, error: str) -> None:
        label = LABEL.match(error)
        client = label["client"] if label else self._client_of(event.get("node") or 0)
        was_reported = self._of_worker.pop(client, 0) or self._of_client[client]
        if self._of_client[client]:
            self._of_client[client] -= 1
        if not was_reported:
            traceback = "" if error.startswith(NO_REPLY) else self._traceback_of(client)
            self._add(Failure.from_event(event, client, traceback))

    def _add(self, failure: Failure) -> None:
        # A missing reply is not shown in full, because the failure of a process, or its exit, tells more.
        if not self._shown.failures.add(failure, is_said=not failure.error.startswith(NO_REPLY)):
            self._shown.complain(f"{failure.title}: {_reason(failure)}")


def _reason(failure: Failure) -> str:
    return first_line(failure.error) or "no reason given"
