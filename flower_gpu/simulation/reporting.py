"""One run, shown and written down: its events go to the history, the trace, the display and the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from flower_gpu.apps.failures import Failure, FailureLog
from flower_gpu.errors import ClientsFailedError, ConfigError, FlowerGPUError, shortened
from flower_gpu.flower.recording.recorder import NOT_PULLED, Recorder, write_event
from flower_gpu.flower.recording.strategies import recorded_rounds
from flower_gpu.simulation.results import ResultFolder, SimulationStoppedError
from flower_gpu.simulation.summary import summary_lines, summary_of
from flower_gpu.trace import Event
from flower_gpu.watch.display import make_display
from flower_gpu.watch.history import History

#: Events that are not in the trace: each call of a simulation has lines of its own there.
_ONLY_HERE: Final = ("reply", "round_grew")
_CANNOT_RESUME = (
    "this run cannot go on with {}: only flower_gpu's FedAvg (flower_gpu.FedAvg) says after each round all "
    "that the next one needs. Other strategies keep what nobody else knows of: run the app anew"
)


@dataclass
class Report:
    """What is known of a run. Its recorder has the model; ``summary`` is empty until the run is over."""

    recorder: Recorder
    facts: dict[str, Any] = field(default_factory=dict)  # for the summary, such as ``workers_started``
    summary: dict[str, Any] = field(default_factory=dict)  # as in ``summary.json``


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
    """Show a run and write it down in ``folder``, while in the context.

    A run that goes on with an earlier one in this folder has the round of the checkpoint for
    ``resumed_round``. ``on_resume`` is called when it is clear that it can go on.

    Raises
    ------
    SimulationStoppedError
        In the place of a KeyboardInterrupt.
    ClientsFailedError
        If all clients fail, and not ``keep_going``.
    """
    began_s = time.monotonic()
    history = History(keep_finished=False)
    messages_before = 0
    is_refused, is_resumed = False, resumed_round is None
    display = make_display(history, sys.stderr, is_shown=progress)
    failures = FailureLog(None if folder is None else folder.failures, display.say)

    def resume(event: Event) -> None:
        nonlocal is_refused, is_resumed, messages_before
        if event["event"] == "strategy_started" and not event["can_resume"]:
            is_refused = True
            raise ConfigError(_CANNOT_RESUME.format(event["strategy"]))
        is_resumed = True
        # Only now: nothing is changed in the folder of a run that cannot go on.
        assert folder is not None and resumed_round is not None
        history.feed(folder.cut(resumed_round))
        messages_before = history.messages_sent
        on_resume()

    def on_event(event: Event) -> None:
        if not is_resumed:
            resume(event)
        history.feed([event])
        if folder is not None:
            folder.on_event(event)
            if event["event"] not in _ONLY_HERE:
                write_event(event)
        display.show(event)
        if event["event"] == "reply" and event["error"] is not None:
            client = "unknown" if event["node"] is None else str(event["node"])
            failure = Failure(
                client, event["task"], event["round"], event["error"], event.get("traceback", "")
            )
            failures.add(failure, is_said=event["error"] != NOT_PULLED)

    outcome, error_text = "completed", None
    report: Report | None = None
    try:
        pointer = None if keep_going else lambda: failures.pointer
        with recorded_rounds(on_event, partition_of, pointer) as recorder:
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
        display.close()
        if report is not None and not is_refused:
            report.summary = summary_of(
                history,
                outcome,
                clients=clients,
                seconds=time.monotonic() - began_s,
                messages_before=messages_before,
                **report.facts,
            )
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
