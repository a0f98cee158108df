"""All metrics in one table: what they are called, what they mean, and which labels they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX: Final = "flower_gpu_"

_GPU: Final = ("gpu", "uuid", "name")


@dataclass(frozen=True)
class Row:
    """One metric."""

    name: str  # without the prefix; of counters without ``_total``
    kind: str  # "gauge", "counter" or "histogram"
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """Its name in queries; of a histogram without what each of its series has behind."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    def family(self, *, more_labels: tuple[str, ...] = ()) -> Metric:
        """Make a family of this metric, without samples yet."""
        from prometheus_client import core

        kinds = {
            "gauge": core.GaugeMetricFamily,
            "counter": core.CounterMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        made: Metric = kinds[self.kind](PREFIX + self.name, self.help, labels=(*self.labels, *more_labels))
        return made


_ROWS: Final = (
    Row("build_info", "gauge", "1; the version of flower-gpu is a label.", ("version",)),
    Row("gpus", "gauge", "GPUs and MIG devices of this host that can be used."),
    Row("usable", "gauge", "1 if the GPU can be used, 0 if it is broken or hides its memory.", _GPU),
    Row("memory_used_bytes", "gauge", "Memory of the GPU in use, by anybody.", _GPU),
    Row("memory_total_bytes", "gauge", "Memory of the GPU.", _GPU),
    Row("memory_capacity_bytes", "gauge", "Memory of the GPU that leases can have in all, now.", _GPU),
    Row("memory_leased_bytes", "gauge", "Memory of the GPU that is leased.", _GPU),
    Row("utilization_ratio", "gauge", "Part of the last moments in which the GPU was computing.", _GPU),
    Row("temperature_celsius", "gauge", "Temperature of the GPU.", _GPU),
    Row("ledger_up", "gauge", "1 if the ledger of leases can be read, 0 if not."),
    Row("leases_held", "gauge", "Leases that are held, by all accounts of this host."),
    Row("leases_waiting", "gauge", "Calls that wait for a lease, of all accounts of this host."),
    Row("runs", "gauge", "Runs of this account that go on.", ("kind",)),
    Row("run_info", "gauge", "1; kind and app of a run are labels.", ("run", "kind", "app")),
    Row("run_start_time_seconds", "gauge", "When the run began, in Unix time.", ("run",)),
    Row("run_round", "gauge", "The highest round that anything in the run is of.", ("run",)),
    Row("run_rounds", "gauge", "How many rounds the run will have, where that is known.", ("run",)),
    Row("workers", "gauge", "Workers that are there, by what they do.", ("run", "phase")),
    Row(
        "evaluation",
        "gauge",
        "Metrics that the server has told last, of an evaluation or of training.",
        ("run", "task", "metric"),
    ),
    Row("evaluation_round", "gauge", "The round of these metrics.", ("run", "task")),
    Row("workers_started", "counter", "Workers that were started."),
    Row("workers_finished", "counter", "Workers that have ended, by how.", ("outcome",)),
    Row("leases_granted", "counter", "Leases that calls were granted."),
    Row("leases_not_granted", "counter", "Requests that ended without a lease."),
    Row("lease_wait_seconds", "histogram", "How long calls have waited for the leases they got."),
    Row("out_of_memory", "counter", "Calls that ran out of GPU memory, by what followed.", ("then",)),
    Row("rounds_finished", "counter", "Rounds that are finished: their first result is there."),
)

#: By name, without the prefix.
METRICS: Final = {row.name: row for row in _ROWS}
