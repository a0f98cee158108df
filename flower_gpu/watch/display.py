"""Shows the progress of a run: bars on a terminal, widgets in a notebook, lines on other streams.

The problem: the same run may write to a terminal, a notebook, a file or a pipe. Bars must not mix with the
lines of Flower's log or with the output of the app.

The objects: a :class:`Display` is a view of a :class:`~flower_gpu.watch.history.History`.
:func:`make_display` chooses its class for a stream. All engines use it.

Who calls what: an engine first feeds an event to the history, and then passes it to :meth:`Display.show`, in
the same thread. An engine that polls for events also calls :meth:`Display.tick` between them, so that elapsed
times move on. Any thread may call :meth:`Display.say`.

Errors: a stream may be closed at any time, for example because the reader of a pipe has exited. A run must
not fail for this reason, so displays ignore errors of the stream.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TextIO

from flower_gpu.printable import duration_text
from flower_gpu.trace import SERVER_EVALUATE, Event
from flower_gpu.watch.fields import call_label, mapping, metrics_text, number, text, whole_number
from flower_gpu.watch.folds.rounds import OpenRound
from flower_gpu.watch.history import History
from flower_gpu.watch.output import OutputAbove

if TYPE_CHECKING:
    from rich.console import RenderableType
    from tqdm import tqdm

_LINE_INTERVAL_S: Final = 10.0
_DRAW_INTERVAL_S: Final = 0.1
_MIN_REPLIES: Final = 10  # replies needed to compute the pace of a round
#: Minimum widths of the columns: round, task, clients, seconds.
_MIN_WIDTHS: Final = (0, len(SERVER_EVALUATE), len("100/100 clients"), len("10.0 s"))


# A bar: its label, the finished and the total number of items, and the text after it.
_Row = tuple[str, int, int | None, str]


class Display:
    """A display without progress, which only prints texts. The other displays derive from it."""

    def __init__(self, history: History, stream: TextIO | None) -> None:
        self.history = history
        self.stream = stream

    def show(self, event: Event) -> None:
        """Show an event. The history must have received it before."""
        name = event.get("event")
        # With a strategy, its recorder also reports each evaluation on the server, so this event is shown
        # only without a strategy.
        if name == "round" and self.history.rounds.strategy is None:
            name = "round_finished"
            event = {**event, "task": SERVER_EVALUATE}
        if (handler := getattr(self, f"_on_{name}", None)) is not None:
            with suppress(OSError, ValueError):
                handler(event)

    def tick(self) -> None:
        """Update the elapsed time on the display."""

    def say(self, text: str) -> None:
        """Print a text on the stream, above any bars. Any thread may call this."""
        if self.stream is not None:
            with suppress(OSError, ValueError):
                # A single write, so that another thread cannot print between the text and its newline.
                print(f"{text}\n", end="", file=self.stream, flush=True)

    def close(self) -> None:
        """Stop drawing on the stream. Visible lines and bars stay."""

    def name_of(self, server_round: int | None) -> str:
        """Return the label of a round, padded to the same width for all rounds of a run.

        Round 0 is the evaluation before the first round.
        """
        if server_round is None:
            return "messages"
        num_rounds = self.history.rounds.num_rounds
        if not num_rounds:
            return f"round {server_round}"
        return f"round {server_round:>{len(str(num_rounds))}}/{num_rounds}"

    def pace_texts(self) -> list[str]:
        """Return texts with the pace of the open round and its remaining time, once enough replies exist."""
        open_round = self.history.rounds.open_round
        if open_round is None or (per_s := _replies_per_s(open_round)) is None:
            return []
        texts = [f"{per_s:.3g} clients/s"]
        if open_round.messages is not None:
            remaining = max(open_round.messages - open_round.replies, 0)
            texts.append(f"{duration_text(remaining / per_s)} left")
        return texts


def _replies_per_s(open_round: OpenRound) -> float | None:
    """Return the number of replies per second since the first stored reply, or None before ``_MIN_REPLIES``.

    The time before the first reply does not count, because workers import libraries and load data then.
    """
    times = open_round.replied_at
    seconds = time.time() - times[0] if len(times) >= _MIN_REPLIES else 0.0
    return (len(times) - 1) / seconds if seconds > 0 else None


def _rounds_left_s(history: History) -> float | None:
    """Return the estimated seconds until the last round ends, or None without an estimate.

    The estimate is the mean duration of the finished rounds, multiplied by the number of remaining rounds.
    """
    started_at, done = (
        history.rounds.strategy_started_at,
        history.rounds.highest_round - (history.rounds.resumed_round or 0),
    )
    if started_at is None or not history.rounds.num_rounds or done <= 0:
        return None
    ended_at = started_at if history.rounds.rounds_ended_at is None else history.rounds.rounds_ended_at
    round_s = (ended_at - started_at) / done
    left_s = round_s * (history.rounds.num_rounds - history.rounds.highest_round) - (time.time() - ended_at)
    # It is negative if the open round takes longer than expected.
    return left_s if left_s > 0 else None


class RoundLines(Display):
    """Prints a line with columns for each finished part of a round, and sometimes a line within a round.

    The line appears immediately, so that it stands before the log lines of the next part or round.
    """

    def __init__(self, history: History, stream: TextIO) -> None:
        super().__init__(history, stream)
        self._widths = list(_MIN_WIDTHS)
        self._line_at_s = time.monotonic()

    def _on_run_waits(self, event: Event) -> None:
        self._print(text(event.get("text")))

    def _on_strategy_resumed(self, event: Event) -> None:
        self._print(f"resumed after {self.name_of(whole_number(event.get('round')))}")

    def _on_reply(self, _: Event) -> None:
        open_round = self.history.rounds.open_round
        if open_round is None or time.monotonic() - self._line_at_s < _LINE_INTERVAL_S:
            return
        # After the last reply, the line for the finished part follows immediately.
        if open_round.replies == open_round.messages:
            return
        failed = [f"{open_round.failed} failed"] if open_round.failed else []
        total = "?" if open_round.messages is None else open_round.messages
        clients = f"{open_round.replies}/{total} clients"
        seconds = max(0.0, time.time() - open_round.started_at)
        self._row(open_round.round, open_round.task, clients, seconds, [*failed, *self.pace_texts()])

    def _on_round_finished(self, event: Event) -> None:
        messages, failed = whole_number(event.get("messages")), whole_number(event.get("failed"))
        clients = f"{messages}/{messages} clients" if messages else ""
        failed_texts = [f"{failed} failed"] if messages and failed else []
        metrics = metrics_text(mapping(event.get("metrics")))
        seconds = number(event.get("seconds")) if messages else None
        texts = [*failed_texts, metrics]
        self._row(whole_number(event.get("round")), str(event.get("task")), clients, seconds, texts)

    def _row(
        self, server_round: int | None, task: str, clients: str, seconds: float | None, texts: list[str]
    ) -> None:
        """Print a line. The columns never get narrower than in earlier lines, so they align."""
        cells = [self.name_of(server_round), task, clients, "" if seconds is None else duration_text(seconds)]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]
        name, task_width, *figures = self._widths
        row = [f"{cells[0]:<{name}}", f"{task:<{task_width}}"]
        row += [f"{cell:>{width}}" for cell, width in zip(cells[2:], figures, strict=True)]
        self._print("  ".join([*row, ", ".join(filter(None, texts))]).rstrip())

    def _print(self, text: str) -> None:
        self._line_at_s = time.monotonic()
        self.say(text)


class _Bars(Display):
    """Base of the displays with bars: a bar for all rounds, and a bar for the clients of the open round."""

    def __init__(self, history: History, stream: TextIO) -> None:
        super().__init__(history, stream)
        self._drawn_at_s = float("-inf")
        self._shown_at_s = time.monotonic()
        self._is_over = False  # True once the display is being closed

    def _draw(self) -> None:
        """Draw the bars for the current state of the history."""
        raise NotImplementedError

    def show(self, event: Event) -> None:
        """Draw the bars again if the event changes them."""
        match event.get("event"):
            case "run_waits":
                self.say(text(event.get("text")))
            case "reply" | "progress":
                self.tick()
            case "strategy_started" | "strategy_resumed" | "round_started" | "round_finished" | "round":
                self._drawn_at_s = float("-inf")
                self.tick()

    def tick(self) -> None:
        """Draw the bars, unless they were drawn less than ``_DRAW_INTERVAL_S`` ago."""
        now = time.monotonic()
        if now - self._drawn_at_s >= _DRAW_INTERVAL_S:
            self._drawn_at_s = now
            with suppress(OSError, ValueError):
                self._draw()

    def _rounds_row(self) -> _Row:
        """Return the row of the bar for the rounds.

        A part may still follow in the last round, so this round counts only when the display is closed.
        """
        rounds, num_rounds = self.history.rounds, self.history.rounds.num_rounds
        done = max(rounds.latest_round if self._is_over else rounds.highest_round, rounds.resumed_round or 0)
        is_over = num_rounds is not None and done >= num_rounds
        left_s = None if is_over else _rounds_left_s(self.history)
        metrics = [text for values in rounds.last_metrics.values() if (text := metrics_text(values))]
        texts = [
            f"{done}/{num_rounds}" if num_rounds else str(done),
            duration_text(time.monotonic() - self._shown_at_s),
            "" if left_s is None else f"{duration_text(left_s)} left",
            *metrics[-1:],
        ]
        return "rounds", done, num_rounds, ", ".join(filter(None, texts))

    def _clients_row(self) -> _Row | None:
        """Return the row of the bar for the clients of the open round, or None without an open round."""
        open_round = self.history.rounds.open_round
        if open_round is None:
            return None
        texts = [
            f"{open_round.replies}/{'?' if open_round.messages is None else open_round.messages}",
            f"{open_round.failed} failed" if open_round.failed else "",
            *self.pace_texts(),
        ]
        name = "" if open_round.round is None else f"round {open_round.round} "
        label = f"{name}{open_round.task}"
        return label, open_round.replies, open_round.messages, ", ".join(filter(None, texts))

    def _worker_row(self) -> _Row | None:
        """Return the row with the progress of a running worker, or None if no worker is running."""
        running = self.history.calls.running
        if not running:
            return None
        worker = next((worker for worker in running if worker.progress[0]), running[0])
        more = f" (+{len(running) - 1} more)" if len(running) > 1 else ""
        desc, done, total = worker.progress
        label = call_label({"task": worker.task, "client": worker.client})
        return f"  {label}{more} {desc}".rstrip(), done, total, f"{done}/{total}" if total else "..."


class TerminalBars(_Bars):
    """Bars of the library rich at the bottom of a terminal. Log lines and printed text appear above them.

    Only events and ticks refresh the bars. There is no refresh thread, because this process forks.
    """

    def __init__(self, history: History, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(history, stream)
        self._label_cells = len("round 10 train")
        self._above: OutputAbove | None = None
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            get_renderable=self._rows,
            console=self._console,
            auto_refresh=False,
            # OutputAbove redirects the output instead, because some of it must reach the terminal directly.
            redirect_stdout=False,
            # The app may draw its own bars on this stream.
            redirect_stderr=False,
        )

    def _draw(self) -> None:
        if self._above is None:
            self._above = OutputAbove(self._console)
            self._live.start()
        self._live.refresh()

    def say(self, text: str) -> None:
        """Print a text above the bars."""
        from rich.text import Text

        with suppress(OSError, ValueError):
            self._console.print(Text.from_ansi(text), soft_wrap=True)

    def close(self) -> None:
        """Keep the bar for the rounds, and remove the others."""
        if self._above is not None:
            above, self._above = self._above, None
            self._is_over = True
            with suppress(OSError, ValueError):
                self._live.stop()
            above.end()

    def _rows(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows = [self._rounds_row()]
        # A closed display keeps only the bar for the rounds.
        if self._above is not None:
            rows += filter(None, (self._clients_row(), self._worker_row()))
        # The bars start in the same column in each frame, although the labels and texts often change.
        width = self._console.width
        bar = max(8, width // 5)
        self._label_cells = max(self._label_cells, *(len(label) for label, *_ in rows))
        label_cells = min(self._label_cells, max(8, (width - bar) // 2))
        table = Table.grid(padding=(0, 1, 0, 0))
        for cells in (label_cells, bar, max(1, width - label_cells - bar - 2)):
            table.add_column(width=cells, no_wrap=True, overflow="ellipsis")
        for label, done, total, figures in rows:
            progress = ProgressBar(total=total, completed=done, pulse=False) if total else ""
            table.add_row(Text(label), progress, Text(figures))
        return table


class Notebook(_Bars):
    """Bars of the library tqdm, which draws them as widgets in a notebook."""

    def __init__(self, history: History, stream: TextIO) -> None:
        super().__init__(history, stream)
        self._rounds: tqdm[Any] | None = None
        self._clients: tqdm[Any] | None = None

    def _draw(self) -> None:
        if self._rounds is None:
            self._rounds = self._bar("rounds")
        _set(self._rounds, self._rounds_row())
        if (row := self._clients_row()) is not None:
            # All rounds share a bar, because the file of a notebook keeps every bar that was ever created.
            self._clients = self._clients or self._bar(row[0], leave=False)
            _set(self._clients, row)

    def close(self) -> None:
        """Keep the bar for the rounds, and remove the other bar."""
        with suppress(OSError, ValueError):
            self._is_over = True
            if self._clients is not None:
                self._clients.close()
            if self._rounds is not None:
                _set(self._rounds, self._rounds_row())
                self._rounds.close()
        self._clients = self._rounds = None

    def _bar(self, label: str, leave: bool = True) -> tqdm[Any]:
        from tqdm.auto import tqdm

        # This keeps tqdm from starting its monitor thread.
        tqdm.monitor_interval = 0
        return tqdm(
            desc=label,
            leave=leave,
            file=self.stream,
            dynamic_ncols=True,
            bar_format="{desc} |{bar}| {n_fmt}/{total_fmt}{postfix}",
        )


def _set(bar: tqdm[Any], row: _Row) -> None:
    label, bar.n, bar.total, text = row
    bar.set_description_str(label, refresh=False)
    # The first part of the text is left out, because tqdm shows these numbers itself.
    bar.set_postfix_str(text.partition(", ")[2], refresh=False)
    bar.refresh()


def make_display(history: History, stream: TextIO | None, is_shown: bool = True) -> Display:
    """Return a new display for a stream."""
    if stream is None or stream.closed or not is_shown:
        return Display(history, stream)
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalBars(history, stream)
    # Without widgets, tqdm writes bars as text. A notebook shows every frame of such a bar on a new line.
    has_widgets = in_notebook() and find_spec("ipywidgets") is not None
    return Notebook(history, stream) if has_widgets else RoundLines(history, stream)


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # The base classes count, because the shell of Google Colab derives from this class.
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)
