"""What a run has given: metrics by round, the workers and their leases, from its trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from flower_gpu.launch.leases import Leases, finite_number
from flower_gpu.simulation.events import EVALUATE, SERVER_EVALUATE, PhaseFinished, RunStarted
from flower_gpu.simulation.traced import event_of

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
        ``initial``: the evaluation of the initial model, or None. ``rounds``: one row for each round from 1
        on, see :class:`_Rounds`. ``messages``, ``failed``: how many were sent to clients, and how many of
        them failed. ``workers``: every worker process, in the order of their starts; ``seconds``
        is None for one whose end was not recorded. If there were leases, also for each worker ``gpus`` (what
        it had leased of which GPU, and at most used; empty on the CPU) and ``waited_s`` for them, and
        ``leases`` (the sums); see :class:`flower_gpu.launch.leases.Leases`.
    """
    rounds = _Rounds()
    workers: list[dict[str, Any]] = []
    running: dict[Any, dict[str, Any]] = {}
    leases = Leases()
    for event in events:
        leases.see(event)
        rounds.see(event)
        match event.get("event"):
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
    rows = rounds.rows()
    initial = rows.pop(0) if rows and rows[0]["round"] == 0 else None
    result = {
        "initial": initial,
        "rounds": rows,
        "messages": rounds.messages,
        "failed": rounds.failed,
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


class _Rounds:
    """The rounds of a run: messages, those that failed, metrics, and the seconds since the round before.

    ``metrics`` has the numbers by what they were measured in: ``train`` and ``evaluate`` (what the strategy
    made of the clients' replies) and ``server-evaluate``. Beside it stand the best known ones: of the
    server's evaluation, else of the clients'; None where there is none.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, float | None] = {}
        self._began: float | None = None
        self.messages = self.failed = 0

    def see(self, line: Mapping[str, Any]) -> None:
        """Take a line of the trace."""
        event, time = event_of(line), finite_number(line.get("time"))
        if isinstance(event, RunStarted):
            self._began = time
        elif isinstance(event, PhaseFinished):
            self.messages += event.messages
            self.failed += event.failed
            self._see_part(event, time)

    def _see_part(self, event: PhaseFinished, time: float | None) -> None:
        if isinstance(event.server_round, int):
            row = self._rows.setdefault(event.server_round, {"messages": 0, "failed": 0, "metrics": {}})
            row["messages"] += event.messages
            row["failed"] += event.failed
            numbers = {
                name: finite_number(value)
                for name, value in event.metrics.items()
                if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            }
            if numbers:
                # The same evaluation may be told twice: by itself, and by who sees all that a strategy does.
                row["metrics"].setdefault(event.kind, {}).update(numbers)
            self._ends[event.server_round] = time

    def rows(self) -> list[dict[str, Any]]:
        """Return them in their order."""
        rows, before = [], self._began
        for number, row in sorted(self._rows.items()):
            end, metrics = self._ends[number], row["metrics"]
            known = {**metrics.get(EVALUATE, {}), **metrics.get(SERVER_EVALUATE, {})}
            rows.append(
                {
                    "round": number,
                    **{name: known.get(name) for name in METRICS},
                    "seconds": None if end is None or before is None else round(end - before, 3),
                    **row,
                }
            )
            before = end
        return rows
