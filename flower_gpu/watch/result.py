"""What came of a run: ``result.json`` and ``metrics.csv`` in its folder, and the lines at its end."""

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
from flower_gpu.watch.history import History
from flower_gpu.watch.metrics_table import MetricsTable
from flower_gpu.watch.spans import LeaseCounts, RoundPart
from flower_gpu.watch.trackers import tracking

_MOST_FAILURES: Final = 10  # reasons
_MOST_CLIENTS: Final = 5  # of one reason
_MOST_HOSTS: Final = 8
_MOST_ROUNDS: Final = 5
_MOST_METRICS: Final = 8
_REASON_CHARACTERS: Final = 240
_LEFT_OUT: Final = " ... "
_SHOWN_WAIT_S: Final = 1.0
#: How a call that ran out of GPU memory went on: ``then`` in its event.
THEN: Final = {"again": "ran again", "on the CPU": "ran on the CPU", "failed": "failed"}
#: Metrics that each round has beside those by task.
METRICS: Final = ("loss", "accuracy", "precision", "recall", "f1")


def write_results(folder: RunFolder, parts: Sequence[RoundPart], result: Mapping[str, Any]) -> None:
    """Write the files of a run that is over."""
    MetricsTable(folder).write(parts)
    write_json(folder.result, result)


def result_of(history: History, client_of: Callable[[int], Any] = lambda node: node) -> dict[str, Any]:
    """Return the result of a run, as docs/reference/result.md describes ``result.json``.

    ``client_of`` returns the client of a node, where replies in the trace name nodes.
    """
    rows = _rounds(history)
    initial = rows.pop(0) if rows and rows[0]["round"] == 0 else None
    messages, failed = history.messages_sent, history.messages_failed
    reasons, tally = history.failures, history.tally
    result = {
        "kind": history.kind,
        "app": history.name,
        "outcome": outcome_text(history.outcome, failed, messages),
        "error": history.error or None,
        "strategy": history.strategy,
        "rounds_finished": history.highest_round,
        "num_rounds": history.num_rounds,
        "resumed_after_round": history.resumed_round,
        "clients": history.clients,
        "messages": messages,
        "failed": failed,
        "failures": [
            {
                "reason": reason,
                "count": count,
                "messages": [{**one, "client": _client(one, client_of)} for one in reasons.named[reason]],
            }
            for reason, count in reasons.counts.most_common()
        ],
        "seconds": _rounded(history.seconds),
        "messages_per_s": _rounded(history.messages_per_s),
        "waited_s": _rounded(history.waited_s),
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
        **history.facts,
        "metrics": history.last_metrics,
        "not_finite": _not_finite(history.last_metrics),
        "initial": initial,
        "rounds": rows,
        "settings": history.settings,
    }
    found: dict[str, Any] = _plain(result)
    return found


def _client(message: Mapping[str, Any], client_of: Callable[[int], Any]) -> Any:
    node = message["client"]
    return client_of(node) if type(node) is int else node


def _waits(counts: LeaseCounts) -> dict[str, Any]:
    waits = {"waited_s": counts.waited_s, "longest_wait_s": counts.longest_wait_s}
    return {"count": counts.granted, **{name: _rounded(seconds) for name, seconds in waits.items()}}


