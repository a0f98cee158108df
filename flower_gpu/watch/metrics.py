"""``flower-gpu metrics``: figures of this host's GPUs, leases and runs, for Prometheus.

The problem: Prometheus asks for metrics at its own interval, while runs start and finish at any time.
Counters have to include runs that finished between two scrapes. A driver may take long to answer, or never
answer.

The objects: the :class:`Collector` looks at the host (GPUs and ledger) and at the histories of all registered
runs. It turns them into samples of the metrics in ``METRICS``. All histories share a
:class:`~flower_gpu.watch.folds.tally.Tally`, which holds the counters.

The threads: the main thread only waits for the signal that ends the process. The HTTP server of
:mod:`prometheus_client` calls :meth:`Collector.collect` from a thread of its own for each request. Another
thread runs :meth:`Collector.keep_up`. It looks for new runs twice a second, so that short runs are counted,
too.

Races: a lock in the collector protects the histories, so only one scrape at a time looks at them. A scrape
that waits too long for the lock fails with TimeoutError. The signals are blocked before any thread starts, so
all threads inherit the mask, and only the main thread receives the signals.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import flower_gpu
from flower_gpu.apps.recording import RunningRun, running_runs
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import inventory
from flower_gpu.leases.admission import CORES, MEMORY
from flower_gpu.printable import printable
from flower_gpu.watch.folds.tally import CONSEQUENCES, OTHER, OUTCOMES, Tally
from flower_gpu.watch.folds.worker_span import EXITING, RUNNING, STARTING
from flower_gpu.watch.followed_run import FollowedRun, FollowedRuns
from flower_gpu.watch.host_look import Seen

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX: Final = "flower_gpu_"
#: Longest wait for the ledger's mutex. By default, Prometheus waits 10 s for the response to a scrape.
MUTEX_WAIT_S: Final = 2.0

_log = logging.getLogger("flwr.flower_gpu")
_GPU: Final = ("gpu", "uuid", "name")
_RUN_HOST: Final = ("run", "host")


@dataclass(frozen=True)
class MetricRow:
    """A metric with its labels."""

    name: str  # name without the prefix, and without ``_total`` for counters
    kind: str  # "gauge", "counter" or "histogram"
    help: str
    labels: tuple[str, ...] = ()


_ROWS: Final = (
    MetricRow("build_info", "gauge", "1; the version of flower-gpu is a label.", ("version",)),
    MetricRow("gpus", "gauge", "GPUs and MIG devices of this host that can be used."),
    MetricRow("usable", "gauge", "1 if the GPU can be used, 0 if it is broken or hides its memory.", _GPU),
    MetricRow("memory_used_bytes", "gauge", "Memory of the GPU in use, by all processes.", _GPU),
    MetricRow("memory_total_bytes", "gauge", "Memory of the GPU.", _GPU),
    MetricRow("memory_capacity_bytes", "gauge", "Memory of the GPU that leases can have in all, now.", _GPU),
    MetricRow("memory_leased_bytes", "gauge", "Memory of the GPU that is leased.", _GPU),
    MetricRow("utilization_ratio", "gauge", "Part of the last moments in which the GPU was computing.", _GPU),
    MetricRow("temperature_celsius", "gauge", "Temperature of the GPU.", _GPU),
    MetricRow("ledger_up", "gauge", "1 if the ledger of leases can be read, 0 if not."),
    MetricRow("cores_capacity", "gauge", "Cores of this host that leases can have in all."),
    MetricRow("cores_leased", "gauge", "Cores that are leased, by all accounts of this host."),
    MetricRow("host_memory_capacity_bytes", "gauge", "Main memory that leases can have in all, now."),
    MetricRow(
        "host_memory_leased_bytes", "gauge", "Main memory that is leased, by all accounts of this host."
    ),
    MetricRow("leases_held", "gauge", "Leases that are held, by all accounts of this host."),
    MetricRow("leases_waiting", "gauge", "Calls that wait for a lease, of all accounts of this host."),
    MetricRow("runs", "gauge", "Running runs of this account.", ("kind",)),
    MetricRow("run_info", "gauge", "1; kind and app of a run are labels.", ("run", "kind", "app")),
    MetricRow("run_start_time_seconds", "gauge", "When the run began, in Unix time.", ("run",)),
    MetricRow("run_round", "gauge", "The highest round of any event of the run.", ("run",)),
    MetricRow("run_rounds", "gauge", "Number of rounds of the run, if known.", ("run",)),
    MetricRow("workers", "gauge", "Workers, by phase.", ("run", "phase")),
    MetricRow("run_host_up", "gauge", "1 if a host of a run is present, 0 if it is lost.", _RUN_HOST),
    MetricRow("run_host_messages", "gauge", "Messages in flight on a host of a run.", _RUN_HOST),
    MetricRow("run_host_messages_capacity", "gauge", "Messages that the host handles at a time.", _RUN_HOST),
    MetricRow(
        "evaluation",
        "gauge",
        "The server's latest metrics of an evaluation or of training.",
        ("run", "task", "metric"),
    ),
    MetricRow("evaluation_round", "gauge", "The round of these metrics.", ("run", "task")),
    MetricRow("workers_started", "counter", "Workers that were started."),
    MetricRow("workers_finished", "counter", "Workers that have ended, by how.", ("outcome",)),
    MetricRow("leases_granted", "counter", "Leases that calls were granted."),
    MetricRow("leases_not_granted", "counter", "Requests that ended without a lease."),
    MetricRow("lease_wait_seconds", "histogram", "How long calls have waited for the leases they got."),
    MetricRow("cores_granted", "counter", "Leases on cores that calls on the CPU were granted."),
    MetricRow("cores_not_granted", "counter", "Requests for cores that ended without a lease."),
    MetricRow(
        "cores_wait_seconds",
        "histogram",
        "How long calls on the CPU have waited for their cores and main memory.",
    ),
    MetricRow("out_of_memory", "counter", "Calls that ran out of GPU memory, by what followed.", ("then",)),
    MetricRow("rounds_finished", "counter", "Rounds that are finished."),
    MetricRow(
        "host_calls", "counter", "Calls that have ended on hosts of clusters, by how.", ("host", "outcome")
    ),
)

#: All metrics by name, without the prefix.
METRICS: Final = {row.name: row for row in _ROWS}


# The collector

_KINDS: Final = ("launch", "simulate", "supernodes")
_PHASES: Final = (STARTING, RUNNING, EXITING)
_MAX_LABEL_CHARACTERS: Final = 200
_MAX_METRICS: Final = 100  # for each task
# Longest wait for another scrape. It is longer than the timeout of any client.
_LOCK_WAIT_S: Final = 30.0


class Collector:
    """The source of all metrics, registered with :mod:`prometheus_client`."""

    def __init__(
        self, look: Callable[[], Seen], running: Callable[[], list[RunningRun]] = running_runs
    ) -> None:
        self._look_at_host = look
        self._tally = Tally()  # counts of all runs since the start of this process
        # With 0 seconds, a finished run appears in exactly one more look.
        self._runs = FollowedRuns(0.0, self._tally, running)
        self._problem: str | None = None
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, computed now.

        Raises TimeoutError if an earlier call is still waiting for the driver.
        """
        if not self._lock.acquire(timeout=_LOCK_WAIT_S):
            raise TimeoutError("an earlier query of the GPUs is still running: does nvidia-smi answer?")
        try:
            families = _Families()
            _add_host(families, self._look())
            runs = self._runs.look()
            # A run writes the end of its trace before it leaves the registry. So the trace of a run that has
            # left the registry is complete, and this is the last time it has to be read.
            self._runs.read_on(math.inf)
            _add_runs(families, runs)
            _add_tally(families, self._tally)
        finally:
            self._lock.release()
        yield from families.families.values()

    def _look(self) -> Seen:
        """Return the state of the host. The first time the ledger cannot be read, the reason is logged."""
        try:
            seen = self._look_at_host()
        finally:
            # NVML is shut down after each look, because an open GPU cannot be reset by an administrator.
            inventory.close()
        if seen.ledger_problem not in (None, self._problem):
            _log.warning("the ledger cannot be read: %s", seen.ledger_problem)
        self._problem = seen.ledger_problem
        return seen

    def keep_up(self) -> None:
        """Look for new runs for ever, so that runs which finish before the next scrape are counted."""
        with self._lock:
            self._runs.notice()
            # Reading long traces may take longer than the timeout of an HTTP client, so it is done before the
            # first scrape.
            self._runs.read_on(math.inf)
        while True:
            time.sleep(_NOTICE_S)
            with self._lock:
                self._runs.notice()


