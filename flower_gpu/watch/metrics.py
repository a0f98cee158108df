"""``flower-gpu metrics``: figures of this host's GPUs, leases and runs, for Prometheus.

Prometheus asks the server, which asks the collector: it looks at the host (GPUs and ledger) and at the
histories of all registered runs, and makes samples for the metrics of the table. Counters are one tally that
all histories share.
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
from flower_gpu.watch import spans
from flower_gpu.watch.followed_run import FollowedRun, FollowedRuns
from flower_gpu.watch.host_look import Seen
from flower_gpu.watch.spans import EXITING, RUNNING, STARTING, Tally

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX: Final = "flower_gpu_"
#: Prometheus waits 10 s for an answer by default.
MUTEX_WAIT_S: Final = 2.0

_log = logging.getLogger("flwr.flower_gpu")
_GPU: Final = ("gpu", "uuid", "name")
_RUN_HOST: Final = ("run", "host")


@dataclass(frozen=True)
class MetricRow:
    """One metric."""

    name: str  # without the prefix; of counters without ``_total``
    kind: str  # "gauge", "counter" or "histogram"
    help: str
    labels: tuple[str, ...] = ()


_ROWS: Final = (
    MetricRow("build_info", "gauge", "1; the version of flower-gpu is a label.", ("version",)),
    MetricRow("gpus", "gauge", "GPUs and MIG devices of this host that can be used."),
    MetricRow("usable", "gauge", "1 if the GPU can be used, 0 if it is broken or hides its memory.", _GPU),
    MetricRow("memory_used_bytes", "gauge", "Memory of the GPU in use, by anybody.", _GPU),
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
    MetricRow("runs", "gauge", "Runs of this account that go on.", ("kind",)),
    MetricRow("run_info", "gauge", "1; kind and app of a run are labels.", ("run", "kind", "app")),
    MetricRow("run_start_time_seconds", "gauge", "When the run began, in Unix time.", ("run",)),
    MetricRow("run_round", "gauge", "The highest round that anything in the run is of.", ("run",)),
    MetricRow("run_rounds", "gauge", "How many rounds the run will have, where that is known.", ("run",)),
    MetricRow("workers", "gauge", "Workers, by phase.", ("run", "phase")),
    MetricRow("run_host_up", "gauge", "1 if a host of a run is there, 0 if it is lost.", _RUN_HOST),
    MetricRow("run_host_messages", "gauge", "Messages under way on a host of a run.", _RUN_HOST),
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
    MetricRow("cores_wait_seconds", "histogram", "How long calls on the CPU have waited for their cores."),
    MetricRow("out_of_memory", "counter", "Calls that ran out of GPU memory, by what followed.", ("then",)),
    MetricRow("rounds_finished", "counter", "Rounds that are finished."),
    MetricRow(
        "host_calls", "counter", "Calls that have ended on hosts of clusters, by how.", ("host", "outcome")
    ),
)

#: By name, without the prefix.
METRICS: Final = {row.name: row for row in _ROWS}


# What is made of it

_KINDS: Final = ("launch", "simulate", "supernodes")
_PHASES: Final = (STARTING, RUNNING, EXITING)
_LONGEST_LABEL: Final = 200
_MOST_METRICS: Final = 100  # of a task
_BUSY_S: Final = 30.0  # longer than anybody waits for an answer


class Collector:
    """The object that :mod:`prometheus_client` asks for metrics."""

    def __init__(
        self, look: Callable[[], Seen], running: Callable[[], list[RunningRun]] = running_runs
    ) -> None:
        self._look_at_host = look
        self._tally = Tally()  # of the runs that go on, and those that have ended meanwhile
        # A run that has just ended is there once more.
        self._runs = FollowedRuns(0.0, self._tally, running)
        self._problem: str | None = None
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Look, and yield all metrics.

        Raises TimeoutError if a driver that does not answer holds up an earlier look.
        """
        if not self._lock.acquire(timeout=_BUSY_S):
            raise TimeoutError("an earlier look at the GPUs goes on: does nvidia-smi answer?")
        try:
            found = _Families()
            _add_host(found, self._look())
            runs = self._runs.look()
            # A run ends in its trace before it does in the registry, so nothing comes after this look at it.
            self._runs.read_on(math.inf)
            _add_runs(found, runs)
            _add_tally(found, self._tally)
        finally:
            self._lock.release()
        yield from found.families.values()

    def _look(self) -> Seen:
        """Look at the host; why the ledger cannot be read is logged once."""
        try:
            seen = self._look_at_host()
        finally:
            inventory.close()  # an administrator may want to reset a GPU between two looks
        if seen.ledger_problem not in (None, self._problem):
            _log.warning("the ledger cannot be read: %s", seen.ledger_problem)
        self._problem = seen.ledger_problem
        return seen

    def keep_up(self) -> None:
        """Find runs as they come, for ever, also those that end before somebody asks."""
        with self._lock:
            self._runs.notice()
            self._runs.read_on(math.inf)  # which may take longer than a client of HTTP waits
        while True:
            time.sleep(_NOTICE_S)
            with self._lock:
                self._runs.notice()


class _Families:
    """All metrics, that samples are added to."""

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
        """Add a sample, unless it has no value, or there is one with these labels: two are not allowed."""
        values = [printable(str(label))[:_LONGEST_LABEL] for label in labels]
        key = (name, *values)
        if value is not None and key not in self._seen:
            self._seen.add(key)
            self.families[name].add_metric(values, value)