def _rounds(history: History) -> list[dict[str, Any]]:
    """Return a row for each round, with the seconds since the round before.

    ``metrics`` has the numbers by task. Beside it stand the best known ones: of the server's evaluation, else
    of the clients'; None where there is none.
    """
    found: dict[int, dict[str, Any]] = {}
    ends: dict[int, float] = {}
    for part in history.evaluations:
        row = found.setdefault(number := part.round or 0, {"messages": 0, "failed": 0, "metrics": {}})
        row["messages"] += part.messages
        row["failed"] += part.failed
        if numbers := {name: value for name, value in part.told.items() if _is_figure(value)}:
            row["metrics"][part.task] = numbers
        ends[number] = max(part.time, ends.get(number, part.time))
    rows, before = [], history.strategy_started_at
    for number, row in sorted(found.items()):
        known = {**row["metrics"].get(EVALUATE, {}), **row["metrics"].get(SERVER_EVALUATE, {})}
        best = {name: known.get(name) for name in METRICS}
        seconds = None if before is None else _rounded(ends[number] - before)
        rows.append({"round": number, **best, "seconds": seconds, **row})
        before = ends[number]
    return rows


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _not_finite(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each task that JSON has no number for, as texts."""
    found = {
        task: {name: trace.spelled(value) for name, value in told.items() if _is_not_finite(value)}
        for task, told in metrics.items()
    }
    return {task: texts for task, texts in found.items() if texts}


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are none become null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if _is_not_finite(value) else value


# For people


def result_lines(
    result: Mapping[str, Any], more: Sequence[tuple[str, str]] = (), places: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Return the summary of a run, line by line.

    ``more``: further rows of the table. ``places``: rows that say where the results are. They come last,
    because the end of a long list of failures is what stays in sight.
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
    if cores["waited_s"] >= _SHOWN_WAIT_S:
        rows.append(("cores", _waits_text(cores)))
    not_finite = result.get("not_finite") or {}
    for kind, metrics in result["metrics"].items():
        numbers = {name: float(text) for name, text in not_finite.get(kind, {}).items()}
        if text := metrics_text({**metrics, **numbers}, _MOST_METRICS):
            rows.append((kind, text))
    if sha256 := result["model_sha256"]:
        rows.append(("model sha256", sha256))
    rows += more
    width = max(len(name) for name, _ in [*rows, *places])
    table, ends = ([f"{name:{width}}  {text}" for name, text in part] for part in (rows, places))
    return [*table, *_failures(result), *ends]


def places_of(folder: RunFolder) -> list[tuple[str, str]]:
    """Return rows that say where the results of a run are, for the end of its summary."""
    trackers = [("tracker", line) for line in tracking.where(folder.path)]
    return [*trackers, ("results", folder.shown), ("report", f"flower-gpu report {folder.shown}")]


def _waits_text(counts: Mapping[str, Any]) -> str:
    waits = f"{duration_text(counts['waited_s'])} in all, {duration_text(counts['longest_wait_s'])} at most"
    return f"{counts['count']}, waited for {waits}"


def _hosts_text(hosts: Sequence[Mapping[str, Any]]) -> str:
    lost = sum(host["is_lost"] for host in hosts)
    most = ", ".join(f"{host['host']} {host['messages']}" for host in hosts[:_MOST_HOSTS])
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return f"{len(hosts)}{f', {lost} lost' if lost else ''}; messages: {most}{more}"


def _without_middle(text: str) -> str:
    """Return a reason in one line, of a long one the head and the tail: many end with what is wrong."""
    text = " ".join(text.split())
    if len(text) <= _REASON_CHARACTERS:
        return text
    half = (_REASON_CHARACTERS - len(_LEFT_OUT)) // 2
    return f"{text[:half].rstrip()}{_LEFT_OUT}{text[-half:].lstrip()}"


def _failures(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason, with the clients."""
    reasons = result["failures"][:_MOST_FAILURES]
    lines = []
    for reason in reasons:
        messages = reason["messages"]
        told = {str(message["client"]) for message in messages if message["client"] is not None}
        clients = sorted(told, key=client_key)
        kinds = " and ".join(dict.fromkeys(message["type"] for message in messages))
        rounds = [str(number) for message in messages if (number := message["round"]) is not None]
        in_rounds = f" in {_listed('round', list(dict.fromkeys(rounds)), _MOST_ROUNDS)}" if rounds else ""
        count = f" ({reason['count']} messages)" if reason["count"] > len(clients) else ""
        text = _without_middle(reason["reason"]) or "no reason given"
        who = _listed("client", clients, _MOST_CLIENTS)
        lines.append(f"  {who}, {kinds}{in_rounds}{count}: {text}")
    if more := result["failed"] - sum(reason["count"] for reason in reasons):
        lines.append(f"  and {more} more failed messages")
    return ["failed:", *lines] if lines else []


def _listed(noun: str, names: Sequence[str], most: int) -> str:
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:most])}{and_others(len(names) - most)}"
