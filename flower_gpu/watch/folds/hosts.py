"""Folds the events of GPUs, and of the hosts of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flower_gpu.trace import Event
from flower_gpu.watch.fields import first_line, mappings, number, text, whole_number
from flower_gpu.watch.folds.limits import MOST_HOSTS, drop_oldest
from flower_gpu.watch.folds.run import RunFold
from flower_gpu.watch.folds.tally import Tally

_MAX_NODES: Final = 50  # limit for each host name
#: Events to process even if they name a lost host. Other events of a lost host come too late.
_EVENTS_ABOUT_LOST_HOSTS: Final = ("run_started", "host_joined", "host_lost")


@dataclass
class GPUInfo:
    """A GPU of a run. A size is None until an event reports it."""

    uuid: str
    index: int = -1
    name: str = ""
    host: str = ""  # the machine's name
    total_bytes: int | None = None
    capacity_bytes: int | None = None
    is_leased: bool = False  # True if the run has had a lease on the GPU

    def learn(self, report: Mapping[str, Any], host: str) -> None:
        """Update the fields from the description of the GPU in an event."""
        self.host = host or self.host
        index = whole_number(report.get("index"))
        self.index = self.index if index is None else index
        self.name = text(report.get("name")) or self.name
        self.total_bytes = whole_number(report.get("total_bytes")) or self.total_bytes
        self.capacity_bytes = whole_number(report.get("capacity_bytes")) or self.capacity_bytes


@dataclass
class GPUSample:
    """The state of a GPU at a Unix time. A figure is None if the driver does not report it."""

    time: float
    used_bytes: int | None
    utilization_percent: float | None
    temperature_c: float | None


@dataclass
class HostSpan:
    """A present or former host of a run's Ray cluster. Ray nodes with the same host name share a span."""

    name: str
    joined_at: float | None = None  # time of the first join
    #: Join time and concurrency of each connected node, by its id.
    nodes: dict[str, tuple[float, int]] = field(default_factory=dict)
    cores: int | None = None
    gpus: tuple[str, ...] = ()  # UUIDs
    is_lost: bool = False
    lost_at: float | None = None  # time of the last loss, even after the host has joined again
    lost_reason: str = ""

    @property
    def concurrency(self) -> int:
        """Maximum number of messages in flight on the host."""
        return sum(concurrency for _, concurrency in self.nodes.values())

    def join(self, time: float, event: Event) -> None:
        """Add the node of an event to the host."""
        self.joined_at = time if self.joined_at is None else self.joined_at
        self.is_lost = False
        if len(self.nodes) < _MAX_NODES:
            self.nodes[text(event.get("host_id"))] = time, whole_number(event.get("concurrency")) or 0
        self.cores = whole_number(event.get("cores"))
        self.gpus = tuple(text(gpu.get("uuid")) for gpu in mappings(event.get("gpus")))

    def lose(self, time: float, event: Event) -> None:
        """Remove the node of an event, or all nodes if the id is unknown.

        The host is lost when its last node is gone.
        """
        if self.nodes.pop(text(event.get("host_id")), None) is None:
            self.nodes.clear()
        self.is_lost = not self.nodes
        self.lost_at, self.lost_reason = time, first_line(event.get("reason"))


class HostFold:
    """The GPUs of a run with their samples, and its hosts."""

    def __init__(self, run: RunFold, tally: Tally, *, keep_finished: bool) -> None:
        self._run = run
        self._tally = tally
        self._keep_finished = keep_finished
        self.by_name: dict[str, HostSpan] = {}  # hosts of a Ray cluster; empty on a single machine
        self.gpus: dict[str, GPUInfo] = {}  # by UUID
        #: Samples by UUID. Without finished items, only the last sample of each GPU.
        self.samples: dict[str, list[GPUSample]] = {}

    @property
    def gpus_of_run(self) -> list[GPUInfo]:
        """GPUs that the run may use, sorted by host and index.

        A sample may also list other GPUs of the host. Those have neither an index nor a lease of this run.
        """
        available = [gpu for gpu in self.gpus.values() if gpu.index >= 0 or gpu.is_leased]
        return sorted(available or self.gpus.values(), key=lambda gpu: (gpu.host, gpu.index, gpu.uuid))

    def is_late(self, event: Event) -> bool:
        """Return True if the event comes from a lost host. Its workers and leases have already ended."""
        host = self.by_name.get(text(event.get("host")))
        return host is not None and host.is_lost and event.get("event") not in _EVENTS_ABOUT_LOST_HOSTS

    def fold(self, time: float, event: Event) -> None:
        """Take in an event."""
        match event.get("event"):
            case "run_started":
                if self._run.resumed_from is not None:
                    self._remove_nodes(self._run.resumed_from)
                self._learn_gpus(event)
            case "host_joined" if (host := self._host(event)) is not None:
                host.join(time, event)
                self._learn_gpus(event)
            case "host_lost" if (host := self._host(event)) is not None:
                host.lose(time, event)
            case "lease_granted":
                for gpu in self._learn_gpus(event):
                    gpu.is_leased = True
            case "gpu_sample":
                self._learn_gpus(event)
                for reading in mappings(event.get("gpus")):
                    self._add_sample(time, reading)

    def _host(self, event: Event) -> HostSpan | None:
        name = text(event.get("host"))
        if not name:
            return None
        # Create the counter of calls, so that metrics list the host before its first call.
        self._tally.calls_of(name)
        host = self.by_name.setdefault(name, HostSpan(name))
        if not self._keep_finished:
            drop_oldest(self.by_name, MOST_HOSTS)
        return host

    def _remove_nodes(self, until: float) -> None:
        """Remove the nodes that joined at ``until`` or earlier. Nodes join again when a run is resumed."""
        for host in self.by_name.values():
            host.nodes = {node: joined for node, joined in host.nodes.items() if joined[0] > until}
            host.is_lost = False

    def _learn_gpus(self, event: Event) -> list[GPUInfo]:
        """Return the GPUs that an event describes, with what the event says about them."""
        gpus = []
        for report in mappings(event.get("gpus")):
            uuid = text(report.get("uuid"))
            gpu = self.gpus.setdefault(uuid, GPUInfo(uuid))
            gpu.learn(report, text(event.get("host")))
            gpus.append(gpu)
        return gpus

    def _add_sample(self, time: float, reading: Mapping[str, Any]) -> None:
        samples = self.samples.setdefault(text(reading.get("uuid")), [])
        samples.append(
            GPUSample(
                time,
                whole_number(reading.get("used_bytes")),
                number(reading.get("utilization_percent")),
                number(reading.get("temperature_c")),
            )
        )
        if not self._keep_finished:
            del samples[:-1]
