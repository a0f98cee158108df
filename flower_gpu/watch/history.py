"""Folds the events of a trace into the state of a run: hosts, leases, workers, rounds and GPUs.

The problem: a trace is a list of events such as ``lease_granted`` or ``round_finished``. Displays, reports
and metrics need the state that results from these events. They must agree, so only this module computes it.

The object: a :class:`History` takes in one event after the other and updates its attributes. It reads no
files except in :meth:`History.read`, starts no threads and has no locks. Code that shares it between
threads has to serialize the calls.

Terms: a *part* of a round is all messages of the round with the same task, such as ``train``, or the server's
own evaluation. A *span* is a host, lease or worker with the times at which it began and ended. A *call* is
the handling of one message by a worker.

Incomplete traces: a killed process does not report the end of its workers, and a full disk cuts lines. So
each handler accepts an end without a beginning, and the reverse. A resumed run appends to the same trace and
repeats its last rounds. So the handlers remove the first attempt of a repeated round from the results.

Memory: a view of a run in progress needs neither finished workers nor old samples. With
``keep_finished=False``, the history drops them after every ``_EVENTS_PER_CLEANUP`` events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.apps.failures import COMPLETED
from flower_gpu.trace import SERVER_EVALUATE, Event
from flower_gpu.watch.fields import (
    SERVER,
    mapping,
    mappings,
    metric_rank,
    number,
    owner_fields,
    text,
    whole_number,
)
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

# The following limits apply with ``keep_finished=False``.
# Number of recent entries that each list of finished items keeps.
_KEPT_ENTRIES: Final = 50
# Maximum number of unfinished items of each kind. Without a maximum, memory use would grow without bound if a
# trace never reports their ends.
_MOST_OPEN: Final = 10_000
# Maximum number of parts of rounds. It is larger than _KEPT_ENTRIES, because displays draw curves over many
# rounds.
_MOST_PARTS: Final = 1_500
# Number of metrics that a part keeps for the curves when it is no longer recent.
_KEPT_METRICS: Final = 3
_EVENTS_PER_CLEANUP: Final = 1_000
#: Events that are processed even if they name a lost host. Other events of a lost host come too late.
_EVENTS_ABOUT_LOST_HOSTS: Final = ("run_started", "host_joined", "host_lost")


class History:
    """The state of a run, according to the events received until now.

    All displays, reports and metrics of a run read its history. The events arrive one by one, so a run can be
    followed while it is in progress.

    With ``keep_finished=False``, the history drops finished items, so the memory of this process stays
    bounded during a long run. It keeps the following:

    - ``leases`` and ``workers``: only unfinished ones
    - ``samples``: only the last sample of each GPU
    - ``out_of_memory``: the last few events
    - ``rounds``: many recent parts, or all parts with ``keep_rounds=True``

    Counts go into ``tally`` and are never dropped. Several runs may share a tally.

    The method ``_on_<name>`` handles the events with that name.
    """

    def __init__(
        self, *, keep_finished: bool = True, keep_rounds: bool = False, tally: Tally | None = None
    ) -> None:
        self._keep_finished = keep_finished
        self._keep_rounds = keep_rounds
        self._events_since_cleanup = 0
        self.tally = Tally() if tally is None else tally
        # Facts about the run. They are empty or None until an event reports them.
        self.kind = self.name = self.host = self.version = ""
        self.settings: Mapping[str, Any] = {}  # settings of the first start
        self.outcome = ""  # also empty for a killed run
        self.error = ""  # reason for a failed run
        self.facts: Mapping[str, Any] = {}  # facts from the engine at the end of the run
        self.pid: int | None = None
        self.clients: int | None = None
        self.cores: int | None = None
        self.started_at: float | None = None
        self.begun_at: float | None = None  # time of the last start, which may have resumed the run
        self.finished_at: float | None = None
        self.first_at: float | None = None  # time of the first event of any kind
        self.last_at: float | None = None
        #: Seconds in which no worker could run, because other processes held the GPUs, cores or memory.
        self.waited_s = 0.0
        self.pauses: list[tuple[float, float]] = []  # begin and end of each interruption of the run
        self.cut_lines = 0  # number of incomplete lines in the trace, which are ignored
        self._previous_at: float | None = None  # time of the previous event
        self.hosts: dict[str, HostSpan] = {}  # hosts of a Ray cluster by name; empty on a single machine
        self.gpus: dict[str, GPUInfo] = {}  # by UUID
        self.samples: dict[str, list[GPUSample]] = {}  # by UUID
        #: Requests and leases in the order of their start, for GPUs or for cores and main memory alone.
        self.leases: list[LeaseSpan] = []
        self._waiting: dict[str, LeaseSpan] = {}  # requests without a lease, by call
        self._granted: dict[str, LeaseSpan] = {}  # leases by id
        self.workers: list[WorkerSpan] = []  # in the order of their starts
        self.out_of_memory: list[OutOfMemory] = []
        self._running: dict[tuple[str, int], WorkerSpan] = {}  # by call and pid
        self._processes: dict[tuple[str, int], int] = {}  # number of each worker process, by host and pid
        self._processes_started = 0
        self._last_round: int | None = None  # round of the last worker that had a round
        self._calls_round: int | None = None  # round of _calls_done
        self._calls_done: Counter[str] = Counter()  # finished calls by task
        self._worked_at = 0.0  # time at which the last worker finished
        # Rounds and their messages.
        self.strategy: str | None = None
        self.strategy_started_at: float | None = None
        self.num_rounds: int | None = None
        self.resumed_round: int | None = None
        self.highest_round = 0  # highest round with all parts finished
        # Highest round in the tally. It does not go down when a resumed run repeats rounds.
        self._counted_round = 0
        self._latest_round = 0  # highest round with a finished part
        self._has_strategy = False  # True while a strategy is running
        self.open_round: OpenRound | None = None  # part of a round with messages in flight
        self.closed_round: OpenRound | None = None  # the previous open round, now finished
        self._parts: dict[tuple[int | None, str], RoundPart] = {}  # finished parts by round and task
        # The following values could be computed from all parts. They are kept up to date instead, because
        # displays read them often and a run may have thousands of rounds.
        self._last_metrics: dict[str, tuple[float, Mapping[str, Any]]] = {}  # time and metrics, by task
        self._open_ends: dict[int, float] = {}  # end of the latest finished part, by unfinished round
        #: Time at which the last finished round ended.
        self.rounds_ended_at: float | None = None
        self._sent = self._failed = 0  # number of messages in finished parts
        self._sent_before_resume = 0  # number of messages in parts that finished before the last resume
        # Number of replies in parts that have not finished. The keys are round, task, and True for error
        # replies.
        self._replied: Counter[tuple[int | None, str, bool]] = Counter()
        # Numbers of sent and failed messages, as reported at the end of the run
        self._final_counts: tuple[int, int] | None = None
        self.failures = FailureReasons()  # reasons that error replies give
        self.all_failed = ""  # reason to end the run, reported if all clients fail

    @classmethod
    def read(cls, path: Path, *, keep_finished: bool = True) -> History:
        """Return the history of a trace file, including all rounds."""
        history = cls(keep_finished=keep_finished, keep_rounds=True)

        def count() -> None:
            history.cut_lines += 1

        history.feed(trace.read(path, on_cut=count))
        return history

    def feed(self, events: Iterable[Event]) -> None:
        """Process events, oldest first.

        Unknown and malformed events are ignored, because a full disk may cut a trace at any place.
        """
        for event in events:
            time = number(event.get("time"))
            handler = getattr(self, f"_on_{event.get('event')}", None)
            if time is None:
                continue
            self.first_at = time if self.first_at is None else self.first_at
            self._previous_at, self.last_at = self.last_at, max(self.last_at or time, time)
            if handler is not None and not self._is_late(event):
                handler(time, event)
            self._events_since_cleanup += 1
            if self._events_since_cleanup >= _EVENTS_PER_CLEANUP:
                self._forget_finished()
        self._forget_finished()

    # Current state

    @property
    def waiting(self) -> list[LeaseSpan]:
        """Requests that are waiting for a lease, oldest first."""
        return list(self._waiting.values())

    @property
    def running(self) -> list[WorkerSpan]:
        """Workers that have not finished, oldest first."""
        return list(self._running.values())

    @property
    def stuck_since(self) -> float | None:
        """Time since which calls have been waiting for a lease with no worker running.

        It is None if a worker is running or no call is waiting.
        """
        waiting = [span.requested_at for span in self.waiting if span.requested_at is not None]
        return max(min(waiting), self._worked_at) if waiting and not self._running else None

    def messages_under_way(self, host: str) -> int:
        """Return the number of messages on a host of a Ray cluster, running or waiting for a lease."""
        running = sum(worker.host == host for worker in self.running)
        return running + sum(request.host == host for request in self.waiting)

    def lease_of(self, worker: WorkerSpan) -> LeaseSpan | None:
        """Return the lease of a worker, or None."""
        return self._granted.get(worker.lease)

    @property
    def current_round(self) -> int | None:
        """The round with messages in flight. Without one, the highest round of recent workers and parts."""
        if self.open_round is not None and self.open_round.round is not None:
            return self.open_round.round
        rounds = [worker.round for worker in self.running]
        rounds += [number for number, _ in islice(reversed(self._parts), 1)]
        return max((number for number in (self._last_round, *rounds) if number is not None), default=None)

    @property
    def calls_done(self) -> dict[str, int]:
        """Number of finished calls of the current round, by task. Calls without a round do not count."""
        is_current = self._calls_round is not None and self._calls_round == self.current_round
        return dict(self._calls_done) if is_current else {}

    @property
    def gpus_of_run(self) -> list[GPUInfo]:
        """GPUs that the run may use, sorted by host and index.

        A sample may also list other GPUs of the host. Those have neither an index nor a lease of this run.
        """
        leased = {uuid for lease in self.leases for uuid in lease.memory_bytes}
        available = [gpu for gpu in self.gpus.values() if gpu.index >= 0 or gpu.uuid in leased]
        return sorted(available or self.gpus.values(), key=lambda gpu: (gpu.host, gpu.index, gpu.uuid))

    # Results

    @property
    def rounds(self) -> list[RoundPart]:
        """Finished parts of all rounds. The ``round`` of a part is None if its messages had no round."""
        return list(self._parts.values())

    def part(self, server_round: int | None, task: str) -> RoundPart | None:
        """Return the finished part of a round for a task, or None."""
        return self._parts.get((server_round, task))

    def newest_parts(self) -> Iterator[RoundPart]:
        """Return an iterator over the finished parts of all rounds, newest first."""
        return reversed(self._parts.values())

    @property
    def evaluations(self) -> list[RoundPart]:
        """Finished parts of all rounds that have a number."""
        return [part for part in self._parts.values() if part.round is not None]

    @property
    def last_metrics(self) -> dict[str, Mapping[str, Any]]:
        """The last reported metrics of each task, sorted by time."""
        by_time = sorted(self._last_metrics.items(), key=lambda item: item[1][0])
        return {task: metrics for task, (_, metrics) in by_time}

    @property
    def messages_sent(self) -> int:
        """Number of finished messages: messages of finished parts, and other messages with a reply."""
        return self._sent + self._replied.total() if self._final_counts is None else self._final_counts[0]

    @property
    def messages_failed(self) -> int:
        """Number of finished messages that have failed."""
        if self._final_counts is not None:
            return self._final_counts[1]
        return self._failed + sum(count for (*_, is_error), count in self._replied.items() if is_error)

    @property
    def seconds(self) -> float | None:
        """Seconds since the run was started or last resumed, until its end or its last event."""
        end = self.last_at if self.finished_at is None else self.finished_at
        return None if self.begun_at is None or end is None else max(0.0, end - self.begun_at)

    @property
    def messages_per_s(self) -> float | None:
        """Number of messages finished per second since the run was started or last resumed."""
        return (self.messages_sent - self._sent_before_resume) / self.seconds if self.seconds else None

    def over_at(self, since: float, end: float) -> float:
        """Return the time at which a span from ``since`` ended at the latest, if the trace has no end of it.

        An interruption of the run ends all spans. So the result is the first interruption after ``since``, or
        ``end`` if there is none.
        """
        return min((begin for begin, _ in self.pauses if begin >= since), default=end)

    def _forget_finished(self) -> None:
        self._events_since_cleanup = 0
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
            for part in islice(reversed(self._parts.values()), _KEPT_ENTRIES, None):
                # The curves need only a few metrics of an old part.
                if part.reported_metrics:
                    kept = sorted(part.metrics, key=metric_rank)[:_KEPT_METRICS]
                    part.reported_metrics, part.metrics = {}, {name: part.metrics[name] for name in kept}
        drop_oldest(self._last_metrics, _KEPT_ENTRIES)
        drop_oldest(self._open_ends, _KEPT_ENTRIES)
        drop_oldest(self.hosts, MOST_HOSTS)
        self.workers = list(self._running.values())
        for samples in self.samples.values():
            del samples[:-1]
        del self.out_of_memory[:-_KEPT_ENTRIES]
        del self.pauses[:-_KEPT_ENTRIES]

    # The run

    def _on_run_started(self, time: float, event: Event) -> None:
        # SuperNodes on several hosts may write to one trace. All other kinds of runs have one host, on which
        # one command runs at a time.
        has_one_host = event.get("kind") != "supernodes"
        # If two hosts write to the same trace, each of them reports a start. The second start does not mean
        # that the run was interrupted and resumed.
        is_resumed = self.finished_at is not None or has_one_host
        ended_at = self._previous_at if self.finished_at is None else self.finished_at
        if self.started_at is not None and is_resumed and ended_at is not None and ended_at < time:
            self.pauses.append((ended_at, time))
            self._remove_nodes(ended_at)
        self._final_counts = None
        # A resumed run sends messages of unfinished parts again, and messages that belong to no round. So
        # remove their results.
        if has_one_host:
            self._replied.clear()
            self._discard_rounds(lambda server_round: server_round is None)
        self._sent_before_resume = self._sent
        # A resumed run reports another start. Keep the time of the first one.
        self.started_at = time if self.started_at is None else self.started_at
        self.begun_at = time
        # Like `seconds`, this covers only the time since the run was last resumed.
        self.waited_s = 0.0
        self.finished_at, self.outcome, self.error, self.facts, self.all_failed = None, "", "", {}, ""
        # Workers and leases that the previous process left open were killed with it.
        if not self._keep_finished:
            self._waiting, self._granted, self._running = {}, {}, {}
        self.kind, self.name = text(event.get("kind")), text(event.get("name"))
        self.host, self.pid = text(event.get("host")), whole_number(event.get("pid"))
        self.version = text(event.get("version"))
        self.settings = self.settings or mapping(event.get("settings"))
        self.clients, self.cores = whole_number(event.get("clients")), whole_number(event.get("cores"))
        self.num_rounds = whole_number(event.get("num_rounds")) or self.num_rounds
        self._learn_gpus(event, self.host)

    def _on_run_finished(self, time: float, event: Event) -> None:
        self.finished_at, self.outcome = time, text(event.get("outcome"))
        self.error, self.facts = text(event.get("error")), mapping(event.get("facts"))
        # The reported counts are more reliable than the counts from the trace, which may lack replies.
        if (messages := whole_number(event.get("messages"))) is not None:
            self._final_counts = messages, whole_number(event.get("failed")) or 0
        if self.outcome == COMPLETED:
            self._finish_rounds(self._latest_round)
        self.open_round = None

    def _on_run_waited(self, time: float, event: Event) -> None:
        self.waited_s += max(0.0, number(event.get("seconds")) or 0.0)

    def _on_all_failed(self, time: float, event: Event) -> None:
        self.all_failed = self.all_failed or text(event.get("reason"))

    def _on_gpu_sample(self, time: float, event: Event) -> None:
        self._learn_gpus(event, text(event.get("host")))
        for gpu in mappings(event.get("gpus")):
            self.samples.setdefault(text(gpu.get("uuid")), []).append(
                GPUSample(
                    time,
                    whole_number(gpu.get("used_bytes")),
                    number(gpu.get("utilization_percent")),
                    number(gpu.get("temperature_c")),
                )
            )

    def _learn_gpus(self, event: Event, host: str) -> None:
        for gpu in mappings(event.get("gpus")):
            uuid = text(gpu.get("uuid"))
            self.gpus.setdefault(uuid, GPUInfo(uuid)).learn(gpu, host)

    # Hosts

    def _is_late(self, event: Event) -> bool:
        """Return True if the event comes from a lost host. Its workers and leases have already ended."""
        host = self.hosts.get(text(event.get("host")))
        return host is not None and host.is_lost and event.get("event") not in _EVENTS_ABOUT_LOST_HOSTS

    def _host(self, event: Event) -> HostSpan | None:
        name = text(event.get("host"))
        if not name:
            return None
        # Create the counter of calls, so that metrics list the host before its first call.
        self.tally.calls_of(name)
        return self.hosts.setdefault(name, HostSpan(name))

    def _on_host_joined(self, time: float, event: Event) -> None:
        if (host := self._host(event)) is not None:
            host.join(time, event)
            self._learn_gpus(event, host.name)

    def _on_host_lost(self, time: float, event: Event) -> None:
        """End the host's workers and leases, because a lost host writes no further events."""
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

    def _remove_nodes(self, until: float) -> None:
        """Remove the nodes that joined at ``until`` or earlier. Nodes join again when a run is resumed."""
        for host in self.hosts.values():
            host.nodes = {node: joined for node, joined in host.nodes.items() if joined[0] > until}
            host.is_lost = False

    def _count_call(self, worker: WorkerSpan) -> None:
        """Count a finished call for its host."""
        if worker.host in self.hosts:
            self.tally.calls_of(worker.host)[worker.outcome if worker.outcome in OUTCOMES else OTHER] += 1

    # Leases

    def _on_lease_requested(self, time: float, event: Event) -> None:
        span = self._new_lease(event)
        span.requested_at, span.caller_pid = time, whole_number(event.get("caller_pid"))
        self._waiting[span.call] = span

    def _on_lease_granted(self, time: float, event: Event) -> None:
        span = self._waiting.pop(text(event.get("call")), None)
        # The line with the request may be missing from the trace.
        if span is None:
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
        span = LeaseSpan(**owner_fields(event))
        self.leases.append(span)
        return span

    def _counts_of(self, event: Event) -> LeaseCounts:
        return self.tally.cores if text(event.get("event")).startswith("cores_") else self.tally.leases

    # Workers

    def _on_worker_started(self, time: float, event: Event) -> None:
        self._begin_worker(time, event)

    def _begin_worker(self, time: float, event: Event) -> WorkerSpan:
        worker = WorkerSpan(
            **owner_fields(event),
            pid=whole_number(event.get("pid")) or 0,
            start_method=text(event.get("start_method")),
            lease=text(event.get("lease")) or text(event.get("cores_lease")),
            started_at=time,
            client_overrides=mapping(event.get("own")),
        )
        process = (worker.host, worker.pid)
        if event.get("used_again") is not True or process not in self._processes:
            self._processes_started += 1
            self.tally.workers_started += 1
            self._processes[process] = self._processes_started
        worker.process = self._processes[process]
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
            done, total = whole_number(event.get("n")) or 0, whole_number(event.get("total"))
            worker.progress = text(event.get("desc")), done, total

    def _on_worker_finished(self, time: float, event: Event) -> None:
        worker, outcome = self._worker_of(event), text(event.get("outcome"))
        self.tally.workers_finished[outcome if outcome in OUTCOMES else OTHER] += 1
        if outcome != CANCELLED and text(event.get("client")) != SERVER:
            self.tally.calls_by_use[event.get("used_again") is True, outcome != "ok"] += 1
        # The line with the start may be missing from the trace.
        if worker is None:
            worker = self._begin_worker(time - (number(event.get("seconds")) or 0.0), event)
        # With FedBuff, a worker may handle a message of an earlier round. Such a call does not count.
        if worker.round == (current := self.current_round):
            if current != self._calls_round:
                self._calls_round = current
                self._calls_done.clear()
            # A call that ran out of memory is normally retried. So only its retry counts as done.
            if outcome != OUT_OF_MEMORY:
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
        return self._running.get((text(event.get("call")), whole_number(event.get("pid")) or 0))

    def _on_out_of_memory(self, time: float, event: Event) -> None:
        then = text(event.get("then"))
        self.tally.out_of_memory[then if then in CONSEQUENCES else OTHER] += 1
        self.out_of_memory.append(OutOfMemory(time, text(event.get("uuid")), then))

    # Rounds

    def _on_strategy_started(self, time: float, event: Event) -> None:
        self.strategy, self.strategy_started_at = text(event.get("strategy")), time
        self.num_rounds = whole_number(event.get("num_rounds")) or self.num_rounds
        self._has_strategy = True

    def _on_strategy_finished(self, time: float, event: Event) -> None:
        self._has_strategy = False
        self._finish_rounds(self._latest_round)

    def _on_strategy_resumed(self, time: float, event: Event) -> None:
        self.resumed_round = after = whole_number(event.get("round"))
        if after is not None:
            self._latest_round = self.highest_round = min(self.highest_round, after)
            self._discard_rounds(lambda server_round: (server_round or 0) > after)

    def _discard_rounds(self, is_repeated: Callable[[int | None], bool]) -> None:
        """Remove the results of rounds that a resumed run repeats."""
        for key in [key for key in self._parts if is_repeated(key[0])]:
            part = self._parts.pop(key)
            self._sent -= part.messages
            self._sent_before_resume -= part.messages
            self._failed -= part.failed
        self.failures.take_back(is_repeated)
        self._last_metrics.clear()
        self._open_ends.clear()
        self.rounds_ended_at = None
        for part in self._parts.values():
            self._note_end(part)

    def _note_end(self, part: RoundPart) -> None:
        """Update ``_last_metrics`` and ``_open_ends`` with a finished part."""
        if part.reported_metrics and part.time >= self._last_metrics.get(part.task, (part.time,))[0]:
            # Remove the key first, so that the order of the keys follows the times.
            self._last_metrics.pop(part.task, None)
            self._last_metrics[part.task] = part.time, part.reported_metrics
        if part.round is not None:
            self._open_ends[part.round] = max(part.time, self._open_ends.get(part.round, part.time))
            self._end_rounds()

    def _end_rounds(self) -> None:
        finished = [server_round for server_round in self._open_ends if server_round <= self.highest_round]
        for server_round in finished:
            ended_at = self._open_ends.pop(server_round)
            self.rounds_ended_at = max(ended_at, self.rounds_ended_at or ended_at)

    def _on_round_started(self, time: float, event: Event) -> None:
        server_round = whole_number(event.get("round"))
        self.open_round = OpenRound(
            server_round, text(event.get("task")), whole_number(event.get("messages")), time
        )
        self._finish_rounds(min(self._latest_round, (server_round or 0) - 1))

    def _on_round_grew(self, time: float, event: Event) -> None:
        if (open_round := self._open_round_of(event)) is not None:
            open_round.messages = whole_number(event.get("messages"))

    def _on_reply(self, time: float, event: Event) -> None:
        has_failed = event.get("error") is not None
        self._replied[whole_number(event.get("round")), text(event.get("task")), has_failed] += 1
        if (open_round := self._open_round_of(event)) is not None:
            open_round.reply(time, event)
        if has_failed:
            self.failures.add(event)

    def _open_round_of(self, event: Event) -> OpenRound | None:
        key = (whole_number(event.get("round")), text(event.get("task")))
        current = self.open_round
        return current if current is not None and (current.round, current.task) == key else None

    def _on_round_finished(self, time: float, event: Event) -> None:
        task = text(event.get("task"))
        if self.open_round is not None and self.open_round.task == task:
            self.closed_round, self.open_round = self.open_round, None
        self._finish_part(time, event, task)

    # The event "round" reports the server's own evaluation of a round.
    def _on_round(self, time: float, event: Event) -> None:
        self.num_rounds = whole_number(event.get("num_rounds")) or self.num_rounds
        self._finish_part(time, event, SERVER_EVALUATE)

    def _finish_part(self, time: float, event: Event, task: str) -> None:
        server_round = whole_number(event.get("round"))
        self._latest_round = max(self._latest_round, server_round or 0)
        if not self._has_strategy:
            self._finish_rounds(self._latest_round)
        messages, failed = whole_number(event.get("messages")) or 0, whole_number(event.get("failed")) or 0
        part = self._parts.setdefault((server_round, task), RoundPart(time, server_round, task))
        part.finish(time, event, messages, failed)
        self._note_end(part)
        self._sent += messages
        self._failed += failed
        for key in list(self._replied):
            # A reply without a round counts for this part, because only the end of a part may name the round.
            if key[0] in (server_round, None) and key[1] == task:
                del self._replied[key]

    def _finish_rounds(self, last: int) -> None:
        """Mark all rounds up to ``last`` as finished."""
        self.highest_round = max(self.highest_round, last)
        self._end_rounds()
        if last > self._counted_round:
            self.tally.rounds_finished += 1
            self._counted_round = last
