"""A run that a command shows while it goes on: its history, its progress, its failures, and its last lines.

The problem: ``flower-gpu launch`` and ``flower-gpu simulate`` get the events of a run in different ways, but
their users should see the same. Progress, warnings and tracebacks also must not overwrite each other.

The object: a command opens a :class:`ShownRun` with the stream for its progress, and passes each event to
:meth:`ShownRun.show`. The command shows further lines with :meth:`ShownRun.say` and
:meth:`ShownRun.complain`. After :meth:`ShownRun.close` it prints the summary with :meth:`ShownRun.show_end`.

Threads: one thread at a time may call :meth:`ShownRun.show` and :meth:`ShownRun.tick`. Any thread may say a
line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from flower_gpu.apps.failures import FailureLog
from flower_gpu.trace import Event
from flower_gpu.watch.display import make_display
from flower_gpu.watch.history import History
from flower_gpu.watch.output import is_terminal
from flower_gpu.watch.waits import WorkerWaits


class ShownRun:
    """A run in progress on the streams of a command.

    ``stream``: stream for progress and the summary, or None if it is closed.
    ``errors``: stream for tracebacks, and for all failures if progress is not shown.
    ``failure_log``: file for all failures, or None.
    ``is_shown``: False if only failures and the last lines are shown.
    ``keep_rounds``: True if the history keeps the results of all rounds.
    """

    def __init__(
        self,
        stream: TextIO | None,
        errors: TextIO | None,
        failure_log: Path | None = None,
        *,
        is_shown: bool = True,
        keep_rounds: bool = False,
    ) -> None:
        self.history = History(keep_finished=False, keep_rounds=keep_rounds)
        self.failures = FailureLog(failure_log, self.show_traceback)
        self._stream = stream
        self._errors = errors
        self._is_shown = is_shown
        self._display = make_display(self.history, stream, is_shown=is_shown)
        self._waits = WorkerWaits(self._tell_of_wait)

    def say(self, text: str) -> None:
        """Show a line of text, if progress is shown."""
        if self._is_shown:
            self._display.say(text)

    def complain(self, text: str) -> None:
        """Show a line about a failure."""
        if self._is_shown:
            self._display.say(text)
        else:
            _write(self._errors, text)

    def show_traceback(self, text: str) -> None:
        """Show a failure of several lines above the bars if possible, otherwise on the stream for errors."""
        has_one_screen = self._stream is self._errors or (
            self._is_shown and is_terminal(self._stream) and is_terminal(self._errors)
        )
        if has_one_screen:
            self._display.say(text)
        else:
            _write(self._errors, text)

    def show(self, event: Event) -> None:
        """Show one event of the run."""
        self.history.feed([event])
        self._display.show(event)

    def tick(self) -> None:
        """Advance the displayed time. If messages wait and no worker runs, show the reason."""
        pids = {call.caller_pid for call in self.history.leases.waiting if call.caller_pid is not None}
        self._waits.look(self.history.calls.stuck_since, time.time(), pids)
        self._display.tick()

    def _tell_of_wait(self, name: str, **fields: Any) -> None:
        if name == "run_waits":
            self.say(fields["text"])

    def close(self) -> None:
        """Stop showing progress, and restore the terminal. Calling it again has no effect."""
        # The terminal may be gone. The command must still end the run.
        with suppress(OSError):
            self._display.close()

    def show_end(self, lines: Sequence[str]) -> None:
        """Show the last lines of the run, such as its summary. They appear even if progress is not shown."""
        _write(self._stream, "\n".join(lines))


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        print(text, file=stream, flush=True)
