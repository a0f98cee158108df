"""What a launched run has given, as views on its history: ``result.json``, and the tables at its end."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from flower_gpu.printable import format_bytes
from flower_gpu.trace import EVALUATE, SERVER_EVALUATE, TRAIN
from flower_gpu.watch.history import History
from flower_gpu.watch.spans import WorkerSpan

METRICS: Final = ("loss", "accuracy", "precision", "recall", "f1")
_SHOWN: Final = ("loss", "accuracy", "f1")  # before the other metrics
_MOST_METRICS: Final = {SERVER_EVALUATE: 3, EVALUATE: 3, TRAIN: 2}  # in the table; result.json has them all
_SHOWN_WAIT_S: Final = 1.0
_MOST_CLIENTS: Final = 20  # with more, the table of leases shows those that waited longest
#: How a call that ran out of GPU memory went on: ``then`` in its event.
_THEN: Final = {"again": "ran again", "on the CPU": "ran on the CPU", "failed": "failed"}


def result_of(history: History) -> dict[str, Any]:
    """Return the result of a run, as docs/reference/launch.md describes ``result.json``."""
    rows = _rounds(history)
    initial = rows.pop(0) if rows and rows[0]["round"] == 0 else None
    leases = [lease for lease in history.leases if lease.granted_at is not None]
    result = {
        "initial": initial,
        "rounds": rows,
        "messages": history.messages_sent,
        "failed": history.messages_failed,
        "workers": [_worker(worker, history, bool(leases)) for worker in history.workers],
    }
    if cores := [lease for lease in history.cores_leases if lease.granted_at is not None]:
        waits = [lease.waited_s for lease in cores]
        result["cores"] = {
            "count": len(waits),
            "waited_s": round(sum(waits), 3),
            "longest_wait_s": max(waits),
        }
    if not leases:
        return result
    waits = [lease.waited_s for lease in leases]
    sums = {
        "count": len(waits),
        "waited_s": round(sum(waits), 3),
        "longest_wait_s": max(waits),
        "out_of_memory": dict(Counter(event.then for event in history.out_of_memory)),
    }
    return {**result, "leases": sums}


def _worker(worker: WorkerSpan, history: History, with_lease: bool) -> dict[str, Any]:
    names = ("pid", "client", "task", "start_method", "seconds")
    found = {name: None if (value := getattr(worker, name)) == "" else value for name in names}
    if not with_lease:
        return found
    lease = history.lease_of(worker)
    memory_bytes = {} if lease is None else lease.memory_bytes
    gpus = [
        {
            "index": history.gpus[uuid].index,
            "uuid": uuid,
            "memory_bytes": leased_bytes,
            "peak_bytes": worker.peak_bytes.get(uuid),
        }
        for uuid, leased_bytes in memory_bytes.items()
    ]
    return {**found, "gpus": gpus, "waited_s": 0.0 if lease is None else lease.waited_s}


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
        if numbers := {name: _finite(value) for name, value in part.told.items() if _is_figure(value)}:
            row["metrics"][part.task] = numbers
        ends[number] = max(part.time, ends.get(number, part.time))
    rows, before = [], history.strategy_started_at
    for number, row in sorted(found.items()):
        known = {**row["metrics"].get(EVALUATE, {}), **row["metrics"].get(SERVER_EVALUATE, {})}
        best = {name: known.get(name) for name in METRICS}
        seconds = None if before is None else round(ends[number] - before, 3)
        rows.append({"round": number, **best, "seconds": seconds, **row})
        before = ends[number]
    return rows


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def print_table(result: Mapping[str, Any]) -> None:
    """Print the metrics of every round, and the leases of every client."""
    rows = [*filter(None, [result["initial"]]), *result["rounds"]]
    columns = _columns(rows)
    names = [name for _, name in columns]
    titles = ["round", *(_title(task, name, names) for task, name in columns), "seconds"]
    cells = []
    for row in rows:
        values = [row["metrics"].get(task, {}).get(name) for task, name in columns]
        cells.append(
            [
                "initial" if row["round"] == 0 else str(row["round"]),
                *("-" if value is None else _number(value) for value in values),
                "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
            ]
        )
    _print_cells(titles, cells)
    if "leases" in result:
        _print_leases(result)
    cores = result.get("cores", {})
    if cores.get("waited_s", 0.0) >= _SHOWN_WAIT_S:
        print(
            f"cores       {cores['count']} calls waited for them for {cores['waited_s']:.1f} s in all, "
            f"{cores['longest_wait_s']:.1f} s at most"
        )


def _print_cells(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, highlight=False).print(table)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Choose what is shown: the first few metrics of the server, of the clients, and of their training."""
    columns = []
    for task, most in _MOST_METRICS.items():
        names = list(dict.fromkeys(name for row in rows for name in row["metrics"].get(task, {})))
        names.sort(key=lambda name: _SHOWN.index(name) if name in _SHOWN else len(_SHOWN))
        columns += [(task, name) for name in names[:most]]
    return columns


def _title(task: str, name: str, names: Sequence[str]) -> str:
    title = {"f1": "F1"}.get(name, name)
    return title if task == SERVER_EVALUATE or names.count(name) == 1 else f"{task} {title}"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _print_leases(result: Mapping[str, Any]) -> None:
    """Print the leases of each client: in the order of their names, the server last."""
    workers: dict[str, list[Mapping[str, Any]]] = {}
    for worker in result["workers"]:
        workers.setdefault(str(worker["client"]), []).append(worker)
    waited_s = {client: sum(one["waited_s"] for one in calls) for client, calls in workers.items()}
    longest = sorted(waited_s, key=lambda client: waited_s[client], reverse=True)[:_MOST_CLIENTS]
    rows = []
    for client in sorted(longest, key=_client_order):
        parts = [part for worker in workers[client] for part in worker["gpus"]]
        peaks = [part["peak_bytes"] for part in parts if part["peak_bytes"]]
        on_cpu = sum(not worker["gpus"] for worker in workers[client])
        rows.append(
            [
                client,
                str(len(workers[client])),
                str(on_cpu or "-"),
                ", ".join(map(str, sorted({part["index"] for part in parts}))) or "-",
                _span([part["memory_bytes"] for part in parts]),
                format_bytes(max(peaks)) if peaks else "-",
                f"{waited_s[client]:.1f}",
            ]
        )
    _print_cells(["client", "calls", "on CPU", "GPU", "lease", "used", "waited s"], rows)
    if len(workers) > len(rows):
        print(f"            {len(workers) - len(rows)} more clients waited less; all are in result.json")
    sums = result["leases"]
    print(
        f"leases      {sums['count']}, waited for {sums['waited_s']:.1f} s in all, "
        f"{sums['longest_wait_s']:.1f} s at most"
    )
    if counts := sums["out_of_memory"]:
        follows = ", ".join(f"{count} {_THEN.get(then, then)}" for then, count in counts.items())
        print(f"memory      ran out {sum(counts.values())} times: {follows}")


def _span(sizes: Sequence[int]) -> str:
    """Write sizes as one text: the smallest and the largest, where they differ as they are shown."""
    if not sizes:
        return "-"
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    return least if least == most else f"{least} to {most}"


def _client_order(name: str) -> tuple[int, int, str]:
    if name.isdecimal():
        return (0, int(name), name)
    return (2 if name == "server" else 1, 0, name)
