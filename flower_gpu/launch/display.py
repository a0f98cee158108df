"""What a launch says while it runs: the progress of its history, and lines about what has failed."""

from __future__ import annotations

import sys

from flower_gpu.leases.request import format_bytes
from flower_gpu.trace import Event
from flower_gpu.watch.display import Display, make_display
from flower_gpu.watch.fields import call_label, number, text
from flower_gpu.watch.history import History


class LaunchDisplay:
    """Progress and lines on stdout; with ``is_quiet`` only failures, on stderr: stdout has the result."""

    def __init__(self, num_rounds: int | None, is_quiet: bool = False) -> None:
        self.history = History(keep_finished=False)
        self.history.num_rounds = num_rounds
        self._is_quiet = is_quiet
        self._progress: Display = make_display(self.history, sys.stdout, is_shown=not is_quiet)

    def line(self, text: str) -> None:
        """Show a line of text."""
        if not self._is_quiet:
            self._progress.say(text)

    def error(self, text: str) -> None:
        """Show a line about what has failed."""
        if self._is_quiet:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.say(text)

    def traceback(self, text: str) -> None:
        """Show a failure in several lines: on stderr, or above the bars where both are on a terminal."""
        if not self._is_quiet and sys.stdout.isatty() and sys.stderr.isatty():
            self._progress.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, event: Event) -> None:
        """Show one event of the run's trace."""
        self.history.feed([event])
        self._progress.show(event)
        if event.get("event") == "out_of_memory":
            say = self.error if event.get("then") == "failed" else self.line
            say(self._out_of_memory(event))

    def tick(self) -> None:
        """Let the time that is shown go on."""
        self._progress.tick()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.close()

    def _out_of_memory(self, event: Event) -> str:
        gpu = self.history.gpus.get(text(event.get("uuid")))
        where = "its GPU" if gpu is None or gpu.index < 0 else f"GPU {gpu.index}"
        then, cap_bytes = text(event.get("then")), number(event.get("cap_bytes"))
        follows = {
            "again": "it runs again",
            "on the CPU": "it runs again on the CPU",
            "failed": "it has failed",
        }
        of = "" if cap_bytes is None else f" with {format_bytes(int(cap_bytes))}"
        return f"{call_label(event)} ran out of memory on {where}{of}: {follows.get(then, then)}"
