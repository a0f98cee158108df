"""Makes metrics of what is to be seen at the moment somebody asks for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import flower_gpu
from flower_gpu.printable import printable
from flower_gpu.watch import tally
from flower_gpu.watch.followed_run import FollowedRun
from flower_gpu.watch.metrics.host import Host, HostState
from flower_gpu.watch.metrics.runs import Runs
from flower_gpu.watch.metrics.table import METRICS
from flower_gpu.watch.spans import EXITING, RUNNING, STARTING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_KINDS: Final = ("launch", "simulate", "supernodes")
_PHASES: Final = (STARTING, RUNNING, EXITING)
_LONGEST_LABEL: Final = 200
_MOST_METRICS: Final = 100  # of a task
_BUSY_S: Final = 30.0  # longer than anybody waits for an answer


class BusyError(Exception):
    """An earlier look goes on and on."""


class Collector:
    """The object that :mod:`prometheus_client` asks for metrics, as its ``registry.Collector`` says."""

    def __init__(self, host: Host, runs: Runs, *, per_client: bool = False) -> None:
        self._host = host
        self._runs = runs
        self._more_labels = ("client",) if per_client else ()  # of workers
        self._lock = threading.Lock()

    def describe(self) -> Iterator[Metric]:
        """Yield all metrics without samples; the registry asks this to know their names."""
        yield from _Families(self._more_labels).families.values()

    def collect(self) -> Iterator[Metric]:
        """Look, and yield all metrics.

        Raises
        ------
        BusyError
            If a driver that does not answer holds up an earlier look.
        """
        if not self._lock.acquire(timeout=_BUSY_S):
            raise BusyError("an earlier look at the GPUs goes on: does nvidia-smi answer?")
        try:
            found = _Families(self._more_labels)
            _add_host(found, self._host.look())
            _add_runs(found, self._runs.look(), per_client=bool(self._more_labels))
            _add_tally(found, self._runs.tally)
        finally:
            self._lock.release()
        yield from found.families.values()

    def catch_up(self) -> None:
        """Read what the traces of runs have so far, which may take longer than a client of HTTP waits."""
        with self._lock:
            self._runs.look()

    def notice(self) -> None:
        """Remember the runs that there are, for a later look."""
        with self._lock:
            self._runs.notice()


class _Families:
    """All metrics, that samples are added to."""

    def __init__(self, more_labels: tuple[str, ...]) -> None:
        self.families: dict[str, Any] = {
            name: row.family(more_labels=more_labels if name == "workers" else ())
            for name, row in METRICS.items()
        }
        self._seen: set[tuple[str, ...]] = set()

    def add(self, name: str, value: float | None, *labels: object) -> None:
        """Add a sample, unless it has no value, or there is one with these labels: two are not allowed."""
        values = [printable(str(label))[:_LONGEST_LABEL] for label in labels]
        key = (name, *values)
        if value is not None and key not in self._seen:
            self._seen.add(key)
            self.families[name].add_metric(values, value)


def _add_host(found: _Families, state: HostState) -> None:
    leases = state.leases
    found.add("build_info", 1, flower_gpu.__version__)
    found.add("gpus", sum(gpu.is_usable for gpu in state.gpus))
    found.add("ledger_up", int(leases is not None))
    capacity: dict[str, int] = {}
    if leases is not None:
        found.add("leases_held", len(leases.holders))
        found.add("leases_waiting", len(leases.waiting))
        capacity = {card.uuid: card.capacity_bytes for card in leases.cards}
    in_parts = {gpu.mig_parent for gpu in state.gpus}
    for gpu in state.gpus:
        labels = gpu.index, gpu.uuid, gpu.name
        percent = gpu.utilization_percent
        leased = leases.leased_bytes(gpu.uuid) if leases is not None and gpu.uuid else None
        found.add("usable", None if gpu.uuid in in_parts else int(gpu.is_usable), *labels)
        found.add("memory_used_bytes", gpu.used_bytes, *labels)
        found.add("memory_total_bytes", gpu.total_bytes, *labels)
        found.add("memory_capacity_bytes", capacity.get(gpu.uuid), *labels)
        found.add("memory_leased_bytes", leased, *labels)
        found.add("utilization_ratio", None if percent is None else percent / 100, *labels)
        found.add("temperature_celsius", state.celsius.get(gpu.uuid), *labels)


def _add_runs(found: _Families, runs: Iterable[FollowedRun], *, per_client: bool) -> None:
    kinds = Counter(dict.fromkeys(_KINDS, 0))
    for followed in runs:
        label, run, history = followed.label, followed.run, followed.history
        kind, name = (run.kind, run.name) if run else ("", "")
        kinds[kind] += followed.is_registered
        found.add("run_info", 1, label, kind, name)
        found.add("run_start_time_seconds", history.started_at, label)
        found.add("run_round", history.current_round, label)
        found.add("run_rounds", history.num_rounds, label)
        # With a killed run go its workers, whose ends nobody has written down.
        workers = followed.workers() if followed.is_registered else []
        if per_client:
            for (phase, client), count in Counter((one.phase, one.client) for one in workers).items():
                found.add("workers", count, label, phase, client)
        else:
            for phase in _PHASES:
                found.add("workers", sum(one.phase == phase for one in workers), label, phase)
        told = sorted((one for one in history.evaluations if one.metrics), key=lambda one: one.time)
        for task, evaluation in {one.task: one for one in told}.items():
            found.add("evaluation_round", evaluation.round, label, task)
            for metric, value in islice(evaluation.metrics.items(), _MOST_METRICS):
                found.add("evaluation", value, label, task, metric)
    for kind, count in kinds.items():
        found.add("runs", count, kind)


def _add_tally(found: _Families, counts: tally.Tally) -> None:
    for name in ("workers_started", "leases_granted", "leases_not_granted", "rounds_finished"):
        found.add(name, getattr(counts, name))
    # From zero on: what is there only after it happened looks to Prometheus as if it never did.
    for outcome in (*tally.OUTCOMES, tally.OTHER):
        found.add("workers_finished", counts.workers_finished[outcome], outcome)
    for then in (*tally.CONSEQUENCES, tally.OTHER):
        found.add("out_of_memory", counts.out_of_memory[then], then)
    waits = found.families["lease_wait_seconds"]
    waits.add_metric([], buckets=counts.lease_waits.buckets(), sum_value=counts.lease_waits.sum_s)
