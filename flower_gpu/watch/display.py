"""Shows how far a run is: bars on a terminal, bars of a notebook, lines elsewhere.

A display is a view on a :class:`~flower_gpu.watch.history.History`: first the history gets an event, then the
display is told that it came. All engines use it. What cannot be shown, because nobody reads the stream any
more, is no reason to end a run.
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
from flower_gpu.watch.fields import call_label, mapping, metrics_text, number, text, whole
from flower_gpu.watch.history import History
from flower_gpu.watch.output import OutputAbove
from flower_gpu.watch.spans import OpenRound

if TYPE_CHECKING:
    from rich.console import RenderableType
    from tqdm import tqdm

_LINE_INTERVAL_S: Final = 10.0
_DRAW_INTERVAL_S: Final = 0.1
_LEAST_REPLIES: Final = 10  # by which the pace of a round is told
#: Of the columns of a line: round, task, clients, seconds.
_LEAST_WIDTHS: Final = (0, len(SERVER_EVALUATE), len("100/100 clients"), len("10.0 s"))


class Display:
    """Shows nothing of a run, but texts; the other displays derive from it."""

    def __init__(self, history: History, stream: TextIO | None) -> None:
        self.history = history
        self.stream = stream

    def show(self, event: Event) -> None:
        """Show an event that the history has taken in already."""
        name = event.get("event")
        # A strategy's recorder tells the server's evaluations, too.
        if name == "round" and self.history.strategy is None:
            name = "round_finished"
            event = {**event, "task": SERVER_EVALUATE}
        if (handler := getattr(self, f"_on_{name}", None)) is not None:
            with suppress(OSError, ValueError):
                handler(event)

    def tick(self) -> None:
        """Let the time that is shown go on."""

    def say(self, text: str) -> None:
        """Print a text on the stream, above what is drawn there. Any thread may do so."""
        if self.stream is not None:
            with suppress(OSError, ValueError):
                # One write, so that another thread cannot print between the text and the end of its line.
                print(f"{text}\n", end="", file=self.stream, flush=True)

    def close(self) -> None:
        """Leave the stream as it was; what is shown stays."""

    def name_of(self, server_round: int | None) -> str:
        """Name a round, each of a run in as many letters; what is evaluated before round 1 is of round 0."""
        if server_round is None:
            return "messages"
        num_rounds = self.history.num_rounds
        if not num_rounds:
            return f"round {server_round}"
        return f"round {server_round:>{len(str(num_rounds))}}/{num_rounds}"

    def pace_texts(self) -> list[str]:
        """Tell how fast the open round goes, and how long it takes, once there are some replies."""
        one = self.history.open_round
        if one is None or (per_s := _replies_per_s(one)) is None:
            return []
        told = [f"{per_s:.3g} clients/s"]
        if one.messages is not None:
            told.append(f"{duration_text(max(one.messages - one.replies, 0) / per_s)} left")
        return told


def _replies_per_s(one: OpenRound) -> float | None:
    """Return the pace of a round without its start, when workers import libraries and load data."""
    seconds = time.time() - one.replied_at[0] if len(one.replied_at) >= _LEAST_REPLIES else 0.0
    return (len(one.replied_at) - 1) / seconds if seconds > 0 else None


def _rounds_left_s(history: History) -> float | None:
    """Return how long the rounds take that are left, by those that are over; None while that is unknown."""
    began, done = history.strategy_started_at, history.highest_round - (history.resumed_round or 0)
    if began is None or not history.num_rounds or done <= 0:
        return None
    ended_at = began if history.rounds_ended_at is None else history.rounds_ended_at
    each_s = (ended_at - began) / done
    left_s = each_s * (history.num_rounds - history.highest_round) - (time.time() - ended_at)
    return left_s if left_s > 0 else None  # it takes longer than thought


class RoundLines(Display):
    """A line for what has finished of each round, at once and in columns; now and then one within a round.

    At once: what comes on the stream next, such as Flower's log, is of the next part or round.
    """

    def __init__(self, history: History, stream: TextIO) -> None:
        super().__init__(history, stream)
        self._widths = list(_LEAST_WIDTHS)
        self._line_at_s = time.monotonic()

    def _on_run_waits(self, event: Event) -> None:
        self._print(text(event.get("text")))

    def _on_strategy_resumed(self, event: Event) -> None:
        self._print(f"resumed after {self.name_of(whole(event.get('round')))}")

    def _on_reply(self, _: Event) -> None:
        one = self.history.open_round
        if one is None or time.monotonic() - self._line_at_s < _LINE_INTERVAL_S:
            return
        if one.replies == one.messages:  # the line of the round's end follows
            return
        failed = [f"{one.failed} failed"] if one.failed else []
        clients = f"{one.replies}/{'?' if one.messages is None else one.messages} clients"
        seconds = max(0.0, time.time() - one.started_at)
        self._row(one.round, one.task, clients, seconds, [*failed, *self.pace_texts()])

    def _on_round_finished(self, event: Event) -> None:
        messages, failed = whole(event.get("messages")), whole(event.get("failed"))
        clients = f"{messages}/{messages} clients" if messages else ""
        told = [f"{failed} failed"] if messages and failed else []
        metrics = metrics_text(mapping(event.get("metrics")))
        seconds = number(event.get("seconds")) if messages else None
        self._row(whole(event.get("round")), str(event.get("task")), clients, seconds, [*told, metrics])

    def _row(
        self, server_round: int | None, task: str, clients: str, seconds: float | None, told: list[str]
    ) -> None:
        """Print columns, none of them narrower than in the lines above."""
        cells = [self.name_of(server_round), task, clients, "" if seconds is None else duration_text(seconds)]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]
        name, task_width, *figures = self._widths
        row = [f"{cells[0]:<{name}}", f"{task:<{task_width}}"]
        row += [f"{cell:>{width}}" for cell, width in zip(cells[2:], figures, strict=True)]
        self._print("  ".join([*row, ", ".join(filter(None, told))]).rstrip())

    def _print(self, text: str) -> None:
        self._line_at_s = time.monotonic()
        self.say(text)


class _Bars(Display):
    """What bars have in common: one over the rounds, one over the clients of the open round."""

    def __init__(self, history: History, stream: TextIO) -> None:
        super().__init__(history, stream)
        self._drawn_at_s = float("-inf")
        self._shown_at_s = time.monotonic()
        self._is_over = False

    def _draw(self) -> None:
        """Draw the bars as the history is now."""
        raise NotImplementedError

    def show(self, event: Event) -> None:
        """Draw the changes of an event."""
        match event.get("event"):
            case "run_waits":
                self.say(text(event.get("text")))
            case "reply" | "progress":
                self.tick()
            case "strategy_started" | "strategy_resumed" | "round_started" | "round_finished" | "round":
                self._drawn_at_s = float("-inf")
                self.tick()

    def tick(self) -> None:
        """Draw the bars, if the last time is long enough ago."""
        now = time.monotonic()
        if now - self._drawn_at_s >= _DRAW_INTERVAL_S:
            self._drawn_at_s = now
            with suppress(OSError, ValueError):
                self._draw()

    @property
    def _done_rounds(self) -> int:
        """The rounds that are over. Whether the last one is, is known only when the display is closed."""
        done = max(self.history.highest_round, self.history.resumed_round or 0)
        finished = [one.round or 0 for one in self.history.evaluations] if self._is_over else []
        return max([done, *finished])

    def _rounds_text(self) -> str:
        """Return the text behind the bar over the rounds."""
        done, num_rounds = self._done_rounds, self.history.num_rounds
        is_over = num_rounds is not None and done >= num_rounds
        left_s = None if is_over else _rounds_left_s(self.history)
        metrics = [text for told in self.history.last_metrics.values() if (text := metrics_text(told))]
        parts = [
            f"{done}/{num_rounds}" if num_rounds else str(done),
            duration_text(time.monotonic() - self._shown_at_s),
            "" if left_s is None else f"{duration_text(left_s)} left",
            *metrics[-1:],
        ]
        return ", ".join(filter(None, parts))

    def _clients_label(self) -> str:
        """Return the text in front of the bar over the clients of the open round."""
        one = self.history.open_round
        if one is None:
            return ""
        return one.task if one.round is None else f"round {one.round} {one.task}"

    def _clients_text(self) -> str:
        """Return the text behind the bar over the clients of the open round."""
        one = self.history.open_round
        if one is None:
            return ""
        parts = [
            f"{one.replies}/{'?' if one.messages is None else one.messages}",
            f"{one.failed} failed" if one.failed else "",
            *self.pace_texts(),
        ]
        return ", ".join(filter(None, parts))

    def _worker_row(self) -> tuple[str, int, int | None] | None:
        """Return a running worker's label and progress; None where none runs."""
        running = self.history.running
        if not running:
            return None
        worker = next((one for one in running if one.progress[0]), running[0])
        more = f" (+{len(running) - 1} more)" if len(running) > 1 else ""
        desc, done, total = worker.progress
        label = call_label({"task": worker.task, "client": worker.client})
        return f"  {label}{more} {desc}".rstrip(), done, total


