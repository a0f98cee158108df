"""What a trace tells, put together: a run, its hosts, leases, workers, rounds and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.apps.failures import COMPLETED
from flower_gpu.trace import SERVER_EVALUATE, Event
from flower_gpu.watch.fields import SERVER, mapping, mappings, metric_rank, number, text, whole, whose
from flower_gpu.watch.spans import (
    CANCELLED,
    CONSEQUENCES,
    HOST_LOST,
    MOST_HOSTS,
    OTHER,
    OUT_OF_MEMORY,
    OUTCOMES,
    FailureReasons,
    GPUInfo,
    GPUSample,
    HostSpan,
    LeaseCounts,
    LeaseSpan,
    OpenRound,
    OutOfMemory,
    RoundPart,
    Tally,
    WorkerSpan,
    drop_oldest,
)

_FEW: Final = 50  # of what is not forgotten with ``keep_finished=False``
# With ``keep_finished=False`` no trace makes this process grow, also one whose ends nobody has written down.
_MOST_OPEN: Final = 10_000
_MOST_PARTS: Final = 1_500  # of rounds: curves need more than the last few
_CURVES: Final = 3  # metrics that are kept of those
_MOST_UNFORGOTTEN: Final = 1_000  # events
#: Events that a host which is lost is named in, too.
_OF_LOST_HOSTS: Final = ("run_started", "host_joined", "host_lost")


class History:
    """A run, as far as its events tell; fed event by event, so that it can be followed while it goes on.

    Everything that shows a run or writes it down reads it here. With ``keep_finished=False`` what is over is
    forgotten, so that a long run takes no more and more memory. Then ``leases`` and ``workers`` are those
    that go on, ``samples`` the last of each GPU, ``out_of_memory`` the last few, ``rounds`` many of the last;
    with ``keep_rounds`` all rounds stay. Counts go into ``tally``, which runs may share.

    A method ``_on_<name>`` takes in the events of that name.
    """

    def __init__(
        self, *, keep_finished: bool = True, keep_rounds: bool = False, tally: Tally | None = None
    ) -> None:
        self._keep_finished = keep_finished
        self._keep_rounds = keep_rounds
        self._unforgotten = 0  # events since the last time
        self.tally = Tally() if tally is None else tally
        # Of the run; empty or None as long as that is not told.
        self.kind = self.name = self.host = self.version = ""
        self.settings: Mapping[str, Any] = {}  # that it was started with, the first time
        self.outcome = ""  # also empty for a run that was killed
        self.error = ""  # why it has failed
        self.facts: Mapping[str, Any] = {}  # what its engine tells at the end
        self.pid: int | None = None
        self.clients: int | None = None
        self.cores: int | None = None
        self.started_at: float | None = None
        self.begun_at: float | None = None  # the last time: a run may be resumed
        self.finished_at: float | None = None
        self.first_at: float | None = None  # of all events
        self.last_at: float | None = None
        self.waited_s = 0.0  # without any worker, since others had what its calls need
        self.pauses: list[tuple[float, float]] = []  # from the end of a run to when it was resumed
        self.cut_lines = 0  # of the trace, which are left out
        self._before: float | None = None  # the time of the event before this one
        self.hosts: dict[str, HostSpan] = {}  # of a Ray cluster, by name; empty for a run on one machine
        self.gpus: dict[str, GPUInfo] = {}  # by UUID, as the samples
        self.samples: dict[str, list[GPUSample]] = {}
        #: Requests for GPUs, or for cores and main memory alone, and leases on them, as they have begun.
        self.leases: list[LeaseSpan] = []
        self._waiting: dict[str, LeaseSpan] = {}  # requests without a lease, by call
        self._granted: dict[str, LeaseSpan] = {}  # by id
        self.workers: list[WorkerSpan] = []  # in the order of their starts
        self.out_of_memory: list[OutOfMemory] = []
        self._running: dict[tuple[str, int], WorkerSpan] = {}  # by call and pid
        self._processes: dict[tuple[str, int], int] = {}  # numbers of workers, by host and pid
        self._started = 0  # processes
        self._last_round: int | None = None  # of a worker
        self._calls_round: int | None = None
        self._calls_done: Counter[str] = Counter()  # of that round
        self._worked_at = 0.0  # when a worker was done last
        # Rounds, and their messages.
        self.strategy: str | None = None
        self.strategy_started_at: float | None = None
        self.num_rounds: int | None = None
        self.resumed_round: int | None = None
        self.highest_round = 0  # of those that have finished, in all their parts
        self._counted_round = 0  # the same, also where a resumed run does rounds again
        self._latest_round = 0  # of which a part has finished
        self._has_strategy = False  # one that is under way
        self.open_round: OpenRound | None = None  # messages that are under way
        self.closed_round: OpenRound | None = None  # the ones before, all of which are over
        self._parts: dict[tuple[int | None, str], RoundPart] = {}  # that have finished, by round and task
        # Kept up to date, because displays ask for them all the time and a run may have thousands of rounds.
        self._last_told: dict[str, tuple[float, Mapping[str, Any]]] = {}  # time and metrics, by task
        self._open_ends: dict[int, float] = {}  # times of the last parts, by round that is not over
        #: When the last of the rounds that are over has ended.
        self.rounds_ended_at: float | None = None
        self._sent = self._failed = 0  # messages of these parts
        self._sent_before = 0  # of which so many were sent before the run was resumed
        # Replies of the parts that are under way, by round, task and whether they are errors.
        self._replied: Counter[tuple[int | None, str, bool]] = Counter()
        self._told_counts: tuple[int, int] | None = None  # messages and failed ones, as told at the end
        self.failures = FailureReasons()  # of replies that are errors
        self.all_failed = ""  # why the run computes nothing, once that is so

    @classmethod
    def read(cls, path: Path, *, keep_finished: bool = True) -> History:
        """Read a whole trace, and keep all its rounds."""
        history = cls(keep_finished=keep_finished, keep_rounds=True)

        def count() -> None:
            history.cut_lines += 1

        history.feed(trace.read(path, on_cut=count))
        return history

    def feed(self, events: Iterable[Event]) -> None:
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
            self._unforgotten += 1
            if self._unforgotten >= _MOST_UNFORGOTTEN:
                self._forget_finished()
        self._forget_finished()

    # What there is now

    @property
    def waiting(self) -> list[LeaseSpan]:
        """Requests that wait for a lease, the oldest first."""
        return list(self._waiting.values())

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
        """Return the lease that a worker has; None where it has none."""
        return self._granted.get(worker.lease)

    @property
    def current_round(self) -> int | None:
        """The round that is under way, or was last: the highest that anything is of."""
        if self.open_round is not None and self.open_round.round is not None:
            return self.open_round.round
        told = [worker.round for worker in self.running]
        told += [number for number, _ in islice(reversed(self._parts), 1)]
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

    # What came of it

    @property
    def rounds(self) -> list[RoundPart]:
        """What has finished of each round, by task; ``round`` is None for messages that say none."""
        return list(self._parts.values())

    def part(self, server_round: int | None, task: str) -> RoundPart | None:
        """Return what has finished of a round for a task."""
        return self._parts.get((server_round, task))

    def newest_parts(self) -> Iterator[RoundPart]:
        """Yield what has finished of each round, the newest part first."""
        return reversed(self._parts.values())

    @property
    def evaluations(self) -> list[RoundPart]:
        """What has finished, of rounds with a number."""
        return [part for part in self._parts.values() if part.round is not None]

    @property
    def last_metrics(self) -> dict[str, Mapping[str, Any]]:
        """The last metrics of each task, as told; the latest at the end."""
        by_time = sorted(self._last_told.items(), key=lambda item: item[1][0])
        return {task: told for task, (_, told) in by_time}

    @property
    def messages_sent(self) -> int:
        """How many messages are over: those of parts that have finished, and those with a reply."""
        return self._sent + self._replied.total() if self._told_counts is None else self._told_counts[0]

    @property
    def messages_failed(self) -> int:
        """How many of these have failed."""
        if self._told_counts is not None:
            return self._told_counts[1]
        return self._failed + sum(count for (*_, is_error), count in self._replied.items() if is_error)

    @property
    def seconds(self) -> float | None:
        """How long the run has taken since it has begun, or was resumed, the last time."""
        end = self.last_at if self.finished_at is None else self.finished_at
        return None if self.begun_at is None or end is None else max(0.0, end - self.begun_at)

    @property
    def messages_per_s(self) -> float | None:
        """How many messages a second were over in this time."""
        return (self.messages_sent - self._sent_before) / self.seconds if self.seconds else None

    def over_at(self, since: float, end: float) -> float:
        """Return the latest possible end of a span: the end of its part of the run, or of the trace."""
        return min((begin for begin, _ in self.pauses if begin >= since), default=end)

    def _forget_finished(self) -> None:
        self._unforgotten = 0
        if self._keep_finished:
            return
        drop_oldest(self._waiting, _MOST_OPEN)
        drop_oldest(self._granted, _MOST_OPEN)
        self._granted = {id_: span for id_, span in self._granted.items() if span.released_at is None}
        self.leases = [*self._waiting.values(), *self._granted.values()]
        for span in self.leases:
            del span.turns[:-1]
        drop_oldest(self._running, _MOST_OPEN)
        drop_oldest(self._processes, _MOST_OPEN)
        if not self._keep_rounds:
            drop_oldest(self._parts, _MOST_PARTS)
            for part in islice(reversed(self._parts.values()), _FEW, None):
                if part.told:  # a curve needs no more of it
                    kept = sorted(part.metrics, key=metric_rank)[:_CURVES]
                    part.told, part.metrics = {}, {name: part.metrics[name] for name in kept}
        drop_oldest(self._last_told, _FEW)
        drop_oldest(self._open_ends, _FEW)
        drop_oldest(self.hosts, MOST_HOSTS)
        self.workers = list(self._running.values())
        for samples in self.samples.values():
            del samples[:-1]
        del self.out_of_memory[:-_FEW]
        del self.pauses[:-_FEW]

    # The run

    def _on_run_started(self, time: float, event: Event) -> None:
        is_alone = event.get("kind") != "supernodes"  # on one host, by one command at a time
        # Of two hosts that share a folder, each says that the run begins: then nothing has ended.
        goes_on = self.finished_at is not None or is_alone
        before = self._before if self.finished_at is None else self.finished_at
        if self.started_at is not None and goes_on and before is not None and before < time:
            self.pauses.append((before, time))
            self._leave_hosts(before)
        self._told_counts = None
        if is_alone:  # whoever goes on sends again what says no round, and what had no end
            self._replied.clear()
            self._take_back(lambda server_round: server_round is None)
        self._sent_before = self._sent
        # A run that is resumed begins again; its times are those of the first.
        self.started_at = time if self.started_at is None else self.started_at
        self.begun_at = time
        self.waited_s = 0.0  # like `seconds`, of the last part of a resumed run
        self.finished_at, self.outcome, self.error, self.facts, self.all_failed = None, "", "", {}, ""
        if not self._keep_finished:  # what the one before has left open was killed with it
            self._waiting, self._granted, self._running = {}, {}, {}
        self.kind, self.name = text(event.get("kind")), text(event.get("name"))
        self.host, self.pid = text(event.get("host")), whole(event.get("pid"))
        self.version = text(event.get("version"))
        self.settings = self.settings or mapping(event.get("settings"))
        self.clients, self.cores = whole(event.get("clients")), whole(event.get("cores"))
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        self._learn_gpus(event, self.host)

    def _on_run_finished(self, time: float, event: Event) -> None:
        self.finished_at, self.outcome = time, text(event.get("outcome"))
        self.error, self.facts = text(event.get("error")), mapping(event.get("facts"))
        if (messages := whole(event.get("messages"))) is not None:  # the trace may lack replies
            self._told_counts = messages, whole(event.get("failed")) or 0
        if self.outcome == COMPLETED:
            self._finish_rounds(self._latest_round)
        self.open_round = None

    def _on_run_waited(self, time: float, event: Event) -> None:
        self.waited_s += max(0.0, number(event.get("seconds")) or 0.0)

    def _on_all_failed(self, time: float, event: Event) -> None:
        self.all_failed = self.all_failed or text(event.get("reason"))

    def _on_gpu_sample(self, time: float, event: Event) -> None:
        self._learn_gpus(event, text(event.get("host")))
        for told in mappings(event.get("gpus")):
            self.samples.setdefault(text(told.get("uuid")), []).append(
                GPUSample(
                    time,
                    whole(told.get("used_bytes")),
                    number(told.get("utilization_percent")),
                    number(told.get("temperature_c")),
                )
            )

    def _learn_gpus(self, event: Event, host: str) -> None:
        for told in mappings(event.get("gpus")):
            uuid = text(told.get("uuid"))
            self.gpus.setdefault(uuid, GPUInfo(uuid)).learn(told, host)

    # Hosts

    def _is_late(self, event: Event) -> bool:
        """Tell whether a host says this that is lost: all that it had has ended."""
        host = self.hosts.get(text(event.get("host")))
        return host is not None and host.is_lost and event.get("event") not in _OF_LOST_HOSTS

    def _host(self, event: Event) -> HostSpan | None:
        name = text(event.get("host"))
        if not name:
            return None
        self.tally.calls_of(name)  # from zero on
        return self.hosts.setdefault(name, HostSpan(name))

    def _on_host_joined(self, time: float, event: Event) -> None:
        if (host := self._host(event)) is not None:
            host.join(time, event)
            self._learn_gpus(event, host.name)

    def _on_host_lost(self, time: float, event: Event) -> None:
        """End the host's workers and leases, of which there are no further lines."""
        if (host := self._host(event)) is None:
            return
        host.lose(time, event)
        for worker in self.running:
            if worker.host == host.name:
                del self._running[worker.call, worker.pid]
                worker.finished_at, worker.outcome = time, HOST_LOST
                self.tally.workers_finished[HOST_LOST] += 1
                self._count_call(worker)
        for request in self.waiting:
            if request.host == host.name:
                del self._waiting[request.call]
                request.refused_at, request.is_lost = time, True
        for lease in self._granted.values():
            if lease.host == host.name and lease.released_at is None:
                lease.released_at, lease.is_lost = time, True

    def _leave_hosts(self, until: float) -> None:
        """Forget that hosts are there that joined until then: the run has other agents now."""
        for host in self.hosts.values():
            host.nodes = {node: told for node, told in host.nodes.items() if told[0] > until}
            host.is_lost = False

    def _count_call(self, worker: WorkerSpan) -> None:
        """Count a call that has ended among those of its host."""
        if worker.host in self.hosts:
            self.tally.calls_of(worker.host)[worker.outcome if worker.outcome in OUTCOMES else OTHER] += 1

    # Leases

    def _on_lease_requested(self, time: float, event: Event) -> None:
        span = self._new_lease(event)
        span.requested_at, span.caller_pid = time, whole(event.get("caller_pid"))
        self._waiting[span.call] = span

    def _on_lease_granted(self, time: float, event: Event) -> None:
        span = self._waiting.pop(text(event.get("call")), None)
        if span is None:  # the line of its request was cut off
            span = self._new_lease(event)
        span.grant(time, event)
        self._granted[span.id] = span
        self._learn_gpus(event, span.host)
        self._counts_of(event).grant(span.waited_s)

    def _on_lease_not_granted(self, time: float, event: Event) -> None:
        if (span := self._waiting.pop(text(event.get("call")), None)) is not None:
            span.refuse(time, event)
        self._counts_of(event).refused += 1

    def _on_lease_released(self, time: float, event: Event) -> None:
        if (span := self._granted.get(text(event.get("lease")))) is not None:
            span.released_at = time

    _on_cores_requested, _on_cores_granted = _on_lease_requested, _on_lease_granted
    _on_cores_not_granted, _on_cores_released = _on_lease_not_granted, _on_lease_released

    def _new_lease(self, event: Event) -> LeaseSpan:
        span = LeaseSpan(**whose(event))
        self.leases.append(span)
        return span

    def _counts_of(self, event: Event) -> LeaseCounts:
        return self.tally.cores if text(event.get("event")).startswith("cores_") else self.tally.leases

    # Workers

    def _on_worker_started(self, time: float, event: Event) -> None:
        self._begin_worker(time, event)

    def _begin_worker(self, time: float, event: Event) -> WorkerSpan:
        worker = WorkerSpan(
            **whose(event),
            pid=whole(event.get("pid")) or 0,
            start_method=text(event.get("start_method")),
            lease=text(event.get("lease")) or text(event.get("cores_lease")),
            started_at=time,
            own=mapping(event.get("own")),
        )
        place = (worker.host, worker.pid)
        if event.get("used_again") is not True or place not in self._processes:
            self._started += 1
            self.tally.workers_started += 1
            self._processes[place] = self._started
        worker.process = self._processes[place]
        self._running[worker.call, worker.pid] = worker
        if (lease := self.lease_of(worker)) is not None and worker.call != lease.call:
            lease.turns.append((time, worker.client))
        self._last_round = worker.round if worker.round is not None else self._last_round
        self.workers.append(worker)
        return worker

    def _on_task_started(self, time: float, event: Event) -> None:
        if (worker := self._worker_of(event)) is not None:
            worker.task_at = time

    def _on_worker_result(self, time: float, event: Event) -> None:
        if (worker := self._worker_of(event)) is not None:
            worker.result_at = time

    def _on_progress(self, time: float, event: Event) -> None:
        if (worker := self._worker_of(event)) is not None:
            worker.task_at = worker.task_at or time
            done, total = whole(event.get("n")) or 0, whole(event.get("total"))
            worker.progress = text(event.get("desc")), done, total

    def _on_worker_finished(self, time: float, event: Event) -> None:
        worker, outcome = self._worker_of(event), text(event.get("outcome"))
        self.tally.workers_finished[outcome if outcome in OUTCOMES else OTHER] += 1
        if outcome != CANCELLED and text(event.get("client")) != SERVER:
            self.tally.calls_by_use[event.get("used_again") is True, outcome != "ok"] += 1
        if worker is None:  # the line of its start was cut off
            worker = self._begin_worker(time - (number(event.get("seconds")) or 0.0), event)
        if worker.round == (current := self.current_round):  # with FedBuff, others are of earlier rounds
            if current != self._calls_round:
                self._calls_round = current
                self._calls_done.clear()
            if outcome != OUT_OF_MEMORY:  # most are tried again
                self._calls_done[worker.task] += 1
        if (lease := self.lease_of(worker)) is not None:
            lease.is_used = True
        del self._running[worker.call, worker.pid]
        self._worked_at = time
        worker.finish(time, event)
        self._count_call(worker)
        if self.open_round is not None and worker.round == self.open_round.round:
            self.open_round.calls.append(worker)

    def _worker_of(self, event: Event) -> WorkerSpan | None:
        return self._running.get((text(event.get("call")), whole(event.get("pid")) or 0))

    def _on_out_of_memory(self, time: float, event: Event) -> None:
        then = text(event.get("then"))
        self.tally.out_of_memory[then if then in CONSEQUENCES else OTHER] += 1
        self.out_of_memory.append(OutOfMemory(time, text(event.get("uuid")), then))

    # Rounds

    def _on_strategy_started(self, time: float, event: Event) -> None:
        self.strategy, self.strategy_started_at = text(event.get("strategy")), time
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        self._has_strategy = True

    def _on_strategy_finished(self, time: float, event: Event) -> None:
        self._has_strategy = False
        self._finish_rounds(self._latest_round)

    def _on_strategy_resumed(self, time: float, event: Event) -> None:
        self.resumed_round = after = whole(event.get("round"))
        if after is not None:
            self._latest_round = self.highest_round = min(self.highest_round, after)
            self._take_back(lambda server_round: (server_round or 0) > after)

    def _take_back(self, is_again: Callable[[int | None], bool]) -> None:
        """Forget the rounds that a resumed run does again."""
        for key in [key for key in self._parts if is_again(key[0])]:
            part = self._parts.pop(key)
            self._sent -= part.messages
            self._sent_before -= part.messages
            self._failed -= part.failed
        self.failures.take_back(is_again)
        self._last_told.clear()
        self._open_ends.clear()
        self.rounds_ended_at = None
        for part in self._parts.values():
            self._note_end(part)

    def _note_end(self, part: RoundPart) -> None:
        """Note the metrics and the time of a part, for displays that ask again and again."""
        if part.told and part.time >= self._last_told.get(part.task, (part.time,))[0]:
            self._last_told.pop(part.task, None)  # so that the oldest one is the first
            self._last_told[part.task] = part.time, part.told
        if part.round is not None:
            self._open_ends[part.round] = max(part.time, self._open_ends.get(part.round, part.time))
            self._end_rounds()

    def _end_rounds(self) -> None:
        over = [server_round for server_round in self._open_ends if server_round <= self.highest_round]
        for server_round in over:
            ended_at = self._open_ends.pop(server_round)
            self.rounds_ended_at = max(ended_at, self.rounds_ended_at or ended_at)

    def _on_round_started(self, time: float, event: Event) -> None:
        server_round = whole(event.get("round"))
        self.open_round = OpenRound(server_round, text(event.get("task")), whole(event.get("messages")), time)
        self._finish_rounds(min(self._latest_round, (server_round or 0) - 1))

    def _on_round_grew(self, time: float, event: Event) -> None:
        if (open_round := self._open_round_of(event)) is not None:
            open_round.messages = whole(event.get("messages"))

    def _on_reply(self, time: float, event: Event) -> None:
        has_failed = event.get("error") is not None
        self._replied[whole(event.get("round")), text(event.get("task")), has_failed] += 1
        if (open_round := self._open_round_of(event)) is not None:
            open_round.reply(time, event)
        if has_failed:
            self.failures.add(event)

    def _open_round_of(self, event: Event) -> OpenRound | None:
        told = (whole(event.get("round")), text(event.get("task")))
        one = self.open_round
        return one if one is not None and (one.round, one.task) == told else None

    def _on_round_finished(self, time: float, event: Event) -> None:
        task = text(event.get("task"))
        if self.open_round is not None and self.open_round.task == task:
            self.closed_round, self.open_round = self.open_round, None
        self._finish_part(time, event, task)

    def _on_round(self, time: float, event: Event) -> None:
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        self._finish_part(time, event, SERVER_EVALUATE)

    def _finish_part(self, time: float, event: Event, task: str) -> None:
        server_round = whole(event.get("round"))
        self._latest_round = max(self._latest_round, server_round or 0)
        if not self._has_strategy:
            self._finish_rounds(self._latest_round)
        messages, failed = whole(event.get("messages")) or 0, whole(event.get("failed")) or 0
        part = self._parts.setdefault((server_round, task), RoundPart(time, server_round, task))
        part.finish(time, event, messages, failed)
        self._note_end(part)
        self._sent += messages
        self._failed += failed
        for key in list(self._replied):
            if key[0] in (server_round, None) and key[1] == task:  # its round may be known at the end only
                del self._replied[key]

    def _finish_rounds(self, last: int) -> None:
        """Take note that all rounds up to this one are over."""
        self.highest_round = max(self.highest_round, last)
        self._end_rounds()
        if last > self._counted_round:
            self.tally.rounds_finished += 1
            self._counted_round = last
