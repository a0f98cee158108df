"""One run, shown and written down: its events go to the progress, the sums and the folder of results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.errors import ClientsFailedError, ConfigError, FlowerGPUError, shortened
from flower_gpu.run.failures import Failure, FailureLog
from flower_gpu.simulation.events import NOT_PULLED, Event, Replied, RunStarted
from flower_gpu.simulation.progress import Progress
from flower_gpu.simulation.recorder import Recorder
from flower_gpu.simulation.recording import recorded_run
from flower_gpu.simulation.results import ResultFolder, SimulationStoppedError
from flower_gpu.simulation.summary_text import summary_lines
from flower_gpu.simulation.totals import Totals
from flower_gpu.simulation.traced import trace_event

_CANNOT_RESUME = (
    "this run cannot go on with {}: only flower_gpu's FedAvg (flower_gpu.FedAvg) says after each round all "
    "that the next one needs. Other strategies keep what nobody else knows of: run the app anew"
)


@dataclass
class Report:
    """What is known of a run.

    Attributes
    ----------
    recorder : Recorder
        For :class:`~flower_gpu.simulation.recorded_grid.RecordedGrid`; it also has the final model.
    facts : dict
        What else the summary is to hold, such as ``workers_started``. To be filled while the run goes on.
    summary : dict
        The summary, as in ``summary.json``; empty until the run is over.
    """

    recorder: Recorder
    facts: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


@contextmanager
def reported_run(
    folder: ResultFolder | None,
    clients: int,
    partition_of: Callable[[int], int],
    *,
    progress: bool = True,
    resumed_round: int | None = None,
    on_resume: Callable[[], None] = lambda: None,
    keep_going: bool = False,
) -> Iterator[Report]:
    """Show a run and write it down, while in the context.

    Parameters
    ----------
    folder : ResultFolder or None
        Where its results go; None keeps none.
    clients : int
        How many virtual clients there are.
    partition_of : callable
        Returns the partition of a node.
    progress : bool
        Whether its progress, and the sums at its end, are shown on stderr.
    resumed_round : int, optional
        The round of the checkpoint, if the run goes on with an earlier one in this folder.
    on_resume : callable
        Called when it is clear that it does.
    keep_going : bool
        Whether a run in which all clients fail goes on.

    Yields
    ------
    Report
        What is known.

    Raises
    ------
    SimulationStoppedError
        In the place of a KeyboardInterrupt.
    ClientsFailedError
        If all clients fail.
    """
    totals = Totals(clients)
    refused = False
    has_resumed: list[bool] = []
    shown = Progress(is_shown=progress)
    failures = FailureLog(None if folder is None else folder.failures, shown.say)

    def on_event(event: Event) -> None:
        nonlocal refused
        if resumed_round is not None and not has_resumed:
            if isinstance(event, RunStarted) and not event.can_resume:
                refused = True
                raise ConfigError(_CANNOT_RESUME.format(event.strategy))
            has_resumed.append(True)
            # Only now: nothing is changed in the folder of a run that cannot go on.
            assert folder is not None
            totals.restore(folder.cut(resumed_round))
            on_resume()
        totals.on_event(event)
        if folder is not None:
            folder.on_event(event)
            trace_event(event)
        shown.on_event(event)
        if isinstance(event, Replied) and event.error is not None:
            client = "unknown" if event.partition is None else str(event.partition)
            failure = Failure(client, event.kind, event.server_round, event.text, event.traceback)
            failures.add(failure, is_said=event.error != NOT_PULLED)

    outcome, error_text = "completed", None
    report: Report | None = None
    try:
        pointer = None if keep_going else lambda: failures.pointer
        with recorded_run(on_event, partition_of, pointer) as recorder:
            report = Report(recorder)
            yield report
            recorder.close()
            recorder.check()
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise SimulationStoppedError(
            None if folder is None else folder.path, folder is not None and folder.can_resume
        ) from None
    except BaseException as error:
        if isinstance(error, ClientsFailedError) and folder is not None:
            error.folder, error.can_resume = folder.path, folder.can_resume
        outcome, error_text = "failed", _text(error)
        raise
    finally:
        shown.close()
        if report is not None and not refused:
            report.summary = totals.as_dict(outcome, **report.facts)
            if error_text is not None:
                report.summary["error"] = error_text
            try:
                if folder is not None:
                    folder.finish(report.recorder.model, report.summary)
            except FlowerGPUError as error:
                if outcome == "completed":
                    raise
                _print([f"not all results are written: {error}"])  # what ended the run is told as well
            finally:
                if progress:
                    _print(summary_lines(report.summary, None if folder is None else folder.shown))


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shortened(f"{type(error).__name__}: {lines[0]}") if lines else type(error).__name__


def _print(lines: list[str]) -> None:
    if sys.stderr is not None:
        print("\n".join(lines), file=sys.stderr, flush=True)
