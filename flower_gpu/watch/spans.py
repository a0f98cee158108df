"""What a history is made of: GPUs, hosts, leases, workers and rounds of a run, and counts over runs."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Final

from flower_gpu.apps.failures import LABEL
from flower_gpu.errors import shortened
from flower_gpu.trace import SPELLED, Event
from flower_gpu.watch.fields import first_line, mappings, node_id, number, text, whole

WAITING, STARTING, RUNNING, EXITING, DONE = "waiting", "starting", "running", "exiting", "done"

_MOST_METRICS: Final = 1000  # of an evaluation
_MOST_REPLIES: Final = 1000  # whose times are kept
#: Errors by which a request is given up: its run ends, its message is cancelled, or it takes an idle worker.
_GIVEN_UP: Final = ("WorkerIdlesError", "WorkerDiedError", "KeyboardInterrupt")
MOST_HOSTS: Final = 1000  # of a run, and of all runs
_MOST_NODES: Final = 50  # of one name


@dataclass
class GPUInfo:
    """A GPU that a run could use. Sizes in bytes; None where not told."""

    uuid: str
    index: int = -1
    name: str = ""
    host: str = ""  # the machine's name
    total_bytes: int | None = None
    capacity_bytes: int | None = None

    def learn(self, told: Mapping[str, Any], host: str) -> None:
        """Add an event's facts."""
        self.host = host or self.host
        index = whole(told.get("index"))
        self.index = self.index if index is None else index
        self.name = text(told.get("name")) or self.name
        self.total_bytes = whole(told.get("total_bytes")) or self.total_bytes
        self.capacity_bytes = whole(told.get("capacity_bytes")) or self.capacity_bytes


@dataclass
class GPUSample:
    """A GPU at one moment. Times are Unix seconds; figures are None where the driver does not tell."""

    time: float
    used_bytes: int | None
    utilization_percent: float | None
    temperature_c: float | None


@dataclass
class HostSpan:
    """A host of a Ray cluster that a run has, or has had. Hosts that are called the same are one."""

    name: str
    joined_at: float | None = None  # the first time
    #: Those that are there: since when, and their concurrency.
    nodes: dict[str, tuple[float, int]] = field(default_factory=dict)
    cores: int | None = None
    gpus: tuple[str, ...] = ()  # UUIDs
    is_lost: bool = False
    lost_at: float | None = None  # the last time, also where it has joined again
    lost_reason: str = ""

    @property
    def concurrency(self) -> int:
        """How many messages it handles at a time, at most."""
        return sum(concurrency for _, concurrency in self.nodes.values())

    def join(self, time: float, event: Event) -> None:
        """Take in that it is there."""
        self.joined_at = time if self.joined_at is None else self.joined_at
        self.is_lost = False
        if len(self.nodes) < _MOST_NODES:
            self.nodes[text(event.get("host_id"))] = time, whole(event.get("concurrency")) or 0
        self.cores = whole(event.get("cores"))
        self.gpus = tuple(text(gpu.get("uuid")) for gpu in mappings(event.get("gpus")))

    def lose(self, time: float, event: Event) -> None:
        """Take in that it is gone; one of another name in Ray, if there is one, stays."""
        if self.nodes.pop(text(event.get("host_id")), None) is None:
            self.nodes.clear()
        self.is_lost = not self.nodes
        self.lost_at, self.lost_reason = time, first_line(event.get("reason"))


@dataclass
class LeaseSpan:
    """One request, and the lease that came of it: of the first call, where a worker runs several.

    Times are None where that did not happen, or the trace is cut. ``memory_bytes`` is of GPUs, by UUID; empty
    where the request is for cores and main memory alone.
    """

    call: str
    client: str
    task: str
    round: int | None
    requested_at: float | None = None
    caller_pid: int | None = None
    granted_at: float | None = None
    refused_at: float | None = None  # the wait ended without a lease
    is_given_up: bool = False  # before there was one, by who had asked
    released_at: float | None = None
    id: str = ""
    waited_s: float = 0.0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    is_used: bool = False  # a worker has done a call with it
    cores: float | None = None  # that it has, or asks for; None: none are counted
    host_memory_bytes: int | None = None  # the same of main memory
    host: str = ""  # of a Ray cluster; empty: the machine of the run itself
    is_lost: bool = False  # it has ended with its host
    #: Later calls of its worker: when each began, and of which client it is.
    turns: list[tuple[float, str]] = field(default_factory=list)

    def grant(self, time: float, event: Event) -> None:
        """Become a lease."""
        self.granted_at, self.id = time, text(event.get("lease"))
        self.cores, self.host_memory_bytes = number(event.get("cores")), whole(event.get("host_memory_bytes"))
        self.waited_s = max(0.0, number(event.get("waited_s")) or 0.0)
        for told in mappings(event.get("gpus")):
            self.memory_bytes[text(told.get("uuid"))] = whole(told.get("memory_bytes")) or 0

    def refuse(self, time: float, event: Event) -> None:
        """End without a lease."""
        self.refused_at = time
        self.is_given_up = text(event.get("reason")) in _GIVEN_UP


