"""What the traces of runs add up to. How much is kept does not depend on how long runs are."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from flower_gpu.monitor.fields import number, text, whole

#: How a worker can end, as the trace says it; anything else is counted as ``OTHER``.
OUTCOMES: Final = ("ok", "error", "out of memory", "died", "timeout", "cancelled")
#: What can follow when a call runs out of GPU memory.
THEN: Final = ("again", "on the CPU", "failed")
OTHER: Final = "other"
#: Upper limits, in seconds, of what waits for leases are counted in.
WAIT_BUCKETS_S: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)

STARTING, RUNNING, EXITING = "starting", "running", "exiting"
PHASES: Final = (STARTING, RUNNING, EXITING)

# What a run can have of each, so that no trace makes this process grow: the oldest ones go.
_MOST_WORKERS: Final = 10_000
_MOST_EVALUATIONS: Final = 20
_MOST_METRICS: Final = 100
_MOST_COUNTED: Final = 2**53  # what a float, as metrics are, still tells from the next number


class Waits:
    """How long calls have waited for leases, counted in buckets."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(WAIT_BUCKETS_S) + 1)

    def add(self, seconds: float) -> None:
        """Count one."""
        self.sum_s += seconds
        self._counts[bisect_left(WAIT_BUCKETS_S, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return for each upper limit how many waits were not longer."""
        found, so_far = [], 0
        for limit, count in zip((*map(str, WAIT_BUCKETS_S), "+Inf"), self._counts, strict=True):
            so_far += count
            found.append((limit, float(so_far)))
        return found


@dataclass
class Totals:
    """What happened since this process looks at traces, and in them before. Never less than it was.

    Attributes
    ----------
    started, granted, not_granted, rounds : int
        Workers started, leases granted, requests that ended without a lease, rounds finished.
    finished : Counter
        Workers, by outcome.
    out_of_memory : Counter
        Calls that ran out of GPU memory, by what followed.
    waits : Waits
        Of those that got a lease.
    """

    started: int = 0
    granted: int = 0
    not_granted: int = 0
    rounds: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    out_of_memory: Counter[str] = field(default_factory=Counter)
    waits: Waits = field(default_factory=Waits)


@dataclass
class OpenWorker:
    """A worker that has not ended, as far as the trace tells."""

    client: str
    pid: int
    phase: str


@dataclass
class RunCounts:
    """One run: what goes on in it now, and its events counted into what all runs have in common.

    Parameters
    ----------
    totals : Totals
        What all runs are counted into.
    highest_round : int
        The last round that was counted. Those of a run that is resumed, and does it again, are not.

    Attributes
    ----------
    started_at : float or None
        When it began, in Unix seconds.
    host : str
        Where it runs; empty while that is not known.
    current_round, num_rounds : int or None
        The highest round that anything is of; how many there will be.
    workers : dict of (str, int) to OpenWorker
        Those that have not ended, by call and pid.
    evaluations : dict of str to (int or None, dict)
        By task the round of the last evaluation, where it has one, and its metrics: finite numbers only.
    """

    totals: Totals
    highest_round: int = 0
    started_at: float | None = None
    host: str = ""
    current_round: int | None = None
    num_rounds: int | None = None
    workers: dict[tuple[str, int], OpenWorker] = field(default_factory=dict)
    evaluations: dict[str, tuple[int | None, dict[str, float]]] = field(default_factory=dict)

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take in one event; what is not understood is left out."""
        match event.get("event"):
            case "run_started":
                self._on_run_started(event)
            case "strategy_started":
                self.num_rounds = _count(event, "num_rounds") or self.num_rounds
            case "round_started":
                self._see_round(event)
            case "round_finished":
                self._on_round(event, text(event.get("task")))
            case "round":
                self.num_rounds = _count(event, "num_rounds") or self.num_rounds
                self._on_round(event, "server-evaluate")
            case "lease_granted":
                self.totals.granted += 1
                self.totals.waits.add(max(0.0, number(event.get("waited_s")) or 0.0))
            case "lease_not_granted":
                self.totals.not_granted += 1
            case "out_of_memory":
                self.totals.out_of_memory[_one_of(THEN, event.get("then"))] += 1
            case "worker_started":
                self._on_worker_started(event)
            case "worker_finished":
                self.workers.pop(_key(event), None)
                self.totals.finished[_one_of(OUTCOMES, event.get("outcome"))] += 1
            case "task_started" | "cuda_started" | "progress":
                self._set_phase(event, RUNNING)
            case "worker_result":
                self._set_phase(event, EXITING)
            case _:
                pass

    def phases(self) -> Counter[tuple[str, str]]:
        """Count the workers that have not ended, by phase and client."""
        return Counter((worker.phase, worker.client) for worker in self.workers.values())

    def _on_run_started(self, event: Mapping[str, Any]) -> None:
        self.started_at = self.started_at or number(event.get("time"))
        self.host = text(event.get("host"))
        self.num_rounds = _count(event, "num_rounds") or self.num_rounds
        self.workers.clear()  # of one that is resumed: those of before are gone

    def _on_worker_started(self, event: Mapping[str, Any]) -> None:
        self.totals.started += 1
        self._see_round(event)
        # A zygote's worker tells when its task began only at its end; it takes milliseconds.
        phase = RUNNING if event.get("start_method") == "zygote" else STARTING
        key = _key(event)
        self.workers[key] = OpenWorker(text(event.get("client")), key[1], phase)
        if len(self.workers) > _MOST_WORKERS:
            del self.workers[next(iter(self.workers))]

    def _set_phase(self, event: Mapping[str, Any], phase: str) -> None:
        worker = self.workers.get(_key(event))
        if worker is not None and worker.phase != EXITING:
            worker.phase = phase

    def _on_round(self, event: Mapping[str, Any], task: str) -> None:
        self._see_round(event)
        found = _count(event, "round")
        if found is not None and found > self.highest_round:
            self.highest_round = found
            self.totals.rounds += 1
        self._evaluated(found, task, event.get("metrics"))

    def _evaluated(self, server_round: int | None, task: str, metrics: object) -> None:
        known = {
            name: value
            for name, told in (metrics.items() if isinstance(metrics, Mapping) else ())
            if isinstance(name, str) and (value := number(told)) is not None
        }
        if not known:
            return
        # What a strategy and a simulation tell of the same evaluation is put together.
        before_round, before = self.evaluations.pop(task, (server_round, {}))
        merged = {**(before if before_round == server_round else {}), **known}
        self.evaluations[task] = server_round, dict(islice(merged.items(), _MOST_METRICS))
        if len(self.evaluations) > _MOST_EVALUATIONS:
            del self.evaluations[next(iter(self.evaluations))]

    def _see_round(self, event: Mapping[str, Any]) -> None:
        found = _count(event, "round")
        if found is not None:
            self.current_round = max(self.current_round or 0, found)


def _one_of(known: tuple[str, ...], value: object) -> str:
    return value if isinstance(value, str) and value in known else OTHER


def _count(event: Mapping[str, Any], name: str) -> int | None:
    found = whole(event.get(name))
    return found if found is not None and 0 <= found < _MOST_COUNTED else None


def _key(event: Mapping[str, Any]) -> tuple[str, int]:
    return text(event.get("call")), whole(event.get("pid")) or 0