class TerminalBars(_Bars):
    """Bars of rich at the bottom of the terminal; lines of logs and of ``print`` appear above them.

    Nothing refreshes them but events and ticks: this process forks, and so it has no thread for that.
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
            redirect_stdout=False,  # not all of it: see _Above
            redirect_stderr=False,  # bars of the app's own go there
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
        """Leave the bar over the rounds as it is, and remove the others."""
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

        rows = [("rounds", self._done_rounds, self.history.num_rounds, self._rounds_text())]
        if self._above is not None:  # else it is closed: the bar over the rounds stays
            if (one := self.history.open_round) is not None:
                rows.append((self._clients_label(), one.replies, one.messages, self._clients_text()))
            if (row := self._worker_row()) is not None:
                label, done, total = row
                rows.append((label, done, total, f"{done}/{total}" if total else "..."))
        # The bars begin where they did: what is beside them changes all the time.
        width = self._console.width
        bar = max(8, width // 5)
        self._label_cells = max(self._label_cells, *(len(label) for label, *_ in rows))
        label_cells = min(self._label_cells, max(8, (width - bar) // 2))
        table = Table.grid(padding=(0, 1, 0, 0))
        for cells in (label_cells, bar, max(1, width - label_cells - bar - 2)):
            table.add_column(width=cells, no_wrap=True, overflow="ellipsis")
        for label, done, total, told in rows:
            drawn = ProgressBar(total=total, completed=done, pulse=False) if total else ""
            table.add_row(Text(label), drawn, Text(told))
        return table


class Notebook(_Bars):
    """Bars of tqdm, which draws them as widgets in a notebook."""

    def __init__(self, history: History, stream: TextIO) -> None:
        super().__init__(history, stream)
        self._rounds: tqdm[Any] | None = None
        self._clients: tqdm[Any] | None = None

    def _draw(self) -> None:
        if self._rounds is None:
            self._rounds = self._bar("rounds")
        _set(self._rounds, self._done_rounds, self.history.num_rounds, self._rounds_text())
        if (one := self.history.open_round) is not None:
            # The same bar for all rounds: the file of a notebook keeps every one that there was.
            self._clients = self._clients or self._bar(self._clients_label(), leave=False)
            self._clients.set_description_str(self._clients_label(), refresh=False)
            _set(self._clients, one.replies, one.messages, self._clients_text())

    def close(self) -> None:
        """Leave the bar over the rounds as it is, and remove the other one."""
        with suppress(OSError, ValueError):
            self._is_over = True
            if self._clients is not None:
                self._clients.close()
            if self._rounds is not None:
                _set(self._rounds, self._done_rounds, self.history.num_rounds, self._rounds_text())
                self._rounds.close()
        self._clients = self._rounds = None

    def _bar(self, label: str, leave: bool = True) -> tqdm[Any]:
        from tqdm.auto import tqdm

        tqdm.monitor_interval = 0  # no thread of its own
        return tqdm(
            desc=label,
            leave=leave,
            file=self.stream,
            dynamic_ncols=True,
            bar_format="{desc} |{bar}| {n_fmt}/{total_fmt}{postfix}",
        )


def _set(bar: tqdm[Any], done: int, total: int | None, text: str) -> None:
    bar.total, bar.n = total, done
    bar.set_postfix_str(text.partition(", ")[2], refresh=False)  # it shows the numbers itself
    bar.refresh()


def make_display(history: History, stream: TextIO | None, is_shown: bool = True) -> Display:
    """Return the display for a stream."""
    if stream is None or stream.closed or not is_shown:
        return Display(history, stream)
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalBars(history, stream)
    # Without widgets tqdm would write bars of text, which a notebook does not draw over each other.
    has_widgets = in_notebook() and find_spec("ipywidgets") is not None
    return Notebook(history, stream) if has_widgets else RoundLines(history, stream)


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return any(
        one.__name__ == "ZMQInteractiveShell" for one in type(shell).__mro__
    )  # Colab's derives from it
