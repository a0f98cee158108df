"""Output of a running launch: its progress, and the failures of clients."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from flower_gpu.apps.failures import LABEL, Failure, FailureLog
from flower_gpu.printable import format_bytes
from flower_gpu.trace import NO_REPLY, Event
from flower_gpu.watch.display import Display, make_display
from flower_gpu.watch.fields import call_label, first_line, number, text
from flower_gpu.watch.history import History
from flower_gpu.watch.waits import WorkerWaits

_SERVER: Final = (None, "server")


class LaunchDisplay:
    """The progress of a run on stdout. With ``is_quiet``, it shows only failures, on stderr."""

    def __init__(self, num_rounds: int | None, is_quiet: bool = False) -> None:
        self.history = History(keep_finished=False)
        self.history.rounds.num_rounds = num_rounds
        self._is_quiet = is_quiet
        self._waits = WorkerWaits(self._tell_of_wait)
        self._progress: Display = make_display(self.history, sys.stdout, is_shown=not is_quiet)

    def line(self, text: str) -> None:
        """Show a line of text."""
        if not self._is_quiet:
            self._progress.say(text)

    def error(self, text: str) -> None:
        """Show a line about a failure."""
        if self._is_quiet:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.say(text)

    def traceback(self, text: str) -> None:
        """Show a failure in several lines: above the bars if both streams are terminals, else on stderr."""
        if not self._is_quiet and sys.stdout.isatty() and sys.stderr.isatty():
            self._progress.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, event: Event) -> None:
        """Show one event of the run's trace."""
        is_first = self.history.rounds.strategy is None
        self.history.feed([event])
        self._progress.show(event)
        if event.get("event") == "strategy_started" and event.get("resumes") is None and is_first:
            self.line("note: this run has no checkpoint, so it cannot be resumed; run.log says why")
        if event.get("event") == "out_of_memory":
            say = self.error if event.get("then") == "failed" else self.line
            say(self._out_of_memory(event))

    def tick(self) -> None:
        """Advance the displayed time. If messages wait and no worker runs, show the reason."""
        pids = {call.caller_pid for call in self.history.leases.waiting if call.caller_pid is not None}
        self._waits.look(self.history.calls.stuck_since, time.time(), pids)
        self._progress.tick()

    def _tell_of_wait(self, name: str, **fields: Any) -> None:
        if name == "run_waits":
            self.line(fields["text"])

    def close(self) -> None:
        """Restore the terminal."""
        self._progress.close()

    def _out_of_memory(self, event: Event) -> str:
        gpu = self.history.hosts.gpus.get(text(event.get("uuid")))
        where = "its GPU" if gpu is None or gpu.index < 0 else f"GPU {gpu.index}"
        then, cap_bytes = text(event.get("then")), number(event.get("cap_bytes"))
        consequences = {
            "again": "it runs again",
            "on the CPU": "it runs again on the CPU",
            "failed": "it has failed",
        }
        cap = "" if cap_bytes is None else f" with {format_bytes(int(cap_bytes))}"
        return f"{call_label(event)} ran out of memory on {where}{cap}: {consequences.get(then, then)}"


class Failures:
    """The failures of a run. Shows each failure once, and writes it to ``failures.log``.

    A failed message is reported up to three times, in this order: by its worker, by the process that Flower
    has started for it, and by the server, which got an error instead of a reply. The first report has the
    most details, so the others are not shown.

    ``client_of``: returns the client of a node's id.
    ``traceback_of``: returns the last traceback of a client, for failures that only the server reports.
    """

    def __init__(
        self,
        path: Path,
        display: LaunchDisplay,
        client_of: Callable[[int], str] = str,
        traceback_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._display = display
        self._client_of = client_of
        self._traceback_of = traceback_of
        self._log = FailureLog(path, self._say)
        self._was_said = False
        self._of_worker: Counter[str] = Counter()
        self._of_client: Counter[str] = Counter()

    @property
    def why_over(self) -> str | None:
        """Reason for which all clients fail, and the log with details. None while a client may succeed."""
        reason = self._display.history.rounds.all_failed
        return f"{reason}; {self._log.pointer}" if reason else None

    def see(self, event: Event) -> None:
        """Handle an event of the trace."""
        match event.get("event"):
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
            case _:
                pass

    def _see_worker(self, event: Event, failure: Failure) -> None:
        # A failed call of the server fails the run, and the run reports the reason.
        if event.get("client") in _SERVER:
            self._display.error(f"{call_label(event)} failed: {_reason(failure)}")
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
        self._was_said = False
        # A missing reply is not shown, because the failure of a process, or its exit, tells more.
        self._log.add(failure, is_said=not failure.error.startswith(NO_REPLY))
        if not self._was_said:
            self._display.error(f"{failure.title}: {_reason(failure)}")

    def _say(self, text: str) -> None:
        self._was_said = True
        self._display.traceback(text)


def _reason(failure: Failure) -> str:
    return first_line(failure.error) or "no reason given"