@dataclass
class WorkerSpan:
    """One call in one worker. Times are None where it did not come to that, or the trace is cut."""

    call: str
    client: str
    task: str
    round: int | None
    pid: int
    start_method: str
    lease: str  # its id; of a lease on cores where the call is on the CPU; empty where it has none
    started_at: float
    process: int = 0  # the number of its process, from 1 on: a worker that is used again does several calls
    task_at: float | None = None
    result_at: float | None = None
    finished_at: float | None = None
    seconds: float | None = None  # since it was asked for, as told at its end
    outcome: str = ""  # empty while it runs
    error: str = ""
    traceback: str = ""
    peak_bytes: dict[str, int] = field(default_factory=dict)  # by UUID: the most it was seen to use
    progress: tuple[str, int, int | None] = ("", 0, None)  # description, items done, items in all
    host: str = ""  # of a Ray cluster; empty: the machine of the run itself
    own: Mapping[str, Any] = field(default_factory=dict)  # what its client alone has, such as ``slow-down``

    @property
    def phase(self) -> str:
        """What it does now: ``"starting"``, ``"running"``, ``"exiting"`` or ``"done"``."""
        if self.finished_at is not None:
            return DONE
        if self.result_at is not None:
            return EXITING
        return STARTING if self.task_at is None else RUNNING

    def finish(self, time: float, event: Event) -> None:
        """Take in its end."""
        self.finished_at, self.seconds = time, number(event.get("seconds"))
        self.outcome, self.error = text(event.get("outcome")), text(event.get("error"))
        self.traceback = text(event.get("traceback"))
        self.task_at = number(event.get("task_at")) or self.task_at
        self.result_at = number(event.get("result_at")) or self.result_at
        for told in mappings(event.get("gpus")):
            if (nbytes := whole(told.get("peak_bytes"))) is not None:
                self.peak_bytes[text(told.get("uuid"))] = nbytes


@dataclass
class OutOfMemory:
    """A call that ran out of GPU memory, and what followed: ``"again"``, ``"on the CPU"``, ``"failed"``."""

    time: float
    uuid: str
    then: str


@dataclass
class RoundPart:
    """What came of the messages of one kind in one round, or of a server-side evaluation."""

    time: float
    round: int | None
    task: str
    metrics: dict[str, float] = field(default_factory=dict)  # finite numbers only
    told: dict[str, Any] = field(default_factory=dict)  # all metrics
    seconds: float | None = None
    messages: int = 0  # that were sent
    failed: int = 0

    def finish(self, time: float, event: Event, messages: int, failed: int) -> None:
        """Add the facts of its end. A strategy and a simulation may both write it, each a part."""
        self.time, self.told = time, first_metrics({**self.told, **first_metrics(event.get("metrics"))})
        self.metrics = {name: x for name, x in numbers_of(self.told).items() if math.isfinite(x)}
        seconds = number(event.get("seconds"))
        self.seconds = self.seconds if seconds is None else seconds
        self.messages += messages
        self.failed += failed


@dataclass
class OpenRound:
    """Messages of one kind that are under way."""

    round: int | None
    task: str
    messages: int | None
    started_at: float
    replies: int = 0  # the trace of a simulated run does not tell them
    failed: int = 0
    replied_at: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_REPLIES))  # the last ones
    client_metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers in replies, by node
    calls: list[WorkerSpan] = field(default_factory=list)  # that have finished

    @property
    def finished(self) -> int:
        """How many of the messages have been handled; those of a lost host are handled again."""
        done = max(len(self.calls), self.replies)
        return done if self.messages is None else min(done, self.messages)

    def reply(self, time: float, event: Event) -> None:
        """Take in a reply."""
        self.replies += 1
        self.failed += event.get("error") is not None
        self.replied_at.append(time)
        node, numbers = node_id(event.get("node")), numbers_of(first_metrics(event.get("metrics")))
        if node is not None and numbers:
            self.client_metrics[node] = numbers


def first_metrics(metrics: object) -> dict[Any, Any]:
    """Return the first of these metrics: there may be any number of names."""
    if not isinstance(metrics, Mapping):
        return {}
    first = islice(metrics.items(), _MOST_METRICS)
    return {name: SPELLED.get(value, value) if isinstance(value, str) else value for name, value in first}


