"""What a run has given: metrics by round, the workers and their leases, from its trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from flower_gpu.launch.leases import Leases, finite_number

METRICS: Final = ("loss", "accuracy", "precision", "recall", "f1")
_WORKER_FIELDS: Final = ("pid", "client", "task", "start_method", "seconds")


def build_result(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up a trace.

    Parameters
    ----------
    events : iterable of mapping
        Events of a run, oldest first.

    Returns
    -------
    dict
        ``initial``: metrics of the initial model, or None. ``rounds``: round, metrics (None where the app
        reports none) and the seconds since the round before, for rounds 1 and up. ``workers``: every worker
        process, in the order of their starts; ``seconds`` is None for one whose end was not recorded. If
        there were leases, also for each worker ``gpus`` (what it had leased of which GPU, and at most used;
        empty on the CPU) and ``waited_s`` for them, and ``leases`` (the sums); see
        :class:`flower_gpu.launch.leases.Leases`.
    """
    rounds: dict[int, dict[str, Any]] = {}
    workers: list[dict[str, Any]] = []
    running: dict[Any, dict[str, Any]] = {}
    last_time: float | None = None
    leases = Leases()
    for event in events:
        leases.see(event)
        match event.get("event"):
            case "round":
                row = round_row(event, last_time)
                last_time = finite_number(event.get("time"))
                if row is not None:
                    rounds[row["round"]] = row
            case "worker_started":
                worker = _worker(event, leases)
                running[event.get("pid")] = worker
                workers.append(worker)
            case "worker_finished":
                worker = _worker(event, leases)
                started = running.pop(event.get("pid"), None)
                if started is None:
                    workers.append(worker)
                else:
                    started.update(worker)
            case _:
                pass
    initial = rounds.pop(0, None)
    result = {
        "initial": initial,
        "rounds": [rounds[number] for number in sorted(rounds)],
        "workers": workers,
    }
    if not leases.were_there:
        return result
    for worker in workers:  # those before the first lease, too
        worker.setdefault("gpus", [])
        worker.setdefault("waited_s", 0.0)
    return {**result, "leases": leases.summary()}


def _worker(event: Mapping[str, Any], leases: Leases) -> dict[str, Any]:
    return {**{field: event.get(field) for field in _WORKER_FIELDS}, **leases.of_worker(event)}


def round_row(event: Mapping[str, Any], previous_time: float | None) -> dict[str, Any] | None:
    """Turn a ``round`` event into a row of the result; None if it names no round."""
    number = event.get("round")
    if not isinstance(number, int):
        return None
    metrics = event.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    time = finite_number(event.get("time"))
    seconds = None if time is None or previous_time is None else round(time - previous_time, 3)
    return {
        "round": number,
        **{name: finite_number(metrics.get(name)) for name in METRICS},
        "seconds": seconds,
    }
