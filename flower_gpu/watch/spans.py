"""The parts of a history: GPUs, hosts, leases, workers and rounds of a run, and counts over several runs."""

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
from flower_gpu.watch.fields import first_line, mappings, node_id, number, text, whole_number

WAITING, STARTING, RUNNING, EXITING, DONE = "waiting", "starting", "running", "exiting", "done"

_MAX_METRICS: Final = 1000  # for each evaluation
_MAX_REPLY_TIMES: Final = 1000
#: Errors that cancel a request. Its run ends, its message is cancelled, or it gets an idle worker instead.
_CANCELLATIONS: Final = ("WorkerIdlesError", "WorkerDiedError", "KeyboardInterrupt")
MOST_HOSTS: Final = 1000  # limit for each run, and for all runs together
_MAX_NODES: Final = 50  # limit for each host name


@dataclass
class GPUInfo:
    """A GPU that is available to a run. A size is None until an event reports it."""

    uuid: str
    index: int = -1
    name: str = ""
    host: str = ""  # the machine's name
    total_bytes: int | None = None
    capacity_bytes: int | None = None

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


@dataclass
class LeaseSpan:
    """A request and the resulting lease. If a worker runs several calls, the first call made the request.

    A time is None if its event did not happen or is missing from the trace. ``memory_bytes`` is the GPU
    memory by UUID. It is empty if the request is for cores and main memory alone.
    """

    call: str
    client: str
    task: str
    round: int | None
    requested_at: float | None = None
    caller_pid: int | None = None
    granted_at: float | None = None
    refused_at: float | None = None  # end of a wait without a lease
    is_given_up: bool = False  # True if the caller cancelled the request
    released_at: float | None = None
    id: str = ""
    waited_s: float = 0.0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    is_used: bool = False  # True once a worker has finished a call with the lease
    cores: float | None = None  # leased or requested cores, or None if not counted
    host_memory_bytes: int | None = None  # the same for main memory
    host: str = ""  # host in a Ray cluster; empty for the machine of the run itself
    is_lost: bool = False  # True if the lease ended because its host was lost
    #: Start time and client of each later call of the same worker.
    turns: list[tuple[float, str]] = field(default_factory=list)

    def grant(self, time: float, event: Event) -> None:
        """Turn the request into a lease."""
        self.granted_at, self.id = time, text(event.get("lease"))
        self.cores, self.host_memory_bytes = (
            number(event.get("cores")),
            whole_number(event.get("host_memory_bytes")),
        )
        self.waited_s = max(0.0, number(event.get("waited_s")) or 0.0)
        for gpu in mappings(event.get("gpus")):
            self.memory_bytes[text(gpu.get("uuid"))] = whole_number(gpu.get("memory_bytes")) or 0

    def refuse(self, time: float, event: Event) -> None:
        """End the request without a lease."""
        self.refused_at = time
        self.is_given_up = text(event.get("reason")) in _CANCELLATIONS


@dataclass
class WorkerSpan:
    """A call in a worker. A time is None if its event did not happen or is missing from the trace."""

    call: str
    client: str
    task: str
    round: int | None
    pid: int
    start_method: str
    lease: str  # id of the GPU lease, or of the lease on cores for a CPU call; empty without a lease
    started_at: float
    process: int = 0  # number of the process from 1; a reused worker process runs several calls
    task_at: float | None = None
    result_at: float | None = None
    finished_at: float | None = None
    seconds: float | None = None  # duration since the call was requested, reported at its end
    outcome: str = ""  # empty while the call runs
    error: str = ""
    traceback: str = ""
    peak_bytes: dict[str, int] = field(default_factory=dict)  # highest measured GPU memory, by UUID
    progress: tuple[str, int, int | None] = ("", 0, None)  # description, finished items, total items
    host: str = ""  # host in a Ray cluster; empty for the machine of the run itself
    # Options of this client only, such as ``slow-down``
    client_overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """Phase of the call: ``"starting"``, ``"running"``, ``"exiting"`` or ``"done"``."""
        if self.finished_at is not None:
            return DONE
        if self.result_at is not None:
            return EXITING
        return STARTING if self.task_at is None else RUNNING

    def finish(self, time: float, event: Event) -> None:
        """Set the outcome and the measured figures from the event at the end of the call."""
        self.finished_at, self.seconds = time, number(event.get("seconds"))
        self.outcome, self.error = text(event.get("outcome")), text(event.get("error"))
        self.traceback = text(event.get("traceback"))
        self.task_at = number(event.get("task_at")) or self.task_at
        self.result_at = number(event.get("result_at")) or self.result_at
        for gpu in mappings(event.get("gpus")):
            if (nbytes := whole_number(gpu.get("peak_bytes"))) is not None:
                self.peak_bytes[text(gpu.get("uuid"))] = nbytes


