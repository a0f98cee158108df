"""Showing a run: bars on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.launch.leases import Leases, by_client, out_of_memory_line, summary_lines
from flower_gpu.launch.result import round_row

if TYPE_CHECKING:
    from tqdm import tqdm

_SHOWN: Final = ("loss", "accuracy", "f1")
_MOST_CLIENTS: Final = 20  # with more, the table of leases shows those that waited longest


class Display:
    """Plain lines: one per round, and one per call that failed.

    Parameters
    ----------
    num_rounds : int, optional
        Number of rounds, where it is known beforehand.
    """

    def __init__(self, num_rounds: int | None) -> None:
        self.num_rounds = num_rounds
        self._last_time: float | None = None
        self._leases = Leases()

    def line(self, text: str) -> None:
        """Show a line of text."""
        print(text, flush=True)

    def error(self, text: str) -> None:
        """Show a line about what has failed."""
        self.line(text)

    def event(self, event: Mapping[str, Any]) -> None:
        """Show one event of the run's trace."""
        self._leases.see(event)
        match event.get("event"):
            case "round":
                row = round_row(event, self._last_time)
                self._last_time = event.get("time")
                if row is not None:
                    self.num_rounds = event.get("num_rounds") or self.num_rounds
                    self.on_round(row)
            case "worker_started":
                self.on_worker_started(event)
            case "progress":
                self.on_progress(event)
            case "worker_finished":
                self.on_worker_finished(event)
                # What follows when memory ran out is in an event of its own.
                if event.get("outcome") not in ("ok", "cancelled", "out of memory", None):
                    error = str(event.get("error") or event["outcome"]).strip().splitlines()[0]
                    self.error(f"{task_label(event)} failed: {error}")
            case "out_of_memory":
                say = self.error if event.get("then") == "failed" else self.line
                say(out_of_memory_line(task_label(event), event, self._leases))
            case _:
                pass

    def on_round(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of a round."""
        self.line(round_line(row, self.num_rounds))

    def on_worker_started(self, event: Mapping[str, Any]) -> None:
        """Show that a worker runs."""

    def on_progress(self, event: Mapping[str, Any]) -> None:
        """Show how far a worker is."""

    def on_worker_finished(self, event: Mapping[str, Any]) -> None:
        """Show that a worker has ended."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class QuietDisplay(Display):
    """Nothing before the result, but what has failed."""

    def line(self, text: str) -> None:
        """Show nothing."""

    def error(self, text: str) -> None:
        """Show it on stderr: stdout has the result only."""
        print(text, file=sys.stderr, flush=True)


class TerminalDisplay(Display):
    """A bar over the rounds with the last metrics, and under it one over the batches of a running worker."""

    def __init__(self, num_rounds: int | None) -> None:
        super().__init__(num_rounds)
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread beside our signals and processes
        self._tqdm = tqdm
        self._running: dict[Any, str] = {}
        self._worker: Any = None  # pid of the worker that is shown
        self._batches: tqdm[Any] | None = None
        self._rounds: tqdm[Any] = tqdm(
            total=num_rounds,
            desc="starting",
            dynamic_ncols=True,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
            if num_rounds
            else "{desc} {n_fmt} {elapsed}{postfix}",
            file=sys.stdout,
        )

    def line(self, text: str) -> None:
        """Show a line of text above the bars."""
        self._tqdm.write(text, file=sys.stdout)

    def on_round(self, row: Mapping[str, Any]) -> None:
        """Move the bar over the rounds."""
        self._rounds.set_description_str("rounds", refresh=False)
        self._rounds.total = self.num_rounds
        shown = {name: f"{row[name]:.3f}" for name in _SHOWN if row[name] is not None}
        self._rounds.set_postfix(shown, refresh=False)
        self._rounds.n = row["round"]
        self._rounds.refresh()

    def on_worker_started(self, event: Mapping[str, Any]) -> None:
        """Show the worker if no other is shown."""
        self._running[event.get("pid")] = task_label(event)
        if self._worker is None:
            self._show_worker(event.get("pid"))

    def on_progress(self, event: Mapping[str, Any]) -> None:
        """Move the bar of the worker that is shown."""
        if event.get("pid") != self._worker or self._batches is None:
            return
        others = len(self._running) - 1
        more = f" (+{others} more)" if others > 0 else ""
        desc = f"  {self._running[self._worker]}{more} {event.get('desc') or ''}".rstrip()
        self._batches.set_description_str(desc, refresh=False)
        self._batches.bar_format = "{desc} |{bar}| {n_fmt}/{total_fmt}"
        self._batches.total = event.get("total")
        self._batches.n = event.get("n") or 0
        self._batches.refresh()

    def on_worker_finished(self, event: Mapping[str, Any]) -> None:
        """Show another worker that still runs."""
        self._running.pop(event.get("pid"), None)
        if event.get("pid") == self._worker:
            self._show_worker(next(iter(self._running), None))

    def close(self) -> None:
        """Remove the bar of the worker, keep that of the rounds as it is."""
        self._show_worker(None)
        self._rounds.close()

    def tick(self) -> None:
        """Let the elapsed time go on."""
        self._rounds.refresh()

    def _show_worker(self, pid: Any) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None
        self._worker = pid
        if pid is not None:
            self._batches = self._tqdm(
                total=None,
                desc=f"  {self._running[pid]}",
                leave=False,
                position=1,
                dynamic_ncols=True,
                bar_format="{desc} ...",  # until it says how much there is to do
                file=sys.stdout,
            )


def make_display(num_rounds: int | None, verbosity: int) -> Display:
    """Choose how a run is shown."""
    if verbosity < 0:
        return QuietDisplay(num_rounds)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalDisplay(num_rounds)
    return Display(num_rounds)


def round_line(row: Mapping[str, Any], num_rounds: int | None) -> str:
    """Write a round as one line."""
    head = f"round {row['round']}" + (f"/{num_rounds}" if num_rounds else "")
    if row["round"] == 0:
        head = "initial model"
    parts = [f"{name} {row[name]:.3f}" for name in _SHOWN if row[name] is not None]
    if row["seconds"] is not None:
        parts.append(f"{row['seconds']:.1f} s")
    return "  ".join([head, *parts])


def task_label(event: Mapping[str, Any]) -> str:
    """Name a worker's call: ``fit of client 3``, ``evaluate on the server``."""
    task, client = event.get("task") or "call", event.get("client")
    return f"{task} on the server" if client in (None, "server") else f"{task} of client {client}"


def print_table(result: Mapping[str, Any]) -> None:
    """Print the metrics of every round as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title in ("round", "loss", "accuracy", "F1", "seconds"):
        table.add_column(title, justify="right")
    for row in [*filter(None, [result["initial"]]), *result["rounds"]]:
        table.add_row(
            "initial" if row["round"] == 0 else str(row["round"]),
            *("-" if row[name] is None else f"{row[name]:.4f}" for name in _SHOWN),
            "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
        )
    Console(file=sys.stdout, highlight=False).print(table)
    if "leases" in result:
        _print_leases(result)


def _print_leases(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = by_client(result)
    shown = rows
    if len(rows) > _MOST_CLIENTS:
        longest = sorted(rows, key=lambda row: row["waited_s"], reverse=True)[:_MOST_CLIENTS]
        shown = [row for row in rows if row in longest]
    table = Table()
    for title in ("client", "calls", "on CPU", "GPU", "lease", "used", "waited s"):
        table.add_column(title, justify="right", overflow="fold")
    for row in shown:
        table.add_row(
            row["client"],
            str(row["calls"]),
            str(row["on_cpu"] or "-"),
            row["gpus"],
            row["lease"],
            row["peak"],
            f"{row['waited_s']:.1f}",
        )
    Console(file=sys.stdout, highlight=False).print(table)
    if len(rows) > len(shown):
        print(f"            {len(rows) - len(shown)} more clients waited less; all are in result.json")
    print("\n".join(summary_lines(result["leases"])))
