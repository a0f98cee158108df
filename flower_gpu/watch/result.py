"""Writes the results of a run: ``result.json``, ``metrics.csv``, and the summary printed at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.apps.failures import outcome_text
from flower_gpu.apps.folder import RunFolder, write_json
from flower_gpu.printable import and_others, duration_text
from flower_gpu.trace import EVALUATE, SERVER_EVALUATE
from flower_gpu.watch.fields import client_key, metrics_text
from flower_gpu.watch.folds.rounds import RoundPart
from flower_gpu.watch.folds.tally import LeaseCounts
from flower_gpu.watch.history import History
from flower_gpu.watch.metrics_table import MetricsTable
from flower_gpu.watch.trackers import tracking

# Limits for the summary.
_MAX_REASONS: Final = 10
_MAX_CLIENTS: Final = 5  # for each reason
_MAX_HOSTS: Final = 8
_MAX_ROUNDS: Final = 5  # for each reason
_MAX_METRICS: Final = 8  # for each task
_MAX_REASON_CHARACTERS: Final = 240
_ELLIPSIS: Final = " ... "
# Shorter waits for cores and main memory are not shown.
_MIN_SHOWN_WAIT_S: Final = 1.0
#: Texts for the reaction to a call that ran out of GPU memory, by ``then`` in its event.
THEN: Final = {"again": "ran again", "on the CPU": "ran on the CPU", "failed": "failed"}
#: Metrics that each row of a round contains directly, in addition to the metrics by task.
METRICS: Final = ("loss", "accuracy", "precision", "recall", "f1")


def write_results(folder: RunFolder, parts: Sequence[RoundPart], result: Mapping[str, Any]) -> None:
    """Write the files of a finished run."""
    MetricsTable(folder).write(parts)
    write_json(folder.result, result)


def result_of(history: History, client_of: Callable[[int], Any] = lambda node: node) -> dict[str, Any]:
    """Return the content of ``result.json``, as described in docs/reference/result.md.

    ``client_of``: function that returns the client of a node id. It is used if the trace contains node ids
    instead of clients.
    """
    rows = _rounds(history)
    initial = rows.pop(0) if rows and rows[0]["round"] == 0 else None
    messages, failed = history.rounds.messages_sent, history.rounds.messages_failed
    reasons, tally = history.rounds.failures, history.tally
    result = {
        "kind": history.run.kind,
        "app": history.run.name,
        "outcome": outcome_text(history.run.outcome, failed, messages),
        "error": history.run.error or None,
        "strategy": history.rounds.strategy,
        "rounds_finished": history.rounds.highest_round,
        "num_rounds": history.rounds.num_rounds,
        "resumed_after_round": history.rounds.resumed_round,
        "clients": history.run.clients,
        "messages": messages,
        "failed": failed,
        "failures": [
            {
                "reason": reason,
                "count": count,
                "messages": [
                    {**message, "client": _client(message, client_of)} for message in reasons.named[reason]
                ],
            }
            for reason, count in reasons.counts.most_common()
        ],
        "seconds": _rounded(history.run.seconds),
        "messages_per_s": _rounded(history.rounds.messages_per_s),
        "waited_s": _rounded(history.run.waited_s),
        "cut_lines": history.cut_lines,
        "workers_started": tally.workers_started,
        "calls_by_use": {
            name: {
                "count": tally.calls_by_use[is_used, False] + tally.calls_by_use[is_used, True],
                "failed": tally.calls_by_use[is_used, True],
            }
            for name, is_used in (("new", False), ("used", True))
        },
        "leases": {**_waits(tally.leases), "out_of_memory": dict(tally.out_of_memory)},
        "cores": _waits(tally.cores),
        "model": None,
        "model_sha256": None,
        **history.run.facts,
        "metrics": history.rounds.last_metrics,
        "not_finite": _not_finite(history.rounds.last_metrics),
        "initial": initial,
        "rounds": rows,
        "settings": history.run.settings,
    }
    plain: dict[str, Any] = _plain(result)
    return plain


def _client(message: Mapping[str, Any], client_of: Callable[[int], Any]) -> Any:
    node = message["client"]
    return client_of(node) if type(node) is int else node


def _waits(counts: LeaseCounts) -> dict[str, Any]:
    waits = {"waited_s": counts.waited_s, "longest_wait_s": counts.longest_wait_s}
    return {"count": counts.granted, **{name: _rounded(seconds) for name, seconds in waits.items()}}


def _rounds(history: History) -> list[dict[str, Any]]:
    """Return a row for each round, with the seconds since the previous round.

    ``metrics`` contains the numbers by task. The row also has a value for each name in ``METRICS``: from the
    evaluation on the server if available, otherwise from the clients, or None.
    """
    rows_by_round: dict[int, dict[str, Any]] = {}
    ends: dict[int, float] = {}  # by round
    for part in history.rounds.numbered_parts:
        number = part.round or 0
        row = rows_by_round.setdefault(number, {"messages": 0, "failed": 0, "metrics": {}})
        row["messages"] += part.messages
        row["failed"] += part.failed
        if numbers := {name: value for name, value in part.reported_metrics.items() if _is_figure(value)}:
            row["metrics"][part.task] = numbers
        ends[number] = max(part.time, ends.get(number, part.time))
    rows, previous_end = [], history.rounds.strategy_started_at
    for number, row in sorted(rows_by_round.items()):
        evaluated = {**row["metrics"].get(EVALUATE, {}), **row["metrics"].get(SERVER_EVALUATE, {})}
        main_metrics = {name: evaluated.get(name) for name in METRICS}
        seconds = None if previous_end is None else _rounded(ends[number] - previous_end)
        rows.append({"round": number, **main_metrics, "seconds": seconds, **row})
        previous_end = ends[number]
    return rows


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _not_finite(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return NaN and infinite metrics by task as texts, because JSON has no numbers for them."""
    texts_by_task = {
        task: {name: trace.spelled(value) for name, value in values.items() if _is_not_finite(value)}
        for task, values in metrics.items()
    }
    return {task: texts for task, texts in texts_by_task.items() if texts}


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON supports. NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if _is_not_finite(value) else value


