"""What a trace tells, put together: a run, its hosts, leases, workers, rounds and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.trace import SERVER_EVALUATE
from flower_gpu.watch.fields import mappings, node_id, number, text, whole
from flower_gpu.watch.spans import (
    CONSEQUENCES,
    HOST_LOST,
    MOST_HOSTS,
    OTHER,
    OUT_OF_MEMORY,
    OUTCOMES,
    CallFigures,
    FailureReasons,
    GPUInfo,
    GPUSample,
    HostSpan,
    LeaseSpan,
    OpenRound,
    OutOfMemory,
    RoundPart,
    Tally,
    WorkerSpan,
)

_FEW: Final = 50  # of what is not forgotten with ``keep_finished=False``
# With ``keep_finished=False`` no trace makes this process grow, also one whose ends nobody has written down.
_MOST_OPEN: Final = 10_000
_MOST_METRICS: Final = 1000  # of an evaluation
#: Events that a host which is lost is named in, too.
_OF_LOST_HOSTS: Final = ("run_started", "host_joined", "host_lost")


class History:
    """A run, as far as its events tell; fed event by event, so that it can be followed while it goes on.

    Everything that shows a run or writes it down reads it here. With ``keep_finished=False`` what is over is
    forgotten, so that a long run takes no more and more memory. Then ``leases`` and ``workers`` are those
    that go on, ``samples`` the last of each GPU, ``rounds`` and ``out_of_memory`` the last few; with
    ``keep_rounds`` all rounds stay. Counts go into ``tally``, which runs may share.
    """

    def __init__(
        self, *, keep_finished: bool = True, keep_rounds: bool = False, tally: Tally | None = None
    ) -> None:
        self._keep_finished = keep_finished
        self._keep_rounds = keep_rounds
        self.tally = Tally() if tally is None else tally
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
        self.pauses: list[tuple[float, float]] = []  # from the end of a run to when it was resumed
        # Messages to clients: as the run has told at its end, and as its rounds tell.
        self.failed_messages: int | None = None
        self.all_messages: int | None = None
        self.messages_sent = self.messages_failed = 0
        self.failures = FailureReasons()  # of replies that are errors
        self.all_failed = ""  # why the run computes nothing, once that is so
        # Rounds.
        self.strategy: str | None = None
        self.strategy_started_at: float | None = None
        self.num_rounds: int | None = None
        self.resumed_round: int | None = None
        self.highest_round = 0  # of those that have finished
        self.last_metrics: dict[str, Mapping[str, Any]] = {}  # by task, as told
        self.open_round: OpenRound | None = None  # messages that are under way
        self.closed_round: OpenRound | None = None  # the ones before, all of which are over
        self._parts: dict[tuple[int | None, str], RoundPart] = {}  # that have finished, by round and task
        self.hosts: dict[str, HostSpan] = {}  # of a Ray cluster, by name; empty for a run on one machine
        # GPUs by UUID; leases and workers in the order of their starts.
        self.gpus: dict[str, GPUInfo] = {}
        self.samples: dict[str, list[GPUSample]] = {}
        self.leases: list[LeaseSpan] = []
        self.workers: list[WorkerSpan] = []
        self.out_of_memory: list[OutOfMemory] = []
        self.cores_leases: list[LeaseSpan] = []  # of calls on the CPU
        self._requests: dict[str, LeaseSpan] = {}  # by call, that wait
        self._cores_requests: dict[str, LeaseSpan] = {}  # the same, for cores
        self._cores_leases: dict[str, LeaseSpan] = {}  # by id
        self._leases: dict[str, LeaseSpan] = {}  # by id
        self._running: dict[tuple[str, int], WorkerSpan] = {}  # by call and pid
        self._last_round: int | None = None  # of a worker
        self._calls_round: int | None = None
        self._calls_done: Counter[str] = Counter()  # of that round
        self._before: float | None = None  # the time of the event before this one

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
    def rounds(self) -> list[RoundPart]:
        """What has finished of each round, by task; ``round`` is None for messages that say none."""
        return list(self._parts.values())

    @property
    def evaluations(self) -> list[RoundPart]:
        """What has finished, of rounds with a number."""
        return [part for part in self._parts.values() if part.round is not None]

    @property
    def waiting(self) -> list[LeaseSpan]:
        """Requests that wait for a lease, the oldest first."""
        return [*self._requests.values(), *self._cores_requests.values()]

    @property
    def running(self) -> list[WorkerSpan]:
        """Workers that have not ended, the oldest first."""
        return list(self._running.values())

    def messages_under_way(self, host: str) -> int:
        """Return how many messages a worker handles on a host of a Ray cluster, or wait for a lease there."""
        running = sum(one.host == host and not one.is_copy for one in self.running)
        return running + sum(one.host == host for one in self.waiting)

    def lease_of(self, worker: WorkerSpan) -> LeaseSpan | None:
        """Return the lease that a worker has; on the CPU the one on cores; None where it has neither."""
        return self._leases.get(worker.lease) or self._cores_leases.get(worker.cores_lease)

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
        for spans in (self._running, self._requests, self._leases, self._cores_requests):
            _drop_oldest(spans, _MOST_OPEN)
        _drop_oldest(self._cores_leases, _MOST_OPEN)
        self._cores_leases = {i: span for i, span in self._cores_leases.items() if span.released_at is None}
        self.cores_leases = [*self._cores_requests.values(), *self._cores_leases.values()]
        if not self._keep_rounds:
            _drop_oldest(self._parts, _FEW)
        _drop_oldest(self.last_metrics, _FEW)
        _drop_oldest(self.hosts, MOST_HOSTS)
        self.workers = list(self._running.values())
        self._leases = {id_: span for id_, span in self._leases.items() if span.released_at is None}
        self.leases = [*self._requests.values(), *self._leases.values()]
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
        # A run that is resumed begins again; its times are those of the first.
        self.started_at = time if self.started_at is None else self.started_at
        self.finished_at, self.outcome = None, ""
        if not self._keep_finished:  # what the one before has left open was killed with it
            self._requests, self._leases, self._running = {}, {}, {}
            self._cores_requests, self._cores_leases = {}, {}
        self.kind, self.name = text(event.get("kind")), text(event.get("name"))
        self.host, self.pid = text(event.get("host")), whole(event.get("pid"))
        self.version = text(event.get("version"))
        self.clients, self.cores = whole(event.get("clients")), whole(event.get("cores"))
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told, self.host)

    def _on_run_finished(self, time: float, event: Mapping[str, Any]) -> None:
        self.finished_at, self.outcome = time, text(event.get("outcome"))
        self.failed_messages, self.all_messages = whole(event.get("failed")), whole(event.get("messages"))
        self.open_round = None

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
        for requests in (self._requests, self._cores_requests):
            for request in list(requests.values()):
                if request.host == host.name:
                    del requests[request.call]
                    request.refused_at, request.is_lost = time, True
        for lease in (*self._leases.values(), *self._cores_leases.values()):
            if lease.host == host.name and lease.released_at is None:
                lease.released_at, lease.is_lost = time, True

    def _leave_hosts(self, until: float) -> None:
        """Forget that hosts are there that joined until then: the run has other agents now."""
        for host in self.hosts.values():
            host.nodes = {node: told for node, told in host.nodes.items() if told[0] > until}
            host.is_lost = False

    def _count_call(self, worker: WorkerSpan) -> None:
        """Count a call that has ended among those of its host."""
        if (host := self.hosts.get(worker.host)) is not None and not worker.is_copy:
            outcome = worker.outcome if worker.outcome in OUTCOMES else OTHER
            host.calls[outcome] += 1
            self.tally.calls_of(host.name)[outcome] += 1

    # Rounds

    def _on_strategy_started(self, time: float, event: Mapping[str, Any]) -> None:
        self.strategy, self.strategy_started_at = text(event.get("strategy")), time
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds

    def _on_strategy_resumed(self, time: float, event: Mapping[str, Any]) -> None:
        self.resumed_round = after = whole(event.get("round"))
        if after is not None:  # what had finished of later rounds is done again
            self._parts = {key: part for key, part in self._parts.items() if (key[0] or 0) <= after}

    def _on_all_failed(self, time: float, event: Mapping[str, Any]) -> None:
        self.all_failed = self.all_failed or text(event.get("reason"))

    def _on_round_started(self, time: float, event: Mapping[str, Any]) -> None:
        self.open_round = OpenRound(
            whole(event.get("round")), text(event.get("task")), whole(event.get("messages")), time
        )

    def _on_round_grew(self, time: float, event: Mapping[str, Any]) -> None:
        if (open_round := self._open_round_of(event)) is not None:
            open_round.messages = whole(event.get("messages"))

    def _on_reply(self, time: float, event: Mapping[str, Any]) -> None:
        has_failed = event.get("error") is not None
        if (open_round := self._open_round_of(event)) is not None:
            open_round.replies += 1
            open_round.failed += has_failed
            open_round.replied_at.append(time)
            if open_round.first_reply_at is None:
                open_round.first_reply_at = time
            if (node := node_id(event.get("node"))) is not None and (
                figures := _figures(event.get("metrics"))
            ):
                open_round.client_metrics[node] = figures
        if has_failed:
            self.failures.add(event)

    def _open_round_of(self, event: Mapping[str, Any]) -> OpenRound | None:
        told = (whole(event.get("round")), text(event.get("task")))
        one = self.open_round
        return one if one is not None and (one.round, one.task) == told else None

    def _on_round_finished(self, time: float, event: Mapping[str, Any]) -> None:
        task = text(event.get("task"))
        if self.open_round is not None and self.open_round.task == task:
            self.closed_round, self.open_round = self.open_round, None
        self._finish_part(time, event, task)

    def _on_round(self, time: float, event: Mapping[str, Any]) -> None:
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        self._finish_part(time, event, SERVER_EVALUATE)

    def _finish_part(self, time: float, event: Mapping[str, Any], task: str) -> None:
        server_round, metrics = whole(event.get("round")), event.get("metrics")
        if server_round is not None and server_round > self.highest_round:  # a resumed run does some again
            self.highest_round = server_round
            self.tally.rounds_finished += 1
        told = dict(islice(metrics.items(), _MOST_METRICS)) if isinstance(metrics, Mapping) else {}
        if told:
            self.last_metrics.pop(task, None)
            self.last_metrics[task] = told
        # A strategy and a simulation may both tell it.
        part = self._parts.setdefault((server_round, task), RoundPart(time, server_round, task))
        part.time, part.told = time, dict(islice({**part.told, **told}.items(), _MOST_METRICS))
        part.metrics = _figures(part.told)
        seconds = number(event.get("seconds"))
        part.seconds = part.seconds if seconds is None else seconds
        sent, failed = whole(event.get("messages")) or 0, whole(event.get("failed")) or 0
        part.messages += sent
        part.failed += failed
        self.messages_sent += sent
        self.messages_failed += failed

    # Leases

    def _on_lease_requested(self, time: float, event: Mapping[str, Any]) -> None:
        span = LeaseSpan(**_whose(event), requested_at=time, caller_pid=whole(event.get("caller_pid")))
        self._requests[span.call] = span
        self.leases.append(span)

    def _on_lease_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._requests.pop(text(event.get("call")), None)
        if span is None:
            span = LeaseSpan(**_whose(event), requested_at=None)
            self.leases.append(span)
        span.granted_at, span.id = time, text(event.get("lease"))
        span.cores, span.host_memory_bytes = number(event.get("cores")), whole(event.get("host_memory_bytes"))
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told, span.host)
            span.memory_bytes[text(told.get("uuid"))] = whole(told.get("memory_bytes")) or 0
        self._leases[span.id] = span
        self.tally.leases_granted += 1
        span.waited_s = max(0.0, number(event.get("waited_s")) or 0.0)
        self.tally.lease_waits.add(span.waited_s)

    def _on_lease_not_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._requests.pop(text(event.get("call")), None)
        if span is not None:
            span.refused_at = time
        self.tally.leases_not_granted += 1

    def _on_lease_released(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._leases.get(text(event.get("lease")))
        if span is not None:
            span.released_at = time

    def _on_cores_requested(self, time: float, event: Mapping[str, Any]) -> None:
        span = LeaseSpan(**_whose(event), requested_at=time, caller_pid=whole(event.get("caller_pid")))
        self._cores_requests[span.call] = span
        self.cores_leases.append(span)

    def _on_cores_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._cores_requests.pop(text(event.get("call")), None)
        if span is None:
            span = LeaseSpan(**_whose(event), requested_at=None)
            self.cores_leases.append(span)
        span.granted_at, span.id = time, text(event.get("lease"))
        span.cores, span.host_memory_bytes = number(event.get("cores")), whole(event.get("host_memory_bytes"))
        span.waited_s = max(0.0, number(event.get("waited_s")) or 0.0)
        self._cores_leases[span.id] = span
        self.tally.cores_granted += 1
        self.tally.cores_waits.add(span.waited_s)

    def _on_cores_not_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._cores_requests.pop(text(event.get("call")), None)
        if span is not None:
            span.refused_at = time
        self.tally.cores_not_granted += 1

    def _on_cores_released(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._cores_leases.get(text(event.get("lease")))
        if span is not None:
            span.released_at = time

    # Workers

    def _on_worker_started(self, time: float, event: Mapping[str, Any]) -> None:
        self._begin_worker(time, event)
        self.tally.workers_started += 1

    def _begin_worker(self, time: float, event: Mapping[str, Any]) -> WorkerSpan:
        worker = WorkerSpan(
            **_whose(event),
            pid=whole(event.get("pid")) or 0,
            start_method=text(event.get("start_method")),
            lease=text(event.get("lease")),
            started_at=time,
            cores_lease=text(event.get("cores_lease")),
            is_copy=event.get("copy") is True,
        )
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
        if outcome != OUT_OF_MEMORY and not worker.is_copy:  # most are tried again
            self._calls_done[worker.task] += 1
        if (lease := self.lease_of(worker)) is not None:
            lease.is_used = True
        del self._running[worker.call, worker.pid]
        worker.finished_at, worker.seconds = time, number(event.get("seconds"))
        worker.outcome, worker.error = outcome, text(event.get("error"))
        worker.traceback = text(event.get("traceback"))
        self._count_call(worker)
        worker.task_at = number(event.get("task_at")) or worker.task_at
        worker.result_at = number(event.get("result_at")) or worker.result_at
        for told in mappings(event.get("gpus")):
            if (nbytes := whole(told.get("peak_bytes"))) is not None:
                worker.peak_bytes[text(told.get("uuid"))] = nbytes
        is_of_round = self.open_round is not None and worker.round == self.open_round.round
        if self.open_round is not None and is_of_round and not worker.is_copy:
            self.open_round.workers_finished += 1
            self.open_round.calls.append(CallFigures(worker.client, worker.seconds, worker.peak_bytes))

    def _on_out_of_memory(self, time: float, event: Mapping[str, Any]) -> None:
        then = text(event.get("then"))
        self.tally.out_of_memory[then if then in CONSEQUENCES else OTHER] += 1
        self.out_of_memory.append(OutOfMemory(time, text(event.get("uuid")), then))

    def _of(self, event: Mapping[str, Any]) -> WorkerSpan | None:
        return self._running.get((text(event.get("call")), whole(event.get("pid")) or 0))


def _figures(metrics: object) -> dict[str, float]:
    """Return the first of these metrics that are numbers."""
    told = islice(metrics.items(), _MOST_METRICS) if isinstance(metrics, Mapping) else ()
    figures = {str(name): number(value) for name, value in told}
    return {name: figure for name, figure in figures.items() if figure is not None}


def _drop_oldest(found: dict[Any, Any], most: int) -> None:
    if len(found) > most:
        for key in list(islice(found, len(found) - most)):
            del found[key]


def _whose(event: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: text(event.get(name)) for name in ("call", "client", "task", "host")}
    return {**texts, "round": whole(event.get("round"))}
