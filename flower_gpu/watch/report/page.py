"""The report of a run as a single self-contained HTML page."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flower_gpu import files
from flower_gpu.apps import recording
from flower_gpu.apps.failures import COMPLETED, outcome_text
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError
from flower_gpu.printable import and_others, duration_text, format_bytes, path_text, printable
from flower_gpu.watch.fields import client_key, mapping, metric_rank
from flower_gpu.watch.folds.rounds import RoundPart
from flower_gpu.watch.history import History
from flower_gpu.watch.report import curves, pictures
from flower_gpu.watch.report.calls import PHASES, RunClock, client_rows, tries_of
from flower_gpu.watch.report.totals import Totals, holdings_of
from flower_gpu.watch.result import THEN

if TYPE_CHECKING:
    from jinja2 import Template

#: Maximum length of the first line of an error.
_ERROR_CHARACTERS: Final = 300
_MAX_ERRORS: Final = 20
_MAX_NAMES, _NAME_CHARACTERS = 10, 40
#: Maximum number of metrics of a round in the table, and in the results at the top of the page.
_MAX_METRICS, _MAX_RESULTS = 16, 3
#: Kinds of messages in their order within a round.
_TASKS: Final = ("train", "fit", "evaluate", "server-evaluate")
_UNKNOWN: Final = "-"
#: Names of metrics in the report, by the kind of messages that they come from.
_TASK_NAMES: Final = {
    "server-evaluate": "server, evaluate",
    "evaluate": "clients, evaluate",
    "train": "clients, train",
    "fit": "clients, fit",
}


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the report of a run and return its path. The run may still be running, or may have been killed.

    ``output``: file to write, by default ``report.html`` in the run's folder.

    Raises ConfigError if the trace is missing or cannot be read, or if the report cannot be written.
    """
    source, target = RunFolder(run_dir).trace, output or RunFolder(run_dir).report
    try:
        if not source.is_file():
            raise ConfigError(
                f"{path_text(source)} is not there: a report is made from the trace of a run. Give the "
                "folder of a run of `flower-gpu launch` or `simulate`, or the one of FLOWER_GPU_RUN_DIR"
            )
        history = History.read(source)
    except OSError as error:
        raise ConfigError(f"{path_text(source)}: {error.strerror}") from None
    is_going_on = any(Path(run.folder).resolve() == run_dir.resolve() for run in recording.running_runs())
    text = page(history, str(run_dir.absolute()), is_going_on)
    try:
        with files.replaced(target) as new:
            new.write_bytes(text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path_text(error.filename or target)}: {error.strerror}; name another file with --output"
        ) from None
    return target


def page(history: History, folder: str, is_going_on: bool) -> str:
    """Return the HTML page about a run. ``folder``: the folder of the run as text for the page."""
    clock = RunClock.of(history)
    tries = tries_of(history, clock)
    holdings = {gpu.uuid: holdings_of(history, clock, gpu.uuid) for gpu in history.hosts.gpus_of_run}
    totals = Totals(history, clock, tries, holdings)
    axis = pictures.TimeAxis(clock, tries)
    drawn = [
        pictures.workers_picture(history, axis, tries),
        pictures.memory_picture(history, axis, holdings),
    ]
    outcome_class, outcome = outcome_of(history, is_going_on)
    return _template().render(
        history=history,
        run=history.run,
        facts=facts_of(history, Path(folder)),
        results=[
            (task, _metrics(part, _MAX_RESULTS))
            for task, part in {part.task: part for part in history.rounds.parts if part.metrics}.items()
        ],
        totals=totals,
        clients=client_rows(tries),
        pictures=[picture for picture in drawn if picture is not None],
        charts=curves.charts_of(history.rounds.parts),
        chart_size=curves,
        axis=axis,
        size=pictures,
        folder=folder,
        outcome_class=outcome_class,
        outcome=outcome,
        phases=PHASES,
        gpus=[
            (pictures.gpu_name(gpu_totals.gpu, [other.gpu for other in totals.gpus]), gpu_totals)
            for gpu_totals in totals.gpus
        ],
        gpu_names=[gpu_totals.gpu.name or gpu_totals.gpu.uuid for gpu_totals in totals.gpus],
        rounds=_rounds(history),
        errors=totals.errors[:_MAX_ERRORS],
        errors_left_out=[failure.count for failure in totals.errors[_MAX_ERRORS:]],
        consequences={
            THEN.get(then, then): count
            for then, count in Counter(event.then for event in history.calls.out_of_memory).most_common()
        },
        unknown=_UNKNOWN,
    )


