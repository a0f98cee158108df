"""Recording a run: its events go to the trace, and to the shown run with its history and its display.

When the run is over, its result is made from the trace: ``result.json``, and the lines of the summary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TextIO

from flower_gpu import trace
from flower_gpu.apps.failures import COMPLETED, Failure
from flower_gpu.apps.folder import RunFolder, check_rounds_left, short
from flower_gpu.apps.recording import RecordedRun
from flower_gpu.errors import ConfigError, DiskError, RunEndedError, shortened
from flower_gpu.printable import told_if_slow
from flower_gpu.simulation.client_output import ClientOutput
from flower_gpu.simulation.options import LINES_PER_ROUND
from flower_gpu.simulation.simulation_result import SimulationStoppedError
from flower_gpu.strategies.model_file import model_sha256, write_model
from flower_gpu.strategies.recording.recorder import NOT_PULLED, Recorder, finite, write_event
from flower_gpu.strategies.recording.strategies import recorded_rounds
from flower_gpu.strategies.resuming.states import disk_error
from flower_gpu.strategies.rounds import RoundState
from flower_gpu.strategies.strategy_state import RESUMABLE
from flower_gpu.trace import Event
from flower_gpu.watch.display import in_notebook
from flower_gpu.watch.fields import first_line
from flower_gpu.watch.history import History
from flower_gpu.watch.metrics_table import MetricsTable
from flower_gpu.watch.output import flower_lines
from flower_gpu.watch.result import places_of, result_lines, result_of, write_results
from flower_gpu.watch.shown_run import ShownRun

_CANNOT_RESUME: Final = (
    f"this run cannot continue with {{}}, because its state is not known. {RESUMABLE}. Start a new run"
)
_OTHER_STRATEGY: Final = (
    "this run cannot continue with {}: its checkpoint is one of {}. Give the app the earlier strategy, or "
    "start a new run without --resume"
)

#: Attribute of an error that ended a run. Its value is the folder with the results.
FOLDER: Final = "folder_of_run"
_SMALL_BYTES: Final = 4096  # approximate size of a table or a result
# Minimum number of failures, and of messages in new workers, before a hint about used workers
_FEW: Final = 3


class Report:
    """The files of one run, which is shown meanwhile.

    ``folder``: folder of the run. None: nothing is written.
    ``run``: the trace of the run in ``folder``, or None.
    ``output``: decides which lines of clients are shown.
    ``progress``: True if progress and the summary are shown.
    ``resumes``: last finished round of the earlier run that is resumed, or None.
    ``on_resume``: called as soon as it is clear that the run can resume.
    ``is_tracked``: True if trackers follow the trace, which then has all events.
    ``recorder``: records the rounds, and has the model.
    ``summary``: the result as in ``result.json``. Empty until the run is over.
    """

    recorder: Recorder

    def __init__(
        self,
        folder: RunFolder | None,
        run: RecordedRun | None,
        output: ClientOutput,
        *,
        progress: bool = True,
        resumes: RoundState | None = None,
        on_resume: Callable[[], None] = lambda: None,
        is_tracked: bool = False,
    ) -> None:
        self.folder = folder
        stream, log = _stream(), None if folder is None else folder.failures
        self.shown = ShownRun(stream, stream, log, is_shown=progress, keep_rounds=True)
        self.facts: dict[str, Any] = {}  # the engine's facts for the result
        self.summary: dict[str, Any] = {}  # the same content as ``result.json``
        self.is_refused = False
        self._run = run
        self._output = output
        self._is_shown = progress
        self._resumes = resumes
        self._on_resume = on_resume
        self._is_tracked = is_tracked
        self._end: Event | None = None
        self._is_disk_full = False
        self._table: MetricsTable | None = None  # None until a round is over
        output.on_first_hidden = self._say_what_is_hidden
        self._has_begun = resumes is None
        if self._has_begun and folder is not None:
            self.shown.history.feed(trace.read(folder.trace))

    def on_event(self, event: Event) -> None:
        """Handle an event of the recorder."""
        if not self._has_begun:
            self._resume(event)
        self.shown.show(event)
        if event["event"] == "round_started":
            self._output.begin_round()
        if self.folder is not None:
            self._keep(event, self.folder)
        if event["event"] == "reply" and (error := event["error"]) is not None:
            client = "unknown" if event["node"] is None else str(event["node"])
            self.shown.failures.add(Failure.from_event(event, client), is_said=error != NOT_PULLED)

    def _say_what_is_hidden(self) -> None:
        """Show where the hidden lines of clients are, unless the user asked for none."""
        if self._output.word == "auto":
            text = f"the first {LINES_PER_ROUND} lines of clients are shown in each round"
            self.shown.say(f"{text}: {_all_lines(self.folder)}. --client-output all shows them here")

    def _resume(self, event: Event) -> None:
        """Continue the history of the trace so far. If the run cannot resume, its folder stays unchanged.

        Raises ConfigError if the app has another strategy than before, or one that cannot be resumed, or if
        the earlier run has finished more rounds than are asked for.
        """
        if event["event"] == "strategy_started":
            self.is_refused = True
            self._check_resumes(event)
            self.is_refused = False
        self._has_begun = True
        self._on_resume()
        assert self.folder is not None
        with told_if_slow(self.shown.say, f"reading {self.folder.trace.name} of the run"):
            self.shown.history.feed(trace.read(self.folder.trace))

    def _check_resumes(self, started: Event) -> None:
        assert self._resumes is not None
        if started["resumes"] is None:
            raise ConfigError(_CANNOT_RESUME.format(started["strategy"]))
        if started["resumes"] != self._resumes.strategy:
            raise ConfigError(_OTHER_STRATEGY.format(started["resumes"], self._resumes.strategy))
        check_rounds_left(self._resumes.server_round, started["num_rounds"])

    def _keep(self, event: Event, folder: RunFolder) -> None:
        """Write an event into the trace, and extend the table of metrics before a new round.

        Replies that a strategy aggregates go to the trace only for trackers, since each call has its own
        lines.
        """
        match event["event"]:
            case "reply":
                error = event["error"]
                if self._is_tracked or error is not None or (event["metrics"] and not event["aggregated"]):
                    short_error = None if error is None else shortened(first_line(error))
                    write_event({**event, "error": short_error, "traceback": ""})
            case "round_grew" if not self._is_tracked:
                pass
            case "round_started":
                write_event(event)
                newest = next(self.shown.history.rounds.newest_parts(), None)
                if newest is not None and newest.round != event["round"]:
                    self._extend_table(folder)
            case "round_finished":
                write_event(event)
                if self._table is not None and (
                    part := self.shown.history.rounds.part(event["round"], event["task"])
                ):
                    self._table.note(part)
            case _:
                write_event(event)

    def _extend_table(self, folder: RunFolder) -> None:
        self._table = self._table or MetricsTable(folder)
        try:
            self._table.extend(self.shown.history.rounds)
        except OSError as error:
            text = "Free space, and continue with --resume if there is a checkpoint"
            raise disk_error(error, folder.path, _SMALL_BYTES, text) from error

    def end(self, outcome: str, error: BaseException | None) -> None:
        """Write the model, and prepare the last event of the trace.

        Raises DiskError if the disk has no room for the model of a completed run.
        """
        self.shown.close()
        if self.is_refused:
            return
        model, full = self.recorder.model, None
        facts = {**self.facts, "model": None, "model_sha256": model_sha256(model)}
        facts["client_lines_hidden"] = self._output.hidden
        try:
            if self.folder is not None:
                facts["model"] = write_model(model, self.folder)
        except DiskError as no_room:
            full = no_room
            if error is None:
                outcome, error = "failed", no_room
        self._is_disk_full = isinstance(error, DiskError)
        fields = {
            "messages": self.shown.history.rounds.messages_sent,
            "failed": self.shown.history.rounds.failures.counts.total(),
            "error": None if error is None or outcome == "interrupted" else error_text(error),
            "facts": finite(facts),
        }
        self._end = trace.make("run_finished", outcome=outcome, **fields)
        self.shown.history.feed([self._end])
        if self._run is not None:
            self._run.end_told = fields
        if full is not None:
            if error is full:
                raise full
            if not self._is_disk_full:
                # The caller also reports the error that ended the run.
                self.shown.show_end([f"not all results are written: {full}"])

    def conclude(self) -> None:
        """Write the results. Call this once the trace has its last event.

        Raises DiskError if the disk has no room for the results of a completed run.
        """
        if self._end is None:
            return
        history = self.shown.history
        if self.folder is not None:
            with told_if_slow(self.shown.say, f"reading {self.folder.trace.name} for the result"):
                history = History.read(self.folder.trace, keep_finished=False)
            if history.run.finished_at is None:
                # The disk was full, so the trace does not have the last event.
                history.feed([self._end])
        self.summary = result_of(history)
        try:
            if self.folder is not None:
                write_results(self.folder, history.rounds.parts, self.summary)
        except OSError as error:
            assert self.folder is not None
            full = disk_error(error, self.folder.path, _SMALL_BYTES, "Free space for the results")
            if self._end["outcome"] == COMPLETED:
                raise full from error
            if not self._is_disk_full:
                self.shown.show_end([f"not all results are written: {full}"])

    def show_summary(self) -> None:
        """Show the summary, if progress is shown. It comes last, even after the lines of trackers."""
        if self._is_shown and self.summary:
            self.shown.show_end(lines_of(self.summary, self.folder))


@contextmanager
def reported(
    report: Report,
    partition_of: Callable[[int], int],
    *,
    verbose: bool | None = None,
    keep_going: bool = False,
) -> Iterator[Report]:
    """Show and record a run in the block.

    ``verbose``: True if Flower's log lines are shown, False if they are written into the folder. None: shown,
    but not in a notebook.
    ``keep_going``: True if the run continues when all clients fail.

    Raises SimulationStoppedError in place of a KeyboardInterrupt.
    Raises RunEndedError if all clients fail, or a client fails in a way that ends the run, unless
    ``keep_going``.
    """
    folder = report.folder
    log = None if folder is None else folder.log("run")
    are_shown = not in_notebook() if verbose is None else verbose
    pointer = None if keep_going else lambda: report.shown.failures.pointer
    try:
        with (
            flower_lines(are_shown, log),
            recorded_rounds(report.on_event, partition_of, pointer, streams=True) as recorder,
        ):
            report.recorder = recorder
            yield report
            recorder.close()
            recorder.check()
    except KeyboardInterrupt as error:
        report.end("interrupted", error)
        raise SimulationStoppedError(
            None if folder is None else folder.path, folder is not None and folder.has_checkpoint
        ) from None
    except BaseException as error:
        if folder is not None:
            if isinstance(error, RunEndedError):
                error.folder, error.can_resume = folder.path, folder.has_checkpoint
            if not report.is_refused:
                error.__dict__[FOLDER] = folder.path
        report.end("failed", error)
        raise
    report.end(COMPLETED, None)


def lines_of(summary: Mapping[str, Any], folder: RunFolder | None) -> list[str]:
    """Return the lines of a simulation's summary, for people."""
    more = []
    batches = summary.get("batches") or {}
    if batches.get("count"):
        more.append(("batches", _batches_text(batches)))
    if hidden := summary.get("client_lines_hidden"):
        more.append(("client output", f"{hidden} lines are not shown here: {_all_lines(folder)}"))
    places = () if folder is None else places_of(folder)
    lines = result_lines(summary, more, places)
    end_of_failures = len(lines) - len(places)
    return [*lines[:end_of_failures], *_only_used_workers_failed(summary), *lines[end_of_failures:]]


