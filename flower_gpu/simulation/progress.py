"""Shows a simulated run: bars over its rounds and the clients of a round on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TextIO

from flower_gpu.simulation.events import (
    Event,
    Metrics,
    PhaseFinished,
    PhaseGrew,
    PhaseStarted,
    Replied,
    RunResumed,
    RunStarted,
)
from flower_gpu.simulation.output_above import OutputAbove

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_INTERVAL_S: Final = 10.0
_MOST_METRICS: Final = 3  # of a phase, in one line


@dataclass
class _Phase:
    """Messages of one kind, sent in one round."""

    server_round: int | None
    kind: str
    total: int | None
    done: int = 0
    failed: int = 0
    began_s: float = field(default_factory=time.monotonic)
    seconds: float | None = None  # known better than by the clock here: it may hear of all at once

    def rate(self) -> float | None:
        seconds = time.monotonic() - self.began_s
        return self.done / seconds if self.done and seconds > 0 else None

    def left_s(self) -> float | None:
        rate = self.rate()
        return None if rate is None or self.total is None else max(self.total - self.done, 0) / rate


class Progress:
    """Shows how far a run is. Safe to use from several threads.

    Parameters
    ----------
    num_rounds : int or None
        How many rounds there will be, where that is known beforehand.
    is_shown : bool
        False: nothing is shown.
    stream : TextIO, optional
        Where; by default stderr.
    """

    def __init__(
        self, num_rounds: int | None = None, is_shown: bool = True, stream: TextIO | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._phase: _Phase | None = None
        self._view: _View = _make_view(stream or sys.stderr) if is_shown else _View()
        self._view.num_rounds = num_rounds

    def on_event(self, event: Event) -> None:
        """Show an event."""
        match event:
            case RunStarted():
                self.run_started(event.num_rounds)
            case RunResumed():
                self.run_resumed(event.server_round)
            case PhaseStarted():
                self.round_started(event.server_round, event.kind, event.total)
            case PhaseGrew():
                self.round_grew(event.total)
            case Replied():
                self.reply(event.error is not None)
            case PhaseFinished():
                self.round_finished(event.server_round, event.kind, event.metrics, event.seconds)

    def run_started(self, num_rounds: int | None) -> None:
        """Begin anew, with this many rounds."""
        with self._lock, suppress(OSError, ValueError):
            self._view.run_started(num_rounds)

    def run_resumed(self, server_round: int) -> None:
        """Go on after a round of an earlier run."""
        with self._lock, suppress(OSError, ValueError):
            self._view.run_resumed(server_round)

    def round_started(self, server_round: int | None, kind: str, total: int | None) -> None:
        """Show that messages of a kind are sent to clients.

        Parameters
        ----------
        server_round : int or None
            The round; None where there is none.
        kind : str
            Such as ``"train"``.
        total : int or None
            How many messages, where that is known.
        """
        with self._lock, suppress(OSError, ValueError):
            self._phase = _Phase(server_round, kind, total)
            self._view.phase_started(self._phase)

    def round_grew(self, total: int) -> None:
        """Show that there are more messages than was said."""
        with self._lock, suppress(OSError, ValueError):
            if self._phase is not None:
                self._phase.total = total
                self._view.phase_went_on(self._phase)

    def reply(self, failed: bool) -> None:
        """Show that one client is done, or has failed."""
        # What cannot be shown, because stderr is closed or nobody reads it, is no reason to end a run.
        with self._lock, suppress(OSError, ValueError):
            if self._phase is not None:
                self._phase.done += 1
                self._phase.failed += failed
                self._view.phase_went_on(self._phase)

    def round_finished(
        self,
        server_round: int | None = None,
        kind: str | None = None,
        metrics: Metrics | None = None,
        seconds: float | None = None,
    ) -> None:
        """Show that what :meth:`round_started` has said is done; or, of another kind, its metrics only."""
        with self._lock, suppress(OSError, ValueError):
            phase = self._phase
            if phase is not None and kind in (None, phase.kind):
                self._phase = None
                phase.seconds = seconds
            else:
                phase = _Phase(server_round, kind or "", None)
            self._view.phase_finished(phase, metrics or {})

    def tick(self) -> None:
        """Let the time that is shown go on."""
        with self._lock, suppress(OSError, ValueError):
            self._view.tick()

    def say(self, text: str) -> None:
        """Print a text on stderr, above what is drawn there; also where nothing else is shown."""
        with self._lock, suppress(OSError, ValueError):
            self._view.say(text)

    def close(self) -> None:
        """Show nothing more."""
        with self._lock, suppress(OSError, ValueError):
            self._phase = None
            self._view.close()
            self._view = _View()


class _View:
    """Shows nothing."""

    num_rounds: int | None = None

    def run_started(self, num_rounds: int | None) -> None:
        self.num_rounds = num_rounds

    def run_resumed(self, server_round: int) -> None:
        pass

    def phase_started(self, phase: _Phase) -> None:
        pass

    def phase_went_on(self, phase: _Phase) -> None:
        pass

    def phase_finished(self, phase: _Phase, metrics: Metrics) -> None:
        pass

    def tick(self) -> None:
        pass

    def say(self, text: str) -> None:
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass

    def name_of(self, server_round: int | None) -> str:
        """Name a round."""
        if server_round is None:
            return "messages"
        if server_round == 0:
            return "before round 1"
        return f"round {server_round}" + (f"/{self.num_rounds}" if self.num_rounds else "")


class _Lines(_View):
    """One line for each round, and now and then one within a round."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._server_round: int | None = None
        self._parts: list[str] = []
        self._line_at_s = time.monotonic()

    def run_started(self, num_rounds: int | None) -> None:
        self._end_round()
        super().run_started(num_rounds)

    def run_resumed(self, server_round: int) -> None:
        self._print(f"resumed after {self.name_of(server_round)}")

    def phase_started(self, phase: _Phase) -> None:
        self._begin_round(phase.server_round)

    def phase_went_on(self, phase: _Phase) -> None:
        if time.monotonic() - self._line_at_s < _LINE_INTERVAL_S:
            return
        of = "" if phase.total is None else f" of {phase.total}"
        parts = [f"{phase.done}{of} clients"]
        if phase.failed:
            parts.append(f"{phase.failed} failed")
        if (rate := phase.rate()) is not None:
            parts.append(f"{rate:.3g} clients/s")
        if (left_s := phase.left_s()) is not None:
            parts.append(f"{duration(left_s)} left")
        self._print(f"{self.name_of(phase.server_round)} {phase.kind}: {', '.join(parts)}")

    def phase_finished(self, phase: _Phase, metrics: Metrics) -> None:
        self._begin_round(phase.server_round)
        parts = [phase.kind]
        if phase.done:
            parts.append(f"{phase.done} clients")
        if phase.failed:
            parts.append(f"({phase.failed} failed)")
        if phase.done:
            seconds = time.monotonic() - phase.began_s if phase.seconds is None else phase.seconds
            parts.append(f"in {duration(seconds)}")
        self._parts.append(" ".join([*parts, metrics_text(metrics)]).rstrip())
        if phase.server_round is None:
            self._end_round()

    def close(self) -> None:
        self._end_round()

    def _begin_round(self, server_round: int | None) -> None:
        if server_round != self._server_round:
            self._end_round()
            self._server_round = server_round

    def _end_round(self) -> None:
        if self._parts:
            self._print(f"{self.name_of(self._server_round)}: {'; '.join(self._parts)}")
            self._parts = []

    def _print(self, text: str) -> None:
        self._line_at_s = time.monotonic()
        print(text, file=self._stream, flush=True)