def _add_host(found: _Families, seen: Seen) -> None:
    state, gpus, capacity = seen.state, seen.inventory.gpus, seen.capacity_bytes
    found.add("build_info", 1, flower_gpu.__version__)
    found.add("gpus", sum(gpu.is_usable for gpu in gpus))
    found.add("ledger_up", int(state is not None))
    if state is not None:
        found.add("leases_held", len(state.holders))
        found.add("leases_waiting", len(state.waiting))
        found.add("cores_capacity", capacity[CORES] / 1000)
        found.add("cores_leased", state.leased_bytes(CORES) / 1000)
        found.add("host_memory_capacity_bytes", capacity.get(MEMORY))
        found.add("host_memory_leased_bytes", state.leased_bytes(MEMORY) if MEMORY in capacity else None)
    in_parts = {gpu.mig_parent for gpu in gpus}
    for gpu in gpus:
        labels = gpu.index, gpu.uuid, gpu.name
        percent = gpu.utilization_percent
        leased = state.leased_bytes(gpu.uuid) if state is not None and gpu.uuid else None
        found.add("usable", None if gpu.uuid in in_parts else int(gpu.is_usable), *labels)
        found.add("memory_used_bytes", gpu.used_bytes, *labels)
        found.add("memory_total_bytes", gpu.total_bytes, *labels)
        found.add("memory_capacity_bytes", capacity.get(gpu.uuid), *labels)
        found.add("memory_leased_bytes", leased, *labels)
        found.add("utilization_ratio", None if percent is None else percent / 100, *labels)
        found.add("temperature_celsius", seen.temperatures.get(gpu.uuid), *labels)


def _add_runs(found: _Families, runs: Sequence[FollowedRun]) -> None:
    kinds = Counter(dict.fromkeys(_KINDS, 0))
    for followed in runs:
        if not followed.label:  # its folder's name, or the whole path where another run's has the same
            has_namesake = any(one.label == followed.folder.name for one in runs)
            followed.label = str(followed.folder) if has_namesake else followed.folder.name
        label, run, history = followed.label, followed.run, followed.history
        kind, name = (run.kind, run.name) if run else ("", "")
        kinds[kind] += followed.is_registered
        found.add("run_info", 1, label, kind, name)
        found.add("run_start_time_seconds", history.started_at, label)
        found.add("run_round", history.current_round, label)
        found.add("run_rounds", history.num_rounds, label)
        # With a killed run go its workers, whose ends nobody has written down.
        workers = followed.workers() if followed.is_registered else []
        for phase in _PHASES:
            found.add("workers", sum(one.phase == phase for one in workers), label, phase)
        for host in history.hosts.values():
            if host.nodes or host.is_lost:
                messages = history.messages_under_way(host.name) if followed.is_registered else 0
                found.add("run_host_up", int(not host.is_lost), label, host.name)
                found.add("run_host_messages", messages, label, host.name)
                found.add("run_host_messages_capacity", host.concurrency, label, host.name)
        told = sorted((one for one in history.evaluations if one.metrics), key=lambda one: one.time)
        for task, evaluation in {one.task: one for one in told}.items():
            found.add("evaluation_round", evaluation.round, label, task)
            for metric, value in islice(evaluation.metrics.items(), _MOST_METRICS):
                found.add("evaluation", value, label, task, metric)
    for kind, count in kinds.items():
        found.add("runs", count, kind)


def _add_tally(found: _Families, counts: Tally) -> None:
    found.add("workers_started", counts.workers_started)
    found.add("rounds_finished", counts.rounds_finished)
    for name, leases in (("lease", counts.leases), ("cores", counts.cores)):
        granted = "leases" if name == "lease" else name
        found.add(f"{granted}_granted", leases.granted)
        found.add(f"{granted}_not_granted", leases.refused)
        waits = found.families[f"{name}_wait_seconds"]
        waits.add_metric([], buckets=leases.buckets(), sum_value=leases.waited_s)
    # From zero on: what is there only after it happened looks to Prometheus as if it never did.
    for outcome in (*spans.OUTCOMES, spans.OTHER):
        found.add("workers_finished", counts.workers_finished[outcome], outcome)
        for host, calls in counts.host_calls.items():
            found.add("host_calls", calls[outcome], host, outcome)
    for then in (*spans.CONSEQUENCES, spans.OTHER):
        found.add("out_of_memory", counts.out_of_memory[then], then)


# The server

_NOTICE_S: Final = 0.5  # a run of less than this may be overlooked
_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(collector: Collector, address: str, port: int) -> int:
    """Print the URL, serve until signal n ends this process, and return 128 + n.

    Raises ConfigError if it cannot listen there.
    """
    with _blocked() as signals:
        bound = _listen(collector, address, port)
        print(f"http://{f'[{address}]' if ':' in address else address}:{bound}/metrics", flush=True)
        # Not here: signals end this thread's wait at once, and would wait for a long trace to be read.
        threading.Thread(target=collector.keep_up, name="flower-gpu-runs", daemon=True).start()
        return 128 + signal.sigwait(signals)


@contextmanager
def _blocked() -> Iterator[set[signal.Signals]]:
    """Block the signals that end this process, in threads that start meanwhile, too; those that it heeds."""
    heeded = {number for number in _END_SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
    try:
        yield heeded
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(collector: Collector, address: str, port: int) -> int:
    """Answer from now on, in threads that end with this process; return the port."""
    from prometheus_client import CollectorRegistry, start_http_server

    own = CollectorRegistry()  # the library's has metrics of this process in it
    own.register(collector)
    try:
        server, _ = start_http_server(port, address, own)
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