def _only_used_workers_failed(summary: Mapping[str, Any]) -> list[str]:
    """Return a hint if messages failed in used workers, and never in a new one.

    A few failures do not count. They may all be in used workers by chance, because these handle most
    messages.
    """
    new, used = (summary.get("calls_by_use", {}).get(name, {}) for name in ("new", "used"))
    if new.get("failed") or min(new.get("count", 0), used.get("failed", 0)) < _FEW:
        return []
    return [
        f"  all {used['failed']} were in workers that had handled other messages before, and the first "
        f"messages of {new['count']} workers went well: --calls-per-worker 1 gives each message a worker of "
        "its own"
    ]


def _all_lines(folder: RunFolder | None) -> str:
    """Return a text that says where all lines of clients are."""
    return (
        "a run without a folder keeps no others"
        if folder is None
        else f"all are in {short(folder.client_log)}"
    )


def _batches_text(batches: Mapping[str, Any]) -> str:
    text = f"{batches['messages']} messages in {batches['count']} batches"
    fastest = [f"{size} for {kind}" for kind, size in batches.get("fastest", {}).items()]
    return f"{text}; the fastest size: {', '.join(fastest)}" if fastest else text


def error_text(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    text = first_line(str(error))
    return shortened(f"{type(error).__name__}: {text}") if text else type(error).__name__


def _stream() -> TextIO | None:
    """Return the stream of progress and summary: stderr, but stdout in a notebook.

    A notebook shows stderr like an error.
    """
    return sys.stdout if in_notebook() else sys.stderr