class _Bars(_View):
    """A bar over the rounds, and below it one over the clients of the round."""

    def __init__(self, stream: TextIO) -> None:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[type-arg]
            # Its thread would redraw bars that have not changed for long, and is one more in a process.
            monitor_interval = 0

        self._bar = Bar
        self._stream = stream
        self._output = OutputAbove(Bar, stream)
        self._rounds: tqdm[Any] | None = None
        self._clients: tqdm[Any] | None = None
        self._server_round = 0
        self._done_rounds = 0
        self._first_round = 0  # rounds that are done already when this run goes on with them
        self._began_s = self._round_began_s = time.monotonic()
        self._metrics = ""

    def run_started(self, num_rounds: int | None) -> None:
        self._end_clients()
        if self._server_round:  # else the bar of this run may be there already, at 0
            self._end_rounds()
        super().run_started(num_rounds)
        self._server_round = self._done_rounds = self._first_round = 0
        self._began_s = self._round_began_s = time.monotonic()
        self._metrics = ""
        self._show_rounds()

    def run_resumed(self, server_round: int) -> None:
        if self._rounds is not None:
            self._rounds.n = server_round
            self._server_round = self._done_rounds = self._first_round = server_round
            self._draw_rounds()

    def phase_started(self, phase: _Phase) -> None:
        self._end_clients()
        self._show_rounds()
        self._reach(phase.server_round)
        self._clients = self._bar(
            total=phase.total,
            desc=phase.kind if phase.server_round is None else f"round {phase.server_round} {phase.kind}",
            file=self._stream,
            leave=False,
            dynamic_ncols=True,
            smoothing=0,
            unit=" clients",
            bar_format="{desc} |{bar}| {n_fmt}/{total_fmt}, {rate_noinv_fmt}{postfix}, {remaining} left",
        )

    def phase_went_on(self, phase: _Phase) -> None:
        if self._clients is None:
            return
        self._clients.total = phase.total
        if phase.failed:
            self._clients.set_postfix_str(f"{phase.failed} failed", refresh=False)
        # Draws at most every 0.1 s; then the time above goes on, too.
        if self._clients.update(phase.done - self._clients.n) and self._rounds is not None:
            self._draw_rounds()

    def phase_finished(self, phase: _Phase, metrics: Metrics) -> None:
        self._end_clients()
        if self._rounds is None:
            return
        self._reach(phase.server_round)
        self._done_rounds = self._server_round
        self._metrics = metrics_text(metrics) or self._metrics
        self._draw_rounds()

    def tick(self) -> None:
        self._draw_rounds()

    def say(self, text: str) -> None:
        with self._bar.external_write_mode(file=self._stream):
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._end_clients()
        self._end_rounds()

    def _reach(self, server_round: int | None) -> None:
        """Note that the rounds before this one are over."""
        if self._rounds is not None and server_round is not None and server_round > self._server_round:
            self._server_round = server_round
            self._rounds.n = max(self._rounds.n, server_round - 1)
            self._round_began_s = time.monotonic()
            self._draw_rounds()

    def _draw_rounds(self) -> None:
        if self._rounds is not None:
            left_s = self._left_s()
            left = "" if left_s is None else f"{self._bar.format_interval(left_s)} left"
            self._rounds.set_postfix_str(", ".join(filter(None, [left, self._metrics])), refresh=False)
            self._rounds.refresh()

    def _left_s(self) -> float | None:
        """Return how long it takes if all rounds take as long as those of this run that are over."""
        over = self._server_round - 1 - self._first_round
        if not self.num_rounds or over < 1:
            return None
        each_s = (self._round_began_s - self._began_s) / over
        rounds_left = self.num_rounds - self._server_round + 1
        return max(each_s * rounds_left - (time.monotonic() - self._round_began_s), 0.0)

    def _show_rounds(self) -> None:
        with_end = "{desc} |{bar}| {n_fmt}/{total_fmt}, {elapsed}{postfix}"
        bar_format = with_end if self.num_rounds else "{desc} {n_fmt}, {elapsed}{postfix}"
        if self._rounds is not None:
            self._rounds.total, self._rounds.bar_format = self.num_rounds, bar_format
            return
        self._output.begin()
        self._rounds = self._bar(
            total=self.num_rounds,
            desc="rounds",
            file=self._stream,
            dynamic_ncols=True,
            smoothing=0,
            bar_format=bar_format,
        )

    def _end_clients(self) -> None:
        if self._clients is not None:
            self._clients.close()
            self._clients = None

    def _end_rounds(self) -> None:
        if self._rounds is not None:
            self._rounds.n = self._done_rounds
            self._rounds.set_postfix_str(self._metrics, refresh=False)
            self._rounds.close()
            self._rounds = None
            self._output.end()


def _make_view(stream: TextIO | None) -> _View:
    if stream is None or stream.closed:
        return _View()
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return _Bars(stream) if is_terminal else _Lines(stream)


def metrics_text(metrics: Mapping[str, Any], most: int = _MOST_METRICS) -> str:
    """Write the first few numbers among metrics."""
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    shown = [f"{name} {value:.4g}" for name, value in list(numbers.items())[:most]]
    return ", ".join(shown)


def duration(seconds: float) -> str:
    """Write a time as one would say it."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    return "{} h {} min".format(*divmod(round(seconds / 60), 60))
