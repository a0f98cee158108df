"""The summary of a simulated run, as ``summary.json`` and as the lines at its end: views on its history."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Final

from flower_gpu.apps.failures import outcome_text
from flower_gpu.printable import duration_text
from flower_gpu.watch.fields import metrics_text
from flower_gpu.watch.history import History

_MOST_FAILURES: Final = 10
_MOST_ROUNDS: Final = 5
_MOST_METRICS: Final = 8
_REASON_CHARACTERS: Final = 120


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
    failed, messages = history.failures.count, history.messages_sent
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
            {"reason": reason, "count": found.count, "messages": found.named}
            for reason, found in history.failures.items()
        ],
        "seconds": round(seconds, 3),  # of this process: a resumed run has had more
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
    if summary.get("workers_started"):
        text = f"{summary['workers_started']} started"
        if summary.get("peak_worker_bytes"):
            text += f", with {summary['peak_worker_bytes'] / 2**20:.0f} MiB at most"
        rows.append(("workers", text))
    if compared := summary.get("recycling"):
        different = ", ".join(compared["different_clients"])
        rows.append(
            (
                "recycling",
                f"{compared['compared']} messages compared with new workers: "
                + (f"other weights for clients {different}" if different else "the same weights"),
            )
        )
    for kind, metrics in summary["metrics"].items():
        if text := metrics_text(metrics, _MOST_METRICS):
            rows.append((kind, text))
    if where is not None:
        rows.append(("results", where))
    width = max(len(name) for name, _ in rows)
    return [*(f"{name:{width}}  {text}" for name, text in rows), *_failures(summary)]


def _failures(summary: Mapping[str, Any]) -> list[str]:
    by_client: dict[tuple[Any, str], list[Mapping[str, Any]]] = {}
    for reason in summary["failures"]:
        for message in reason["messages"]:
            by_client.setdefault((message["client"], reason["reason"]), []).append(message)
    lines = []
    named = 0
    rows = sorted(by_client.items(), key=lambda row: (row[0][0] is None, row[0]))
    for (client, reason), messages in rows[:_MOST_FAILURES]:
        named += len(messages)
        kinds = " and ".join(dict.fromkeys(message["type"] for message in messages))
        rounds = _in_rounds([message["round"] for message in messages])
        text = textwrap.shorten(reason, _REASON_CHARACTERS, placeholder=" ...") or "no reason given"
        lines.append(f"  client {client}, {kinds}{rounds}: {text}")
    if summary["failed"] > named:
        lines.append(f"  and {summary['failed'] - named} more failed messages")
    return ["failed:", *lines] if lines else []


def _in_rounds(rounds: list[Any]) -> str:
    numbers = [str(number) for number in dict.fromkeys(rounds) if number is not None]
    if not numbers:
        return ""
    more = f" and {len(numbers) - _MOST_ROUNDS} more" if len(numbers) > _MOST_ROUNDS else ""
    return f" in round{'s' * (len(numbers) > 1)} {', '.join(numbers[:_MOST_ROUNDS])}{more}"
