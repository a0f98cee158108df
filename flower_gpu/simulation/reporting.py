"""One run, shown and written down: its events go to the history, the trace, the display and the results.

The summary, as ``summary.json`` and as the lines at the end, is a view on the history.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from flower_gpu.apps.failures import Failure, FailureLog, outcome_text
from flower_gpu.apps.folder import short
from flower_gpu.errors import ConfigError, DiskError, RunEndedError, shortened
from flower_gpu.flower.recording.recorder import NOT_PULLED, Recorder, write_event
from flower_gpu.flower.recording.strategies import recorded_rounds
from flower_gpu.flower.strategy_state import OURS
from flower_gpu.printable import duration_text
from flower_gpu.simulation import verifying
from flower_gpu.simulation.results import ResultFolder, SimulationStoppedError, model_sha256
from flower_gpu.trace import Event
from flower_gpu.watch.display import in_notebook, make_display
from flower_gpu.watch.fields import metrics_text
from flower_gpu.watch.flower_log import flower_lines
from flower_gpu.watch.history import History

#: Events that are in the trace for trackers only: each call of a simulation has lines of its own there.
_ONLY_HERE: Final = ("reply", "round_grew")
_CANNOT_RESUME: Final = (
    "this run cannot go on with {}: only Flower's own strategies (flwr.serverapp.strategy), as they are, and "
    "flower_gpu.FedAvg say after each round all that the next one needs. Others keep what nobody else knows "
    "of: run the app anew"
)
_OTHER_STRATEGY: Final = (
    "this run cannot go on with {}: its checkpoint is one of {}. Give the app the strategy of then, or start "
    "a new run without --resume"
)

#: The attribute of an error that has ended a run which says where its results are.
FOLDER: Final = "folder_of_run"
_MOST_FAILURES: Final = 10  # reasons
_MOST_CLIENTS: Final = 5  # of one reason
_MOST_HOSTS: Final = 8
_MOST_ROUNDS: Final = 5
_MOST_METRICS: Final = 8
_REASON_CHARACTERS: Final = 120


@dataclass
class Report:
    """What is known of a run. Its recorder has the model; ``summary`` is empty until the run is over."""

    recorder: Recorder
    history: History
    say: Callable[[str], None]  # shows a line, if progress is shown
    facts: dict[str, Any] = field(default_factory=dict)  # for the summary, such as ``workers_started``
    summary: dict[str, Any] = field(default_factory=dict)  # as in ``summary.json``


@contextmanager
def reported_run(
    folder: ResultFolder | None,
    clients: int,
    partition_of: Callable[[int], int],
    *,
    progress: bool = True,
    verbose: bool | None = None,
    resumed_round: int | None = None,
    resumed_strategy: str = OURS,
    on_resume: Callable[[], None] = lambda: None,
    keep_going: bool = False,
    is_tracked: bool = False,
) -> Iterator[Report]:
    """Show a run and write it down in ``folder``, while in the context.

    ``verbose``: whether Flower's log lines are shown, or are written into the folder. None: shown, but not in
    a notebook.

    A run that goes on with an earlier one in this folder has the round of the checkpoint for
    ``resumed_round``, and its kind of strategy for ``resumed_strategy``. ``on_resume`` is called when it is
    clear that it can go on. With ``is_tracked`` all events are in the trace, for those who follow it.

    Raises SimulationStoppedError in the place of a KeyboardInterrupt.
    Raises RunEndedError if all clients fail, or one in a way that ends the run, and not ``keep_going``.
    """
    began_s = time.monotonic()
    history = History(keep_finished=False, keep_rounds=True)
    messages_before = 0
    is_refused, is_resumed = False, resumed_round is None
    display = make_display(history, _stream(), is_shown=progress)
    failures = FailureLog(None if folder is None else folder.failures, display.say)

    def resume(event: Event) -> None:
        nonlocal is_refused, is_resumed, messages_before
        if event["event"] == "strategy_started" and event["resumes"] != resumed_strategy:
            is_refused = True
            if event["resumes"] is None:
                raise ConfigError(_CANNOT_RESUME.format(event["strategy"]))
            raise ConfigError(_OTHER_STRATEGY.format(event["resumes"], resumed_strategy))
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
            if is_tracked or event["event"] not in _ONLY_HERE:
                write_event(event)
        display.show(event)
        if event["event"] == "reply" and event["error"] is not None:
            client = "unknown" if event["node"] is None else str(event["node"])
            failure = Failure(
                client, event["task"], event["round"], event["error"], event.get("traceback", "")
            )
            failures.add(failure, is_said=event["error"] != NOT_PULLED)

    outcome, why, is_told = "completed", None, False
    report: Report | None = None
    try:
        pointer = None if keep_going else lambda: failures.pointer
        with (
            flower_lines(
                not in_notebook() if verbose is None else verbose, None if folder is None else folder.log
            ),
            recorded_rounds(on_event, partition_of, pointer, streams=True) as recorder,
        ):
            report = Report(recorder, history, display.say if progress else lambda _: None)
            yield report
            recorder.close()
            recorder.check()
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise SimulationStoppedError(
            None if folder is None else folder.path, folder is not None and folder.can_resume
        ) from None
    except BaseException as error:
        if isinstance(error, RunEndedError) and folder is not None:
            error.folder, error.can_resume = folder.path, folder.can_resume
        outcome, why, is_told = "failed", error_text(error), isinstance(error, DiskError)
        if folder is not None and not is_refused:
            error.__dict__[FOLDER] = folder.path
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
            report.summary["model_sha256"] = model_sha256(report.recorder.model)
            if why is not None:
                report.summary["error"] = why
            try:
                if folder is not None:
                    folder.finish(report.recorder.model, report.summary)
            except DiskError as error:
                if outcome == "completed":
                    raise
                if not is_told:
                    _print([f"not all results are written: {error}"])  # what ended the run is told as well
            finally:
                if progress:
                    _print(summary_lines(report.summary, None if folder is None else short(folder.path)))


def error_text(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return shortened(f"{type(error).__name__}: {lines[0]}") if lines else type(error).__name__


def _print(lines: list[str]) -> None:
    if (stream := _stream()) is not None:
        print("\n".join(lines), file=stream, flush=True)


def _stream() -> TextIO | None:
    """Return where progress and summary are shown: in a notebook, what is on stderr looks like an error."""
    return sys.stdout if in_notebook() else sys.stderr


def summary_of(
    history: History,
    outcome: str,
    *,
    clients: int,
    seconds: float,
    messages_before: int = 0,
    **facts: Any,
) -> dict[str, Any]:
    """Return the summary of a run: ``messages_before`` were sent before it was resumed."""
    failures, messages = history.failures, history.messages_sent
    failed = failures.counts.total()
    return {
        "outcome": outcome_text(outcome, failed, messages),
        "strategy": history.strategy,
        "rounds": history.highest_round,
        "num_rounds": history.num_rounds,
        "resumed_after_round": history.resumed_round,
        "clients": clients,
        "messages": messages,
        "failed": failed,
        "failures": [
            {"reason": reason, "count": count, "messages": failures.named[reason]}
            for reason, count in failures.counts.most_common()
        ],
        "seconds": round(seconds, 3),  # of this process: a resumed run has had more
        "waited_s": round(history.waited_s, 3),  # without any worker, for what others had
        "messages_per_s": round((messages - messages_before) / seconds, 3) if seconds > 0 else None,
        **facts,
        "metrics": {kind: dict(metrics) for kind, metrics in history.last_metrics.items()},
    }


def summary_lines(summary: Mapping[str, Any], where: str | None) -> list[str]:
    """Write a summary for people; ``where`` is the folder of the results, if there is one."""
    of = f" of {summary['num_rounds']}" if summary["num_rounds"] else ""
    rate = summary["messages_per_s"]
    rows = [
        ("outcome", summary["outcome"]),
        ("rounds", f"{summary['rounds']}{of}"),
        ("clients", f"{summary['clients']}, {summary['messages']} messages, {summary['failed']} failed"),
        ("time", duration_text(summary["seconds"]) + (f", {rate:.3g} messages/s" if rate else "")),
    ]
    if summary["waited_s"]:
        rows.append(("waiting", f"{duration_text(summary['waited_s'])} of that without any worker"))
    if summary.get("hosts"):
        rows.append(("hosts", _hosts_text(summary["hosts"])))
    if summary.get("workers_started"):
        text = f"{summary['workers_started']} started"
        if summary.get("peak_worker_bytes"):
            text += f", with {summary['peak_worker_bytes'] / 2**20:.0f} MiB at most"
        rows.append(("workers", text))
    if "compared" in (recycling := summary.get("recycling") or {}):
        rows.append(("recycling", verifying.text(recycling)))
    for kind, metrics in summary["metrics"].items():
        if text := metrics_text(metrics, _MOST_METRICS):
            rows.append((kind, text))
    if sha256 := summary.get("model_sha256"):
        rows.append(("model sha256", sha256))
    if where is not None:
        rows.append(("results", where))
    width = max(len(name) for name, _ in rows)
    return [*(f"{name:{width}}  {text}" for name, text in rows), *_failures(summary)]


def _failures(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason, with the clients."""
    reasons = summary["failures"][:_MOST_FAILURES]
    lines = []
    for reason in reasons:
        messages = reason["messages"]
        clients = sorted({message["client"] for message in messages} - {None})
        others = len(clients) - _MOST_CLIENTS
        names = ", ".join(map(str, clients[:_MOST_CLIENTS])) + (f" and {others} others" if others > 0 else "")
        kinds = " and ".join(dict.fromkeys(message["type"] for message in messages))
        rounds = _in_rounds([message["round"] for message in messages])
        count = f" ({reason['count']} messages)" if reason["count"] > len(clients) else ""
        text = textwrap.shorten(reason["reason"], _REASON_CHARACTERS, placeholder=" ...") or "no reason given"
        lines.append(f"  client{'s' * (len(clients) > 1)} {names}, {kinds}{rounds}{count}: {text}")
    if more := summary["failed"] - sum(reason["count"] for reason in reasons):
        lines.append(f"  and {more} more failed messages")
    return ["failed:", *lines] if lines else []


def _hosts_text(hosts: Sequence[Mapping[str, Any]]) -> str:
    lost = sum(host["is_lost"] for host in hosts)
    most = ", ".join(f"{host['host']} {host['messages']}" for host in hosts[:_MOST_HOSTS])
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return f"{len(hosts)}{f', {lost} lost' if lost else ''}; messages: {most}{more}"


def _in_rounds(rounds: list[Any]) -> str:
    numbers = [str(number) for number in dict.fromkeys(rounds) if number is not None]
    if not numbers:
        return ""
    more = f" and {len(numbers) - _MOST_ROUNDS} more" if len(numbers) > _MOST_ROUNDS else ""
    return f" in round{'s' * (len(numbers) > 1)} {', '.join(numbers[:_MOST_ROUNDS])}{more}"