@dataclass
class OutOfMemory:
    """A call that ran out of GPU memory. ``then`` is ``"again"``, ``"on the CPU"`` or ``"failed"``."""

    time: float
    uuid: str
    then: str


@dataclass
class RoundPart:
    """The results of a server-side evaluation, or of the messages with the same task in a round."""

    time: float
    round: int | None
    task: str
    metrics: dict[str, float] = field(default_factory=dict)  # finite numbers only
    reported_metrics: dict[str, Any] = field(default_factory=dict)  # all reported metrics
    seconds: float | None = None
    messages: int = 0  # number of sent messages
    failed: int = 0

    def finish(self, time: float, event: Event, messages: int, failed: int) -> None:
        """Add the facts of an event at the end of the part.

        A strategy and a simulation may both write such an event, each with some of the facts.
        """
        self.time, self.reported_metrics = (
            time,
            first_metrics({**self.reported_metrics, **first_metrics(event.get("metrics"))}),
        )
        self.metrics = {name: x for name, x in numbers_of(self.reported_metrics).items() if math.isfinite(x)}
        seconds = number(event.get("seconds"))
        self.seconds = self.seconds if seconds is None else seconds
        self.messages += messages
        self.failed += failed


@dataclass
class OpenRound:
    """Messages in flight with the same task."""

    round: int | None
    task: str
    messages: int | None
    started_at: float
    replies: int = 0  # number of replies, which the trace of a simulated run does not contain
    failed: int = 0
    #: Times of the last replies.
    replied_at: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_REPLY_TIMES))
    client_metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers in replies, by node
    calls: list[WorkerSpan] = field(default_factory=list)  # finished calls

    @property
    def finished(self) -> int:
        """Number of finished messages, limited to the total because messages of a lost host run again."""
        done = max(len(self.calls), self.replies)
        return done if self.messages is None else min(done, self.messages)

    def reply(self, time: float, event: Event) -> None:
        """Count a reply and store its metrics."""
        self.replies += 1
        self.failed += event.get("error") is not None
        self.replied_at.append(time)
        node, numbers = node_id(event.get("node")), numbers_of(first_metrics(event.get("metrics")))
        if node is not None and numbers:
            self.client_metrics[node] = numbers


def first_metrics(metrics: object) -> dict[Any, Any]:
    """Return the first ``_MAX_METRICS`` metrics, because a trace may contain any number of names."""
    if not isinstance(metrics, Mapping):
        return {}
    first = islice(metrics.items(), _MAX_METRICS)
    return {name: SPELLED.get(value, value) if isinstance(value, str) else value for name, value in first}