# The summary


def result_lines(
    result: Mapping[str, Any], more: Sequence[tuple[str, str]] = (), places: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Return the lines of a run's summary.

    ``more``: further rows of the table.
    ``places``: rows with the locations of the results. They come last, because only the end of a long list of
    failures stays visible on a terminal.
    """
    of = f" of {result['num_rounds']}" if result["num_rounds"] else ""
    rate, leases, cores = result["messages_per_s"], result["leases"], result["cores"]
    rows = [
        ("outcome", result["outcome"]),
        ("rounds", f"{result['rounds_finished']}{of}"),
        ("clients", f"{result['clients']}, {result['messages']} messages, {result['failed']} failed"),
        ("time", duration_text(result["seconds"] or 0.0) + (f", {rate:.3g} messages/s" if rate else "")),
    ]
    if result["waited_s"]:
        rows.append(("waiting", f"{duration_text(result['waited_s'])} of that without any worker"))
    if result.get("hosts"):
        rows.append(("hosts", _hosts_text(result["hosts"])))
    if result["workers_started"]:
        text = f"{result['workers_started']} started"
        if result.get("peak_worker_bytes"):
            text += f", with {result['peak_worker_bytes'] / 2**20:.0f} MiB at most"
        if result.get("worker_ready_s"):
            text += f"; each took {duration_text(result['worker_ready_s'])} {result['worker_ready']} (median)"
        rows.append(("workers", text))
    if leases["count"]:
        rows.append(("leases", _waits_text(leases)))
    if counts := leases["out_of_memory"]:
        follows = ", ".join(f"{count} {THEN.get(then, then)}" for then, count in counts.items())
        rows.append(("memory", f"ran out {sum(counts.values())} times: {follows}"))
    if cores["waited_s"] >= _MIN_SHOWN_WAIT_S:
        rows.append(("cores, memory", _waits_text(cores)))
    not_finite = result.get("not_finite") or {}
    for kind, metrics in result["metrics"].items():
        numbers = {name: float(text) for name, text in not_finite.get(kind, {}).items()}
        if text := metrics_text({**metrics, **numbers}, _MAX_METRICS):
            rows.append((kind, text))
    if sha256 := result["model_sha256"]:
        rows.append(("model sha256", sha256))
    rows += more
    width = max(len(name) for name, _ in [*rows, *places])
    table, ends = ([f"{name:{width}}  {text}" for name, text in part] for part in (rows, places))
    return [*table, *_failures(result), *ends]


def places_of(folder: RunFolder) -> list[tuple[str, str]]:
    """Return the rows with the locations of a run's results, for the end of its summary."""
    trackers = [("tracker", line) for line in tracking.locations(folder.path)]
    return [*trackers, ("results", folder.shown), ("report", f"flower-gpu report {folder.shown}")]


def _waits_text(counts: Mapping[str, Any]) -> str:
    waits = f"{duration_text(counts['waited_s'])} in all, {duration_text(counts['longest_wait_s'])} at most"
    return f"{counts['count']}, waited for {waits}"


def _hosts_text(hosts: Sequence[Mapping[str, Any]]) -> str:
    lost = sum(host["is_lost"] for host in hosts)
    first = ", ".join(f"{host['host']} {host['messages']}" for host in hosts[:_MAX_HOSTS])
    more = f" and {len(hosts) - _MAX_HOSTS} more" if len(hosts) > _MAX_HOSTS else ""
    return f"{len(hosts)}{f', {lost} lost' if lost else ''}; messages: {first}{more}"


def _without_middle(text: str) -> str:
    """Return a reason as a single line. The middle of a long reason is left out.

    The end is kept, because many errors name the actual problem there.
    """
    text = " ".join(text.split())
    if len(text) <= _MAX_REASON_CHARACTERS:
        return text
    half = (_MAX_REASON_CHARACTERS - len(_ELLIPSIS)) // 2
    return f"{text[:half].rstrip()}{_ELLIPSIS}{text[-half:].lstrip()}"


def _failures(result: Mapping[str, Any]) -> list[str]:
    """Return a line with clients and rounds for each reason of failures."""
    reasons = result["failures"][:_MAX_REASONS]
    lines = []
    for reason in reasons:
        messages = reason["messages"]
        unsorted_clients = {str(message["client"]) for message in messages if message["client"] is not None}
        clients = sorted(unsorted_clients, key=client_key)
        kinds = " and ".join(dict.fromkeys(message["type"] for message in messages))
        rounds = [str(number) for message in messages if (number := message["round"]) is not None]
        in_rounds = f" in {_listed('round', list(dict.fromkeys(rounds)), _MAX_ROUNDS)}" if rounds else ""
        count = f" ({reason['count']} messages)" if reason["count"] > len(clients) else ""
        text = _without_middle(reason["reason"]) or "no reason given"
        who = _listed("client", clients, _MAX_CLIENTS)
        lines.append(f"  {who}, {kinds}{in_rounds}{count}: {text}")
    if more := result["failed"] - sum(reason["count"] for reason in reasons):
        lines.append(f"  and {more} more failed messages")
    return ["failed:", *lines] if lines else []


def _listed(noun: str, names: Sequence[str], limit: int) -> str:
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:limit])}{and_others(len(names) - limit)}"
