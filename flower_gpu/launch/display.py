"""Showing a run: bars on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from flower_gpu.launch.leases import Leases, by_client, out_of_memory_line, summary_lines
from flower_gpu.simulation.events import EVALUATE, SERVER_EVALUATE, TRAIN, RunStarted
from flower_gpu.simulation.progress import Progress
from flower_gpu.simulation.traced import event_of

if TYPE_CHECKING:
    from tqdm import tqdm

_SHOWN: Final = ("loss", "accuracy", "f1")  # before the other metrics
_MOST_METRICS: Final = {SERVER_EVALUATE: 3, EVALUATE: 3, TRAIN: 2}  # in the table; result.json has them all
_MOST_CLIENTS: Final = 20  # with more, the table of leases shows those that waited longest


class Display:
    """Plain lines: one for each round, and now and then one within it.

    Parameters
    ----------
    num_rounds : int, optional
        Number of rounds, where it is known beforehand.
    """

    is_shown: ClassVar[bool] = True

    def __init__(self, num_rounds: int | None) -> None:
        self._num_rounds = num_rounds
        self._leases = Leases()
        self._progress = Progress(num_rounds, self.is_shown, sys.stdout)
        self._is_recorded = False

    def line(self, text: str) -> None:
        """Show a line of text."""
        print(text, flush=True)

    def error(self, text: str) -> None:
        """Show a line about what has failed."""
        self.line(text)

    def traceback(self, text: str) -> None:
        """Show what has failed with all there is to say, in several lines."""
        print(text, file=sys.stderr, flush=True)

    def event(self, event: Mapping[str, Any]) -> None:
        """Show one event of the run's trace."""
        self._leases.see(event)
        self._see_round(event)
        match event.get("event"):
            case "worker_started":
                self.on_worker_started(event)
            case "progress":
                self.on_progress(event)
            case "worker_finished":
                self.on_worker_finished(event)
            case "out_of_memory":
                say = self.error if event.get("then") == "failed" else self.line
                say(out_of_memory_line(task_label(event), event, self._leases))
            case _:
                pass

    def on_worker_started(self, event: Mapping[str, Any]) -> None:
        """Show that a worker runs."""

    def on_progress(self, event: Mapping[str, Any]) -> None:
        """Show how far a worker is."""

    def on_worker_finished(self, event: Mapping[str, Any]) -> None:
        """Show that a worker has ended."""

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.close()

    def _see_round(self, line: Mapping[str, Any]) -> None:
        event = event_of(line)
        if event is None:
            return
        if isinstance(event, RunStarted):
            self._is_recorded = True
        elif line.get("event") == "round":
            if self._is_recorded:
                return  # an evaluation that is told as those of every other app are
            if (num_rounds := line.get("num_rounds") or self._num_rounds) != self._num_rounds:
                self._num_rounds = num_rounds
                self._progress.run_started(num_rounds)
        self._progress.on_event(event)


class QuietDisplay(Display):
    """Nothing before the result, but what has failed."""

    is_shown = False

    def line(self, text: str) -> None:
        """Show nothing."""

    def error(self, text: str) -> None:
        """Show it on stderr: stdout has the result only."""
        print(text, file=sys.stderr, flush=True)


class TerminalDisplay(Display):
    """The bars of a simulation, and under them one over the batches of a running worker."""

    def __init__(self, num_rounds: int | None) -> None:
        self._stream = sys.stdout  # what is printed goes above the bars as soon as there are any
        super().__init__(num_rounds)
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread beside our signals and processes
        self._tqdm = tqdm
        self._running: dict[Any, str] = {}
        self._worker: Any = None  # pid of the worker that is shown
        self._batches: tqdm[Any] | None = None
        self._progress.run_started(num_rounds)  # there is a time to look at while everything starts

    def traceback(self, text: str) -> None:
        """Show it; above the bars, where stderr is a terminal as well."""
        if sys.stderr.isatty():
            self.line(text)
        else:
            super().traceback(text)

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
        super().close()

    def tick(self) -> None:
        """Let the elapsed time go on."""
        self._progress.tick()

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
                position=2,  # below the rounds and their clients
                dynamic_ncols=True,
                bar_format="{desc} ...",  # until it says how much there is to do
                file=self._stream,
            )


def make_display(num_rounds: int | None, verbosity: int) -> Display:
    """Choose how a run is shown."""
    if verbosity < 0:
        return QuietDisplay(num_rounds)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalDisplay(num_rounds)
    return Display(num_rounds)


def task_label(event: Mapping[str, Any]) -> str:
    """Name a worker's call: ``fit of client 3``, ``evaluate on the server``."""
    task, client = event.get("task") or "call", event.get("client")
    return f"{task} on the server" if client in (None, "server") else f"{task} of client {client}"


def print_table(result: Mapping[str, Any]) -> None:
    """Print the metrics of every round as a table."""
    from rich.console import Console
    from rich.table import Table

    rows = [*filter(None, [result["initial"]]), *result["rounds"]]
    columns = _columns(rows)
    names = [name for _, name in columns]
    table = Table()
    for title in ("round", *(_title(task, name, names) for task, name in columns), "seconds"):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        values = [row["metrics"].get(task, {}).get(name) for task, name in columns]
        table.add_row(
            "initial" if row["round"] == 0 else str(row["round"]),
            *("-" if value is None else _number(value) for value in values),
            "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
        )
    Console(file=sys.stdout, highlight=False).print(table)
    if "leases" in result:
        _print_leases(result)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Choose what is shown: the first few metrics of the server, of the clients, and of their training."""
    columns = []
    for task, most in _MOST_METRICS.items():
        names = list(dict.fromkeys(name for row in rows for name in row["metrics"].get(task, {})))
        names.sort(key=lambda name: _SHOWN.index(name) if name in _SHOWN else len(_SHOWN))
        columns += [(task, name) for name in names[:most]]
    return columns


def _title(task: str, name: str, names: Sequence[str]) -> str:
    title = {"f1": "F1"}.get(name, name)
    return title if task == SERVER_EVALUATE or names.count(name) == 1 else f"{task} {title}"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


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
