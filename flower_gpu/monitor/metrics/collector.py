"""Makes metrics of what is to be seen at the moment somebody asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import flower_gpu
from flower_gpu.monitor.metrics import counts
from flower_gpu.monitor.metrics.host import Host, HostState
from flower_gpu.monitor.metrics.runs import FollowedRun, Runs
from flower_gpu.monitor.metrics.table import METRICS
from flower_gpu.printable import printable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_KINDS: Final = ("launch", "simulate", "supernodes")
_LONGEST_LABEL: Final = 200
_BUSY_S: Final = 30.0  # longer than anybody waits for an answer


class BusyError(Exception):
    """An earlier look goes on and on."""


class Collector:
    """What :mod:`prometheus_client` asks for metrics, as its ``registry.Collector`` says.

    Parameters
    ----------
    host : Host
        Looks at GPUs and leases.
    runs : Runs
        Follows runs.
    per_client : bool
        Whether workers are counted for each client.
    """

    def __init__(self, host: Host, runs: Runs, *, per_client: bool = False) -> None:
        self._host = host
        self._runs = runs
        self._per_client = per_client
        self._lock = threading.Lock()

    def describe(self) -> Iterator[Metric]:
        """Yield all metrics without samples; the registry asks this to know their names."""
        yield from _Families(("client",) if self._per_client else ()).families.values()

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
            found = _Families(("client",) if self._per_client else ())
            _add_host(found, self._host.look())
            _add_runs(found, self._runs.look(), per_client=self._per_client)
            _add_totals(found, self._runs.totals)
        finally:
            self._lock.release()
        yield from found.families.values()

    def catch_up(self) -> None:
        """Read what the traces of runs have so far, which may take longer than one who asks would wait."""
        with self._lock:
            self._runs.look()

    def notice(self) -> None:
        """Remember the runs that there are, for one who asks later."""
        with self._lock:
            self._runs.notice()


class _Families:
    """All metrics, that samples are added to.

    Parameters
    ----------
    of_workers : tuple of str
        Further labels of what is told of workers.
    """

    def __init__(self, of_workers: tuple[str, ...] = ()) -> None:
        self.families: dict[str, Any] = {
            name: row.family(more_labels=of_workers if name == "workers" else ())
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
    kinds = dict.fromkeys(_KINDS, 0)
    for followed in runs:
        label, run, known = followed.label, followed.run, followed.counts
        if followed.goes_on:
            kinds[run.kind] = kinds.get(run.kind, 0) + 1
        found.add("run_info", 1, label, run.kind, run.name)
        found.add("run_start_time_seconds", known.started_at, label)
        found.add("run_round", known.current_round, label)
        found.add("run_rounds", known.num_rounds, label)
        _add_workers(found, followed, per_client=per_client)
        for task, (server_round, metrics) in known.evaluations.items():
            found.add("evaluation_round", server_round, label, task)
            for name, value in metrics.items():
                found.add("evaluation", value, label, task, name)
    for kind, number in kinds.items():
        found.add("runs", number, kind)


def _add_workers(found: _Families, followed: FollowedRun, *, per_client: bool) -> None:
    by_client = followed.counts.phases()
    if per_client:
        for (phase, client), number in by_client.items():
            found.add("workers", number, followed.label, phase, client)
        return
    for phase in counts.PHASES:
        number = sum(number for (of, _), number in by_client.items() if of == phase)
        found.add("workers", number, followed.label, phase)


def _add_totals(found: _Families, totals: counts.Totals) -> None:
    found.add("workers_started", totals.started)
    found.add("leases_granted", totals.granted)
    found.add("leases_not_granted", totals.not_granted)
    found.add("rounds_finished", totals.rounds)
    # From zero on: what is there only after it happened looks to Prometheus as if it never did.
    for outcome in (*counts.OUTCOMES, counts.OTHER):
        found.add("workers_finished", totals.finished[outcome], outcome)
    for then in (*counts.THEN, counts.OTHER):
        found.add("out_of_memory", totals.out_of_memory[then], then)
    waits = found.families["lease_wait_seconds"]
    waits.add_metric([], buckets=totals.waits.buckets(), sum_value=totals.waits.sum_s)
