"""A report as one HTML page, with all that belongs to it inside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.apps.failures import COMPLETED, outcome_text
from flower_gpu.printable import printable
from flower_gpu.watch.history import History
from flower_gpu.watch.report import texts
from flower_gpu.watch.report.calls import PHASES, ClientRow
from flower_gpu.watch.report.drawing import Picture
from flower_gpu.watch.report.totals import Totals
from flower_gpu.watch.spans import Evaluation, SentMessages

if TYPE_CHECKING:
    from jinja2 import Template

_ERROR_CHARACTERS: Final = 300
_MOST_ERRORS: Final = 20
_MOST_METRICS: Final = 16  # of a round
_TASKS: Final = ("train", "fit", "evaluate", "server-evaluate")  # in the order of a round
_CONSEQUENCES: Final = {"again": "tried again", "on the CPU": "then on the CPU", "failed": "failed for good"}


def page(
    history: History,
    totals: Totals,
    clients: Sequence[ClientRow],
    pictures: Sequence[Picture],
    *,
    folder: str,
    is_going_on: bool,
) -> str:
    """Write the page. ``folder`` is the run's, as it is shown; ``is_going_on``: the run has not ended yet."""
    errors = list(totals.errors.items())
    outcome_class, outcome = outcome_of(history, is_going_on)
    return _template().render(
        run=history,
        totals=totals,
        clients=clients,
        pictures=pictures,
        folder=folder,
        outcome_class=outcome_class,
        outcome=outcome,
        phases=PHASES,
        gpus=[(texts.gpu_name(one.gpu, [each.gpu for each in totals.gpus]), one) for one in totals.gpus],
        gpu_names=[one.gpu.name or one.gpu.uuid for one in totals.gpus],
        rounds=_rounds(history),
        rounds_done=max((one.round for one in history.evaluations), default=0),
        errors=[(count, error[:_ERROR_CHARACTERS]) for error, count in errors[:_MOST_ERRORS]],
        errors_left_out=[count for _, count in errors[_MOST_ERRORS:]],
        consequences={_CONSEQUENCES.get(then, then): count for then, count in totals.out_of_memory.items()},
        unknown=texts.UNKNOWN,
    )


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        # What others have written has no line breaks, nor marks that turn the direction of writing.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "size": texts.bytes_text,
        "percent": texts.percent_text,
        "duration": texts.duration_text,
        "moment": texts.moment_text,
        "counted": texts.counted,
        "listed": texts.listed,
        "task": texts.task_name,
        "short": lambda seconds: texts.UNKNOWN if seconds is None else f"{seconds:,.2f}",
        "thousands": "{:,}".format,
    }
    return environment.get_template("page.html.jinja")


def outcome_of(history: History, is_going_on: bool) -> tuple[str, str]:
    """Say how a run has ended: the class of the text in the page, and the text."""
    if history.finished_at is not None:
        text = outcome_text(history.outcome, history.failed_messages, history.all_messages)
        good = "partly" if history.failed_messages else "completed"
        return good if history.outcome == COMPLETED else "bad", text or "ended"
    if is_going_on:
        return "open", "still going on when this report was made"
    if history.started_at is not None:
        where = f" on {history.host}" if history.host else ""
        return "bad", f"no end in the trace: it was killed, or still goes on{where}"
    return "open", "no beginning and no end in the trace"


def _rounds(history: History) -> list[dict[str, Any]]:
    """Return the rows of the table of rounds: what was sent, and what came of it."""
    found = {(one.round, one.task): one for one in history.evaluations}

    def place(key: tuple[int | None, str]) -> tuple[int, int, str]:
        return key[0] or 0, _TASKS.index(key[1]) if key[1] in _TASKS else -1, key[1]

    keys: list[tuple[int | None, str]] = sorted({*found, *history.messages}, key=place)
    return [_round(*key, found.get(key), history.messages.get(key)) for key in keys]  # type: ignore[arg-type]


def _round(
    number: int | None, task: str, evaluation: Evaluation | None, sent: SentMessages | None
) -> dict[str, Any]:
    metrics = list(evaluation.metrics.items()) if evaluation else []
    shown = [f"{name} {texts.number_text(value)}" for name, value in metrics[:_MOST_METRICS]]
    if len(metrics) > _MOST_METRICS:
        shown.append(f"{len(metrics) - _MOST_METRICS} more")
    seconds = sent.seconds if sent else None
    if seconds is None and evaluation is not None:
        seconds = evaluation.seconds
    return {
        "number": texts.UNKNOWN if number is None else number,
        "task": task,
        "sent": None if task == "server-evaluate" else sent,  # a server's own evaluation sends none
        "seconds": seconds,
        "metrics": ", ".join(shown) or texts.UNKNOWN,
    }