def facts_of(history: History, folder: Path) -> dict[str, str]:
    """Return the settings and results of a run by name, as text for the page."""
    run_config, versions = (mapping(history.run.settings.get(name)) for name in ("run_config", "versions"))
    model, path = history.run.facts.get("model_sha256"), RunFolder(folder).model
    with suppress(OSError):
        if model is None:
            with path.open("rb") as file:
                model = f"{hashlib.file_digest(file, 'sha256').hexdigest()} (of the file {path.name})"
    cut = history.cut_lines
    facts = {
        "error": history.run.error,
        "seed": history.run.settings.get("seed"),
        "run config": ", ".join(f"{key} = {json.dumps(value)}" for key, value in run_config.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "model, SHA-256": model,
        "trace": f"{cut} line{'s' * (cut != 1)} cut, and left out" if cut else None,
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        # Texts from other processes may contain line breaks or marks that change the direction of writing.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "size": _known(format_bytes),
        "percent": _known(lambda share: f"{100 * share:.0f} %"),
        "duration": _known(duration_text),
        "short": _known("{:,.2f}".format),
        "moment": _known(_moment_text),
        "counted": lambda number, noun: f"{number:,} {noun}{'' if number == 1 else 's'}",
        "first_line": lambda error: error[:_ERROR_CHARACTERS],
        "named": _names,
        "pairs": lambda counts: ", ".join(f"{key} {value}" for key, value in counts.items())[
            :_ERROR_CHARACTERS
        ],
        "listed": lambda counts: ", ".join(f"{count:,} {name}" for name, count in counts.items()),
        "task": task_name,
        "px": "{:.1f}".format,
        "part": lambda x: f"{100 * x / pictures.WIDTH:.2f}%",
        "thousands": "{:,}".format,
    }
    return environment.get_template("page.html.jinja")


def task_name(task: str) -> str:
    """Return the readable name of a kind of messages, such as ``"clients, fit"``."""
    return _TASK_NAMES.get(task, task)


def _names(clients: Set[str]) -> str:
    """Return the clients of a failure as text: ``"client 3"``, ``"clients 3, 4 and 12 others"``."""
    names = [client[:_NAME_CHARACTERS] for client in sorted(clients, key=client_key)[:_MAX_NAMES] if client]
    others = and_others(len(clients) - _MAX_NAMES)
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(names)}{others}" if names else ""


def _known(write: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: _UNKNOWN if value is None else write(value)


def _moment_text(time: float) -> str:
    """Return a time as text in this host's time zone."""
    try:
        return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (OverflowError, OSError, ValueError):
        # The time is out of the range of datetime.
        return _UNKNOWN


def outcome_of(history: History, is_going_on: bool) -> tuple[str, str]:
    """Return the style class and the text that describe how a run has ended."""
    if history.run.finished_at is not None:
        text = outcome_text(history.run.outcome, history.rounds.messages_failed, history.rounds.messages_sent)
        good = "partly" if history.rounds.messages_failed else "completed"
        return good if history.run.outcome == COMPLETED else "bad", text or "ended"
    if is_going_on:
        return "open", "still running when this report was made"
    if history.run.started_at is not None:
        where = f" on {history.run.host}" if history.run.host else ""
        return "bad", f"no end in the trace: it was killed, or is still running{where}"
    return "open", "no beginning and no end in the trace"


def _rounds(history: History) -> list[dict[str, Any]]:
    """Return the rows of the table of rounds, with messages and metrics."""
    places = {task: place for place, task in enumerate(_TASKS)}
    parts = sorted(
        history.rounds.parts, key=lambda part: (part.round or 0, places.get(part.task, -1), part.task)
    )
    return [{"part": part, "metrics": _metrics(part, _MAX_METRICS)} for part in parts]


def _metrics(part: RoundPart, limit: int) -> str:
    shown = [
        f"{name} {value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{name} {value:.4g}"
        for name, value in sorted(part.metrics.items(), key=lambda item: metric_rank(item[0]))[:limit]
    ]
    if len(part.metrics) > limit:
        shown.append(f"{len(part.metrics) - limit} more")
    return ", ".join(shown) or _UNKNOWN
