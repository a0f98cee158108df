"""A report as one HTML page, with all that belongs to it inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

from flower_gpu.monitor.report.clients import ClientRow
from flower_gpu.monitor.report.drawing import Picture
from flower_gpu.monitor.report.names import (
    bytes_text,
    counted,
    duration_text,
    moment_text,
    percent_text,
)
from flower_gpu.monitor.report.recorded import RunHistory
from flower_gpu.monitor.report.tables import clients_table, errors_table, escaped, gpu_table, rounds_table
from flower_gpu.monitor.report.totals import Totals
from flower_gpu.monitor.spans import STARTING, WAITING
from flower_gpu.run.failures import COMPLETED, outcome_text

_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
"""


def page(
    history: RunHistory,
    totals: Totals,
    clients: Sequence[ClientRow],
    pictures: Sequence[Picture],
    *,
    folder: str,
    is_going_on: bool,
) -> str:
    """Write the page.

    Parameters
    ----------
    history : RunHistory
        Of the run.
    totals : Totals
        Its sums.
    clients : sequence of ClientRow
        Its clients.
    pictures : sequence of Picture
        What is drawn, in this order.
    folder : str
        The run's folder, as it is shown.
    is_going_on : bool
        Whether the run has not ended yet.
    """
    name = history.name or "a run"
    style = files("flower_gpu.monitor.report").joinpath("page.css").read_text(encoding="utf-8")
    parts = [
        _HEAD.format(title=f"flower-gpu: {escaped(name)}", style=style),
        f"<h1>{escaped(name)}</h1>",
        _outcome(history, totals, is_going_on),
        _facts(history, totals, folder),
        _tiles(totals),
    ]
    if totals.gpus:
        parts += ["<h2>GPUs</h2>", gpu_table(totals)]
    for picture in pictures:
        parts += [f"<h2>{escaped(picture.title)}</h2>", _figure(picture)]
    if history.evaluations or history.messages:
        parts += ["<h2>Rounds</h2>", rounds_table(history.evaluations, history.messages)]
    if totals.errors:
        parts += ["<h2>Failures</h2>", errors_table(totals.errors)]
    if clients:
        parts += [
            "<h2>Clients</h2>",
            '<p class="soft">Waiting is for a lease, starting until the task is called, exiting from the '
            "result to the end of the worker. Seconds of a call.</p>",
            clients_table(clients),
        ]
    made = f" by flower-gpu {escaped(history.version)}" if history.version else ""
    parts.append(f"<footer>Made from trace.jsonl in {escaped(folder)}, written{made}.</footer>")
    return "\n".join([*parts, "</body>", "</html>", ""])


def outcome_of(history: RunHistory, is_going_on: bool) -> tuple[str, str]:
    """Say how a run has ended.

    Returns
    -------
    tuple of (str, str)
        The class of the text in the page, and the text.
    """
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


def _outcome(history: RunHistory, totals: Totals, is_going_on: bool) -> str:
    kind, text = outcome_of(history, is_going_on)
    took = f", after {duration_text(totals.duration_s)}" if totals.duration_s > 0 else ""
    return f'<p class="outcome {kind}">{escaped(text)}{escaped(took)}</p>'


def _facts(history: RunHistory, totals: Totals, folder: str) -> str:
    gpus = ", ".join(one.gpu.name or one.gpu.uuid for one in totals.gpus)
    clients = counted(history.clients, "client") if history.clients is not None else ""
    done = max((one.round for one in history.evaluations), default=0)
    rounds = f"{done} of {history.num_rounds}" if history.num_rounds else str(done or "")
    rows = {
        "started with": f"flower-gpu {history.kind}" if history.kind else "",
        "clients": clients,
        "rounds": rounds,
        "host": ", ".join(
            filter(None, (history.host, counted(history.cores, "core") if history.cores else ""))
        ),
        "GPUs": gpus or "none",
        "began": moment_text(history.started_at if history.started_at is not None else history.first_at),
        "ended": moment_text(history.finished_at) if history.finished_at is not None else "",
        "interrupted": counted(len(history.pauses), "time") if history.pauses else "",
        "folder": folder,
    }
    lines = [f"<dt>{key}</dt><dd>{escaped(value)}</dd>" for key, value in rows.items() if value]
    return "\n".join(["<dl>", *lines, "</dl>"])


def _tiles(totals: Totals) -> str:
    tiles = _gpu_tiles(totals) if totals.gpus else []
    tiles += [
        (
            duration_text(totals.lost_s),
            f"lost by all calls together: {_phase(totals, WAITING)}, {_phase(totals, STARTING)}",
        ),
        (counted(totals.calls, "call"), _calls(totals)),
    ]
    failed = {outcome: count for outcome, count in totals.outcomes.items() if outcome != "ok"}
    tiles.append((_failed(sum(failed.values())), _listed(failed) or "in any call"))
    if totals.messages:
        tiles.append((counted(totals.messages, "message"), f"{totals.unanswered:,} without a reply"))
    if totals.gpus:
        events = sum(totals.out_of_memory.values())
        tiles.append((_out_of_memory(events), _then(totals.out_of_memory)))
        tiles.append((bytes_text(totals.peak_bytes), "most GPU memory of one worker"))
    shown = [
        f'<div class="tile"><b>{escaped(value)}</b><span>{escaped(text)}</span></div>'
        for value, text in tiles
    ]
    return "\n".join(['<div class="tiles">', *shown, "</div>"])


def _gpu_tiles(totals: Totals) -> list[tuple[str, str]]:
    unit, unit_s = ("hours", 3600) if totals.gpu_s >= 3600 else ("minutes", 60)
    whole, leased = (f"{seconds / unit_s:,.1f}" for seconds in (totals.gpu_s, totals.leased_s))
    return [
        (f"{whole} GPU {unit}", f"{counted(len(totals.gpus), 'GPU')}; {leased} {unit} with a lease"),
        (f"{percent_text(totals.idle_share)} idle", "of the GPUs' time without any lease"),
        (f"{percent_text(totals.capacity_share)} leased", "of all memory for leases, over the whole time"),
    ]


def _phase(totals: Totals, phase: str) -> str:
    share = percent_text(totals.phase_share(phase))
    return f"{duration_text(totals.phase_s[phase])} {phase} ({share})"


def _calls(totals: Totals) -> str:
    texts = [counted(totals.workers, "worker")] if totals.workers != totals.calls else []
    texts.append(f"{totals.outcomes.get('ok', 0):,} ok")
    if totals.unfinished:
        texts.append(f"{totals.unfinished:,} without an end in the trace")
    return ", ".join(texts)


def _failed(count: int) -> str:
    return "no failure" if not count else counted(count, "failure")


def _out_of_memory(count: int) -> str:
    return "never out of memory" if not count else f"{counted(count, 'time')} out of memory"


def _then(out_of_memory: Mapping[str, int]) -> str:
    names = {"again": "tried again", "on the CPU": "then on the CPU", "failed": "failed for good"}
    return _listed({names.get(then, then): count for then, count in out_of_memory.items()}) or "in any call"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _figure(picture: Picture) -> str:
    return (
        f'<figure><img src="{picture.data_uri()}" alt="{escaped(picture.alt)}">'
        f"<figcaption>{escaped(picture.caption)}</figcaption></figure>"
    )