def numbers_of(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numeric metrics, including values that are infinite or NaN."""
    numbers = {
        str(name): value if isinstance(value, float) else number(value) for name, value in metrics.items()
    }
    return {name: value for name, value in numbers.items() if value is not None}


# Counts that never decrease

OUT_OF_MEMORY: Final = "out of memory"
CANCELLED: Final = "cancelled"
#: Outcome of workers on a lost host. The history sets it, because the trace has no line for their end.
HOST_LOST: Final = "host lost"
#: Known outcomes of a worker, spelled as in the trace. Unknown outcomes are counted as ``OTHER``.
OUTCOMES: Final = ("ok", "error", OUT_OF_MEMORY, "died", "timeout", CANCELLED, HOST_LOST)
#: Known reactions to a call that ran out of GPU memory, spelled as in the trace.
CONSEQUENCES: Final = ("again", "on the CPU", "failed")
OTHER: Final = "other"
#: Upper limits in seconds of the histogram buckets for waits.
WAIT_BUCKETS_S: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)

# Limits for the stored failures.
_MAX_REASONS: Final = 200
_MAX_MESSAGES: Final = 100  # for each reason
_MAX_ERROR_CHARACTERS: Final = 1000
# Number of rounds that a resumed run can repeat. It usually repeats only the last round or two.
_MAX_REPEATED_ROUNDS: Final = 100
_OTHER_REASONS: Final = "other reasons"
# Texts in errors that differ from worker to worker.
_WORKER_DETAILS: Final = re.compile(
    r" \(pid \d+\)| after \d+\.\d s(?=, before)| The last lines it wrote:.*", re.DOTALL
)


class LeaseCounts:
    """Counts of requested leases of the same kind, with a histogram of the waits."""

    def __init__(self) -> None:
        self.granted = self.refused = 0
        self.waited_s = self.longest_wait_s = 0.0
        self._waits = [0] * (len(WAIT_BUCKETS_S) + 1)

    def grant(self, waited_s: float) -> None:
        """Count a granted lease and its wait."""
        self.granted += 1
        self.waited_s += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        self._waits[bisect_left(WAIT_BUCKETS_S, waited_s)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper limit of each bucket with the number of waits up to this limit."""
        limits = (*map(str, WAIT_BUCKETS_S), "+Inf")
        return [(limit, float(count)) for limit, count in zip(limits, accumulate(self._waits), strict=True)]


@dataclass
class Tally:
    """Counts for a run, or the sums for several runs that share the tally."""

    workers_started: int = 0
    workers_finished: Counter[str] = field(default_factory=Counter)  # by outcome
    leases: LeaseCounts = field(default_factory=LeaseCounts)  # leases on GPUs
    cores: LeaseCounts = field(default_factory=LeaseCounts)  # leases on cores, for CPU calls
    out_of_memory: Counter[str] = field(default_factory=Counter)  # by reaction, see CONSEQUENCES
    #: Number of finished client calls. The key is (the worker was reused, the call failed).
    calls_by_use: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    rounds_finished: int = 0
    host_calls: dict[str, Counter[str]] = field(default_factory=dict)  # by host, then by outcome

    def calls_of(self, host: str) -> Counter[str]:
        """Return the call counts of a host. Hosts beyond the limit share the counts of ``OTHER``."""
        is_known = host in self.host_calls or len(self.host_calls) < MOST_HOSTS
        return self.host_calls.setdefault(host if is_known else OTHER, Counter())


def reason_of(error: str) -> str:
    """Return the first line of an error without client, pid and seconds, which differ between workers."""
    return _WORKER_DETAILS.sub("", LABEL.sub("", first_line(error)))


class FailureReasons:
    """Failed messages to clients, grouped by reason. A reason is an error without details of a worker."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # number of messages by reason
        #: Client, type, round and error of the first messages with each reason.
        self.named: dict[str, list[dict[str, Any]]] = {}
        # Counts by round for recent rounds only, because a resumed run may repeat them.
        self._counts_by_round: dict[int | None, Counter[str]] = {}

    def add(self, reply: Event) -> None:
        """Count a reply with an error."""
        error = shortened(first_line(reply.get("error")), _MAX_ERROR_CHARACTERS)
        reason = reason_of(error)
        if reason not in self.counts and len(self.counts) >= _MAX_REASONS:
            reason = _OTHER_REASONS
        server_round = whole_number(reply.get("round"))
        self.counts[reason] += 1
        self._counts_by_round.setdefault(server_round, Counter())[reason] += 1
        drop_oldest(self._counts_by_round, _MAX_REPEATED_ROUNDS)
        messages = self.named.setdefault(reason, [])
        if len(messages) < _MAX_MESSAGES:
            message = {"client": reply.get("node"), "type": reply.get("task"), "round": server_round}
            messages.append({**message, "error": error})

    def take_back(self, is_again: Callable[[int | None], bool]) -> None:
        """Remove the failures of rounds for which ``is_again`` returns True, because they are repeated."""
        for server_round in [key for key in self._counts_by_round if is_again(key)]:
            self.counts -= self._counts_by_round.pop(server_round)
        self.named = {
            reason: [message for message in self.named[reason] if not is_again(message["round"])]
            for reason in self.counts
        }


def drop_oldest(entries: dict[Any, Any], max_count: int) -> None:
    """Remove the oldest entries of a dict until it has ``max_count`` or fewer."""
    if len(entries) > max_count:
        for key in list(islice(entries, len(entries) - max_count)):
            del entries[key]