def numbers_of(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, also those that are not finite."""
    found = {
        str(name): value if isinstance(value, float) else number(value) for name, value in metrics.items()
    }
    return {name: value for name, value in found.items() if value is not None}


# Counts that never go down

OUT_OF_MEMORY: Final = "out of memory"
CANCELLED: Final = "cancelled"
#: How a worker ends whose host is lost: no line of the trace says so.
HOST_LOST: Final = "host lost"
#: How a worker can end, as the trace says it; anything else is counted as ``OTHER``.
OUTCOMES: Final = ("ok", "error", OUT_OF_MEMORY, "died", "timeout", CANCELLED, HOST_LOST)
#: What can follow when a call runs out of GPU memory.
CONSEQUENCES: Final = ("again", "on the CPU", "failed")
OTHER: Final = "other"
#: Upper limits, in seconds, of what waits for leases are counted in.
WAIT_BUCKETS_S: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)

# Failed messages: how much of them is kept.
_MOST_REASONS: Final = 200
_MOST_NAMED: Final = 100  # of one reason
_MOST_CHARACTERS: Final = 1000  # of one message
_MOST_ROUNDS_AGAIN: Final = 100  # that a resumed run may do again; it goes on after the last one or two
_OTHER_REASONS: Final = "other reasons"
_OF_ONE_WORKER: Final = re.compile(
    r" \(pid \d+\)| after \d+\.\d s(?=, before)| The last lines it wrote:.*", re.DOTALL
)


class LeaseCounts:
    """Leases of one kind that were asked for, and how long calls have waited for them, counted in buckets."""

    def __init__(self) -> None:
        self.granted = self.refused = 0
        self.waited_s = self.longest_wait_s = 0.0
        self._waits = [0] * (len(WAIT_BUCKETS_S) + 1)

    def grant(self, waited_s: float) -> None:
        """Count a lease, and the wait for it."""
        self.granted += 1
        self.waited_s += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        self._waits[bisect_left(WAIT_BUCKETS_S, waited_s)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return for each upper limit how many waits were not longer."""
        limits = (*map(str, WAIT_BUCKETS_S), "+Inf")
        return [(limit, float(count)) for limit, count in zip(limits, accumulate(self._waits), strict=True)]


@dataclass
class Tally:
    """Counts of one run, or of several runs that share it."""

    workers_started: int = 0
    workers_finished: Counter[str] = field(default_factory=Counter)  # by outcome
    leases: LeaseCounts = field(default_factory=LeaseCounts)  # of GPUs
    cores: LeaseCounts = field(default_factory=LeaseCounts)  # to calls on the CPU
    out_of_memory: Counter[str] = field(default_factory=Counter)  # by what followed
    #: Clients' calls that have ended, by whether their worker had done another call before, and whether they
    #: failed.
    calls_by_use: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    rounds_finished: int = 0
    host_calls: dict[str, Counter[str]] = field(default_factory=dict)  # by host, then by outcome

    def calls_of(self, host: str) -> Counter[str]:
        """Return the counts of a host's calls; hosts that are too many have theirs together."""
        is_known = host in self.host_calls or len(self.host_calls) < MOST_HOSTS
        return self.host_calls.setdefault(host if is_known else OTHER, Counter())


def reason_of(error: str) -> str:
    """Return the first line of an error, without what differs from worker to worker: client, pid, seconds."""
    return _OF_ONE_WORKER.sub("", LABEL.sub("", first_line(error)))


class FailureReasons:
    """Why messages to clients have failed: errors, without what is of one worker only."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.named: dict[str, list[dict[str, Any]]] = {}  # client, type, round, error of the first few
        self._of_rounds: dict[int | None, Counter[str]] = {}  # the last ones: they may be done again

    def add(self, reply: Event) -> None:
        """Count a reply that is an error."""
        error = shortened(first_line(reply.get("error")), _MOST_CHARACTERS)
        reason = reason_of(error)
        if reason not in self.counts and len(self.counts) >= _MOST_REASONS:
            reason = _OTHER_REASONS
        server_round = whole(reply.get("round"))
        self.counts[reason] += 1
        self._of_rounds.setdefault(server_round, Counter())[reason] += 1
        drop_oldest(self._of_rounds, _MOST_ROUNDS_AGAIN)
        named = self.named.setdefault(reason, [])
        if len(named) < _MOST_NAMED:
            whose = {"client": reply.get("node"), "type": reply.get("task"), "round": server_round}
            named.append({**whose, "error": error})

    def take_back(self, is_again: Callable[[int | None], bool]) -> None:
        """Forget the failures of rounds that are done again."""
        for server_round in [each for each in self._of_rounds if is_again(each)]:
            self.counts -= self._of_rounds.pop(server_round)
        self.named = {
            reason: [one for one in self.named[reason] if not is_again(one["round"])]
            for reason in self.counts
        }


def drop_oldest(found: dict[Any, Any], most: int) -> None:
    """Remove the oldest entries, so that at most so many stay."""
    if len(found) > most:
        for key in list(islice(found, len(found) - most)):
            del found[key]