class _Families:
    """The metric families of a scrape."""

    def __init__(self) -> None:
        from prometheus_client import core

        kinds = {
            "gauge": core.GaugeMetricFamily,
            "counter": core.CounterMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        self.families: dict[str, Any] = {
            name: kinds[row.kind](PREFIX + name, row.help, labels=row.labels) for name, row in METRICS.items()
        }
        self._seen: set[tuple[str, ...]] = set()

    def add(self, name: str, value: float | None, *labels: object) -> None:
        """Add a sample.

        A sample without a value is ignored. So is a second sample with the same labels, because the format of
        Prometheus does not allow duplicates.
        """
        values = [printable(str(label))[:_MAX_LABEL_CHARACTERS] for label in labels]
        key = (name, *values)
        if value is not None and key not in self._seen:
            self._seen.add(key)
            self.families[name].add_metric(values, value)


def _add_host(families: _Families, seen: Seen) -> None:
    state, gpus, capacity = seen.state, seen.inventory.gpus, seen.capacity_bytes
    families.add("build_info", 1, flower_gpu.__version__)
    families.add("gpus", sum(gpu.is_usable for gpu in gpus))
    families.add("ledger_up", int(state is not None))
    if state is not None:
        families.add("leases_held", len(state.holders))
        families.add("leases_waiting", len(state.waiting))
        families.add("cores_capacity", capacity[CORES] / 1000)
        families.add("cores_leased", state.leased_bytes(CORES) / 1000)
        families.add("host_memory_capacity_bytes", capacity.get(MEMORY))
        families.add("host_memory_leased_bytes", state.leased_bytes(MEMORY) if MEMORY in capacity else None)
    split_cards = {gpu.mig_parent for gpu in gpus}
    for gpu in gpus:
        labels = gpu.index, gpu.uuid, gpu.name
        percent = gpu.utilization_percent
        leased = state.leased_bytes(gpu.uuid) if state is not None and gpu.uuid else None
        families.add("usable", None if gpu.uuid in split_cards else int(gpu.is_usable), *labels)
        families.add("memory_used_bytes", gpu.used_bytes, *labels)
        families.add("memory_total_bytes", gpu.total_bytes, *labels)
        families.add("memory_capacity_bytes", capacity.get(gpu.uuid), *labels)
        families.add("memory_leased_bytes", leased, *labels)
        families.add("utilization_ratio", None if percent is None else percent / 100, *labels)
        families.add("temperature_celsius", seen.temperatures.get(gpu.uuid), *labels)


def _add_runs(families: _Families, runs: Sequence[FollowedRun]) -> None:
    kinds = Counter(dict.fromkeys(_KINDS, 0))
    for followed in runs:
        # The label is the name of the folder, or its path if another run already has this label.
        if not followed.label:
            has_namesake = any(other.label == followed.folder.name for other in runs)
            followed.label = str(followed.folder) if has_namesake else followed.folder.name
        label, run, history = followed.label, followed.run, followed.history
        kind, name = (run.kind, run.name) if run else ("", "")
        kinds[kind] += followed.is_registered
        families.add("run_info", 1, label, kind, name)
        families.add("run_start_time_seconds", history.run.started_at, label)
        families.add("run_round", history.calls.current_round, label)
        families.add("run_rounds", history.rounds.num_rounds, label)
        # The workers of a killed run end with it, although its trace does not contain their ends.
        workers = followed.workers() if followed.is_registered else []
        for phase in _PHASES:
            families.add("workers", sum(worker.phase == phase for worker in workers), label, phase)
        for host in history.hosts.by_name.values():
            if host.nodes or host.is_lost:
                messages = history.calls.in_flight(host.name) if followed.is_registered else 0
                families.add("run_host_up", int(not host.is_lost), label, host.name)
                families.add("run_host_messages", messages, label, host.name)
                families.add("run_host_messages_capacity", host.concurrency, label, host.name)
        parts = sorted(
            (part for part in history.rounds.numbered_parts if part.metrics), key=lambda part: part.time
        )
        for task, evaluation in {part.task: part for part in parts}.items():
            families.add("evaluation_round", evaluation.round, label, task)
            for metric, value in islice(evaluation.metrics.items(), _MAX_METRICS):
                families.add("evaluation", value, label, task, metric)
    for kind, count in kinds.items():
        families.add("runs", count, kind)


def _add_tally(families: _Families, counts: Tally) -> None:
    families.add("workers_started", counts.workers_started)
    families.add("rounds_finished", counts.rounds_finished)
    for name, leases in (("lease", counts.leases), ("cores", counts.cores)):
        granted = "leases" if name == "lease" else name
        families.add(f"{granted}_granted", leases.granted)
        families.add(f"{granted}_not_granted", leases.refused)
        waits = families.families[f"{name}_wait_seconds"]
        waits.add_metric([], buckets=leases.buckets(), sum_value=leases.waited_s)
    # Every counter is exported from the start, with zero. If a counter first appears with the value 1,
    # Prometheus sees no increase.
    for outcome in (*OUTCOMES, OTHER):
        families.add("workers_finished", counts.workers_finished[outcome], outcome)
        for host, calls in counts.host_calls.items():
            families.add("host_calls", calls[outcome], host, outcome)
    for then in (*CONSEQUENCES, OTHER):
        families.add("out_of_memory", counts.out_of_memory[then], then)


# The server

# Seconds between two looks for new runs. A shorter run may be missed.
_NOTICE_S: Final = 0.5
_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(collector: Collector, address: str, port: int) -> int:
    """Print the URL, serve until signal n arrives, and return 128 + n as the exit code.

    Raises ConfigError if the address or the port cannot be used.
    """
    with _blocked() as signals:
        bound = _listen(collector, address, port)
        print(f"http://{f'[{address}]' if ':' in address else address}:{bound}/metrics", flush=True)
        # A long trace may take a while to read. In a thread of its own, the reading does not delay the
        # reaction of this thread to signals.
        threading.Thread(target=collector.keep_up, name="flower-gpu-runs", daemon=True).start()
        return 128 + signal.sigwait(signals)


@contextmanager
def _blocked() -> Iterator[set[signal.Signals]]:
    """Block the signals that end this process, and yield them. Ignored signals stay ignored.

    Threads that start in the context inherit the mask.
    """
    blocked = {number for number in _END_SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _listen(collector: Collector, address: str, port: int) -> int:
    """Start the HTTP server, and return its port. Its daemon threads end with this process."""
    from prometheus_client import CollectorRegistry, start_http_server

    # The default registry of the library also contains metrics of this process.
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, _ = start_http_server(port, address, registry)
    except PermissionError:
        raise ConfigError(
            f"--port {port}: this account may not listen there; take one from 1024 on"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on --address {address} --port {port}: {reason}. Take another, or --port 0"
        ) from None
    return int(server.server_port)
