"""What a trace tells, put together: a run, its hosts, leases, workers, rounds and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.apps.failures import COMPLETED
from flower_gpu.watch.fields import mappings, metric_rank, number, text, whole, whose
from flower_gpu.watch.lease_history import LeaseHistory
from flower_gpu.watch.round_history import RoundHistory
from flower_gpu.watch.spans import (
    CONSEQUENCES,
    HOST_LOST,
    MOST_HOSTS,
    OTHER,
    OUT_OF_MEMORY,
    OUTCOMES,
    CallFigures,
    GPUInfo,
    GPUSample,
    HostSpan,
    LeaseSpan,
    OutOfMemory,
    Tally,
    WorkerSpan,
    drop_oldest,
)

_FEW: Final = 50  # of what is not forgotten with ``keep_finished=False``
# With ``keep_finished=False`` no trace makes this process grow, also one whose ends nobody has written down.
_MOST_OPEN: Final = 10_000
_MOST_PARTS: Final = 1_500  # of rounds: curves need more than the last few
_CURVES: Final = 3  # metrics that are kept of those
#: Events that a host which is lost is named in, too.
_OF_LOST_HOSTS: Final = ("run_started", "host_joined", "host_lost")


class History(RoundHistory):
    """A run, as far as its events tell; fed event by event, so that it can be followed while it goes on.

    Everything that shows a run or writes it down reads it here. With ``keep_finished=False`` what is over is
    forgotten, so that a long run takes no more and more memory. Then ``leases`` and ``workers`` are those
    that go on, ``samples`` the last of each GPU, ``out_of_memory`` the last few, ``rounds`` many of the last;
    with ``keep_rounds`` all rounds stay. Counts go into ``tally``, which runs may share.
    """

    def __init__(
        self, *, keep_finished: bool = True, keep_rounds: bool = False, tally: Tally | None = None
    ) -> None:
        super().__init__(Tally() if tally is None else tally)
        self._keep_finished = keep_finished
        self._keep_rounds = keep_rounds
        # Of the run; empty or None as long as that is not told.
        self.kind = self.name = self.host = self.version = ""
        self.outcome = ""  # also empty for a run that was killed
        self.pid: int | None = None
        self.clients: int | None = None
        self.cores: int | None = None
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self.first_at: float | None = None  # of all events
        self.last_at: float | None = None
        self.waited_s = 0.0  # without any worker, since others had what its calls need
        self.pauses: list[tuple[float, float]] = []  # from the end of a run to when it was resumed
        self.hosts: dict[str, HostSpan] = {}  # of a Ray cluster, by name; empty for a run on one machine
        self.gpus: dict[str, GPUInfo] = {}  # by UUID, as the samples
        self.samples: dict[str, list[GPUSample]] = {}
        self._gpu_leases, self._core_leases = LeaseHistory(), LeaseHistory()
        self.workers: list[WorkerSpan] = []  # in the order of their starts
        self.out_of_memory: list[OutOfMemory] = []
        self._running: dict[tuple[str, int], WorkerSpan] = {}  # by call and pid
        self._processes: dict[tuple[str, int], int] = {}  # numbers of workers, by host and pid
        self._started = 0  # processes
        self._last_round: int | None = None  # of a worker
        self._calls_round: int | None = None
        self._calls_done: Counter[str] = Counter()  # of that round
        self._before: float | None = None  # the time of the event before this one
        self._worked_at = 0.0  # when a worker was done last

    @classmethod
    def read(cls, path: Path) -> History:
        """Read a whole trace."""
        history = cls()
        history.feed(trace.read(path))
        return history

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in events, oldest first. What is not understood is left out: a trace may be cut anywhere."""
        for event in events:
            time = number(event.get("time"))
            handler = getattr(self, f"_on_{event.get('event')}", None)
            if time is None:
                continue
            self.first_at = time if self.first_at is None else self.first_at
            self._before, self.last_at = self.last_at, max(self.last_at or time, time)
            if handler is not None and not self._is_late(event):
                handler(time, event)
        if not self._keep_finished:
            self._forget_finished()

    @property
    def leases(self) -> list[LeaseSpan]:
        """Requests for GPUs and leases on them, in the order of their starts."""
        return self._gpu_leases.spans

    @property
    def cores_leases(self) -> list[LeaseSpan]:
        """Requests for cores and leases on them, of calls on the CPU, in the order of their starts."""
        return self._core_leases.spans

    @property
    def waiting(self) -> list[LeaseSpan]:
        """Requests that wait for a lease: those for GPUs, then those for cores, each the oldest first."""
        return [*self._gpu_leases.waiting.values(), *self._core_leases.waiting.values()]

    @property
    def running(self) -> list[WorkerSpan]:
        """Workers that have not ended, the oldest first."""
        return list(self._running.values())

    @property
    def stuck_since(self) -> float | None:
        """Since when calls wait for leases and none has a worker; None where that is not so."""
        waiting = [span.requested_at for span in self.waiting if span.requested_at is not None]
        return max(min(waiting), self._worked_at) if waiting and not self._running else None

    def messages_under_way(self, host: str) -> int:
        """Return how many messages a worker handles on a host of a Ray cluster, or wait for a lease there."""
        running = sum(one.host == host for one in self.running)
        return running + sum(one.host == host for one in self.waiting)

    def lease_of(self, worker: WorkerSpan) -> LeaseSpan | None:
        """Return the lease that a worker has; on the CPU the one on cores; None where it has neither."""
        on_gpus, on_cores = self._gpu_leases.granted, self._core_leases.granted
        return on_gpus.get(worker.lease) or on_cores.get(worker.cores_lease)

    @property
    def current_round(self) -> int | None:
        """The round that is under way, or was last: the highest that anything is of."""
        if self.open_round is not None and self.open_round.round is not None:
            return self.open_round.round
        told = [worker.round for worker in self.running] + [number for number, _ in self._parts][-1:]
        return max((number for number in (self._last_round, *told) if number is not None), default=None)

    @property
    def calls_done(self) -> dict[str, int]:
        """How many calls of the current round are done, by task; a call of no round is not counted."""
        is_current = self._calls_round is not None and self._calls_round == self.current_round
        return dict(self._calls_done) if is_current else {}

    @property
    def gpus_of_run(self) -> list[GPUInfo]:
        """The GPUs that the run could use, by their numbers. Samples tell of all GPUs of the host."""
        leased = {uuid for lease in self.leases for uuid in lease.memory_bytes}
        told = [gpu for gpu in self.gpus.values() if gpu.index >= 0 or gpu.uuid in leased]
        return sorted(told or self.gpus.values(), key=lambda gpu: (gpu.host, gpu.index, gpu.uuid))

    def over_at(self, since: float, end: float) -> float:
        """Return the latest possible end of a span: the end of its part of the run, or of the trace."""
        return min((begin for begin, _ in self.pauses if begin >= since), default=end)

    def _is_late(self, event: Mapping[str, Any]) -> bool:
        """Tell whether a host says this that is lost: all that it had has ended."""
        host = self.hosts.get(text(event.get("host")))
        return host is not None and host.is_lost and event.get("event") not in _OF_LOST_HOSTS

    def _forget_finished(self) -> None:
        for leases in (self._gpu_leases, self._core_leases):
            leases.forget_finished(_MOST_OPEN)
        drop_oldest(self._running, _MOST_OPEN)
        drop_oldest(self._processes, _MOST_OPEN)
        if not self._keep_rounds:
            drop_oldest(self._parts, _MOST_PARTS)
            for part in islice(reversed(self._parts.values()), _FEW, None):
                if part.told:  # a curve needs no more of it
                    kept = sorted(part.metrics, key=metric_rank)[:_CURVES]
                    part.told, part.metrics = {}, {name: part.metrics[name] for name in kept}
        drop_oldest(self.last_metrics, _FEW)
        drop_oldest(self.hosts, MOST_HOSTS)
        self.workers = list(self._running.values())
        for samples in self.samples.values():
            del samples[:-1]
        del self.out_of_memory[:-_FEW]
        del self.pauses[:-_FEW]

    # The run

    def _on_run_started(self, time: float, event: Mapping[str, Any]) -> None:
        # Of two hosts that share a folder, each says that the run begins: then nothing has ended.
        goes_on = self.finished_at is not None or event.get("kind") == "simulate"
        before = self._before if self.finished_at is None else self.finished_at
        if self.started_at is not None and goes_on and before is not None and before < time:
            self.pauses.append((before, time))
            self._leave_hosts(before)
        if event.get("kind") == "simulate":  # whoever goes on sends again what says no round
            self._parts = {key: part for key, part in self._parts.items() if key[0] is not None}
        # A run that is resumed begins again; its times are those of the first.
        self.started_at = time if self.started_at is None else self.started_at
        self.finished_at, self.outcome = None, ""
        if not self._keep_finished:  # what the one before has left open was killed with it
            self._gpu_leases, self._core_leases = LeaseHistory(), LeaseHistory()
            self._running = {}
        self.kind, self.name = text(event.get("kind")), text(event.get("name"))
        self.host, self.pid = text(event.get("host")), whole(event.get("pid"))
        self.version = text(event.get("version"))
        self.clients, self.cores = whole(event.get("clients")), whole(event.get("cores"))
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told, self.host)

    def _on_run_finished(self, time: float, event: Mapping[str, Any]) -> None:
        self.finished_at, self.outcome = time, text(event.get("outcome"))
        if (messages := whole(event.get("messages"))) is not None:  # the trace may lack replies
            self._sent, self._failed = messages, whole(event.get("failed")) or 0
            self._replied.clear()
        if self.outcome == COMPLETED:
            self._finish_rounds(self._latest_round)
        self.open_round = None

    def _on_run_waited(self, time: float, event: Mapping[str, Any]) -> None:
        self.waited_s += max(0.0, number(event.get("seconds")) or 0.0)

    def _on_gpu_sample(self, time: float, event: Mapping[str, Any]) -> None:
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told, text(event.get("host")))
            self.samples.setdefault(text(told.get("uuid")), []).append(
                GPUSample(
                    time,
                    whole(told.get("used_bytes")),
                    number(told.get("utilization_percent")),
                    number(told.get("temperature_c")),
                )
            )

    def _learn_gpu(self, told: Mapping[str, Any], host: str) -> None:
        gpu = self.gpus.setdefault(text(told.get("uuid")), GPUInfo(text(told.get("uuid"))))
        gpu.host = host or gpu.host
        index = whole(told.get("index"))
        gpu.index = gpu.index if index is None else index
        gpu.name = text(told.get("name")) or gpu.name
        gpu.total_bytes = whole(told.get("total_bytes")) or gpu.total_bytes
        gpu.capacity_bytes = whole(told.get("capacity_bytes")) or gpu.capacity_bytes

    # Hosts

    def _host(self, event: Mapping[str, Any]) -> HostSpan | None:
        name = text(event.get("host"))
        if not name:
            return None
        self.tally.calls_of(name)  # from zero on
        return self.hosts.setdefault(name, HostSpan(name))

    def _on_host_joined(self, time: float, event: Mapping[str, Any]) -> None:
        if (host := self._host(event)) is None:
            return
        host.join(time, event)
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told, host.name)

    def _on_host_lost(self, time: float, event: Mapping[str, Any]) -> None:
        """End what the host has had: nobody writes that down."""
        if (host := self._host(event)) is None:
            return
        host.lose(time, event)
        for worker in self.running:
            if worker.host == host.name:
                del self._running[worker.call, worker.pid]
                worker.finished_at, worker.outcome = time, HOST_LOST
                self.tally.workers_finished[HOST_LOST] += 1
                self._count_call(worker)
        for leases in (self._gpu_leases, self._core_leases):
            leases.lose_host(time, host.name)

    def _leave_hosts(self, until: float) -> None:
        """Forget that hosts are there that joined until then: the run has other agents now."""
        for host in self.hosts.values():
            host.nodes = {node: told for node, told in host.nodes.items() if told[0] > until}
            host.is_lost = False

    def _count_call(self, worker: WorkerSpan) -> None:
        """Count a call that has ended among those of its host."""
        if (host := self.hosts.get(worker.host)) is not None:
            outcome = worker.outcome if worker.outcome in OUTCOMES else OTHER
            host.calls[outcome] += 1
            self.tally.calls_of(host.name)[outcome] += 1

    # Leases

    def _on_lease_requested(self, time: float, event: Mapping[str, Any]) -> None:
        self._gpu_leases.request(time, event)

    def _on_lease_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._gpu_leases.grant(time, event)
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told, span.host)
            span.memory_bytes[text(told.get("uuid"))] = whole(told.get("memory_bytes")) or 0
        self.tally.leases_granted += 1
        self.tally.lease_waits.add(span.waited_s)

    def _on_lease_not_granted(self, time: float, event: Mapping[str, Any]) -> None:
        self._gpu_leases.refuse(time, event)
        self.tally.leases_not_granted += 1

    def _on_lease_released(self, time: float, event: Mapping[str, Any]) -> None:
        self._gpu_leases.release(time, event)

    def _on_cores_requested(self, time: float, event: Mapping[str, Any]) -> None:
        self._core_leases.request(time, event)

    def _on_cores_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._core_leases.grant(time, event)
        self.tally.cores_granted += 1
        self.tally.cores_waits.add(span.waited_s)

    def _on_cores_not_granted(self, time: float, event: Mapping[str, Any]) -> None:
        self._core_leases.refuse(time, event)
        self.tally.cores_not_granted += 1

    def _on_cores_released(self, time: float, event: Mapping[str, Any]) -> None:
        self._core_leases.release(time, event)

    # Workers

    def _on_worker_started(self, time: float, event: Mapping[str, Any]) -> None:
        self._begin_worker(time, event)

    def _begin_worker(self, time: float, event: Mapping[str, Any]) -> WorkerSpan:
        worker = WorkerSpan(
            **whose(event),
            pid=whole(event.get("pid")) or 0,
            start_method=text(event.get("start_method")),
            lease=text(event.get("lease")),
            started_at=time,
            cores_lease=text(event.get("cores_lease")),
        )
        place = (worker.host, worker.pid)
        if event.get("used_again") is not True or place not in self._processes:
            self._started += 1
            self.tally.workers_started += 1
            self._processes[place] = self._started
        worker.process = self._processes[place]
        self._running[worker.call, worker.pid] = worker
        self._last_round = worker.round if worker.round is not None else self._last_round
        self.workers.append(worker)
        return worker

    def _on_task_started(self, time: float, event: Mapping[str, Any]) -> None:
        if (worker := self._of(event)) is not None:
            worker.task_at = time

    def _on_worker_result(self, time: float, event: Mapping[str, Any]) -> None:
        if (worker := self._of(event)) is not None:
            worker.result_at = time

    def _on_progress(self, time: float, event: Mapping[str, Any]) -> None:
        if (worker := self._of(event)) is not None:
            worker.task_at = worker.task_at or time
            worker.progress = (
                text(event.get("desc")), whole(event.get("n")) or 0, whole(event.get("total")),
            )  # fmt: skip

    def _on_worker_finished(self, time: float, event: Mapping[str, Any]) -> None:
        worker, outcome = self._of(event), text(event.get("outcome"))
        self.tally.workers_finished[outcome if outcome in OUTCOMES else OTHER] += 1
        if worker is None:  # the line of its start was cut off
            worker = self._begin_worker(time - (number(event.get("seconds")) or 0.0), event)
        if worker.round != self._calls_round:
            self._calls_round = worker.round
            self._calls_done.clear()
        if outcome != OUT_OF_MEMORY:  # most are tried again
            self._calls_done[worker.task] += 1
        if (lease := self.lease_of(worker)) is not None:
            lease.is_used = True
        del self._running[worker.call, worker.pid]
        worker.finished_at, worker.seconds = time, number(event.get("seconds"))
        self._worked_at = time
        worker.outcome, worker.error = outcome, text(event.get("error"))
        worker.traceback = text(event.get("traceback"))
        self._count_call(worker)
        worker.task_at = number(event.get("task_at")) or worker.task_at
        worker.result_at = number(event.get("result_at")) or worker.result_at
        for told in mappings(event.get("gpus")):
            if (nbytes := whole(told.get("peak_bytes"))) is not None:
                worker.peak_bytes[text(told.get("uuid"))] = nbytes
        is_of_round = self.open_round is not None and worker.round == self.open_round.round
        if self.open_round is not None and is_of_round:
            self.open_round.workers_finished += 1
            self.open_round.calls.append(CallFigures(worker.client, worker.seconds, worker.peak_bytes))

    def _on_out_of_memory(self, time: float, event: Mapping[str, Any]) -> None:
        then = text(event.get("then"))
        self.tally.out_of_memory[then if then in CONSEQUENCES else OTHER] += 1
        self.out_of_memory.append(OutOfMemory(time, text(event.get("uuid")), then))

    def _of(self, event: Mapping[str, Any]) -> WorkerSpan | None:
        return self._running.get((text(event.get("call")), whole(event.get("pid")) or 0))
