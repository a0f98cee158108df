"""Hosts: the interface between the dispatcher and the machines that handle a run's messages.

The dispatcher sends a :class:`AssignedMessage` for each message and gets an :class:`MessageOutcome`.
:class:`Host` is one machine, :class:`Hosts` all machines of an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

from flwr.app import ArrayRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.constant import ErrorCode

from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import (
    LAST_LINES,
    FlowerGPUError,
    InvalidResultError,
    RunEndedError,
    WorkerDiedError,
    shortened,
)
from flower_gpu.flower.arrays import size_bytes
from flower_gpu.flower.records import records_in
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.strategies.averaging import ReplySum
from flower_gpu.trace import NO_REPLY
from flower_gpu.workers.call_end import traceback_of


@dataclass(frozen=True)
class SumGroup:
    """A group of replies that a host sums.

    ``number``: number that is unique within the run.
    ``weighted_by_key``, ``keeps_integers``: as for :class:`flower_gpu.strategies.averaging.ReplySum`.
    """

    number: int
    weighted_by_key: str
    keeps_integers: bool


@dataclass(frozen=True)
class AssignedMessage:
    """A message on its way to a host.

    ``seed``: seed of the client's random numbers.
    ``state``: the client's encoded state, or empty.
    ``group``: group that the reply is summed in, or None.
    ``place``: position of the reply in its group, if the group is summed in order.
    """

    message: Message
    seed: int
    state: bytes = b""
    group: SumGroup | None = None
    place: int | None = None

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return self.message.metadata.message_id


@dataclass(frozen=True)
class MessageOutcome:
    """The outcome of a message on a host.

    ``reply``: the reply, without its arrays if the host sums them. None if the message was not handled,
    because it was cancelled or another host should handle it.
    ``state``: the client's new state, or None if the state did not change.
    ``seconds``: seconds that the message was handled.
    ``call_s``: duration of the call in its worker, if it is useful for later estimates.
    """

    message_id: str
    reply: Message | None = None
    state: bytes | None = None
    seconds: float = 0.0
    call_s: float | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the state and the reply's arrays in bytes."""
        size = len(self.state or b"")
        if self.reply is None or self.reply.has_error():
            return size
        return size + arrays_bytes(self.reply)


@dataclass
class GroupSum:
    """The sum of a group's replies on a host.

    ``total``: the sum so far.
    ``ids``: ids of the messages with replies in the sum.
    ``error``: reason why there is no sum, or None.
    """

    group: SumGroup
    total: ReplySum = field(init=False)
    ids: list[str] = field(default_factory=list)
    error: InvalidResultError | None = None
    # Replies with their sources that wait for replies with a lower place, by place
    _early: dict[int, tuple[Message, str]] = field(default_factory=dict)
    # Place of the next reply to add
    _next: int = 0

    def __post_init__(self) -> None:
        self.total = ReplySum(self.group.weighted_by_key, keeps_integers=self.group.keeps_integers)

    def add(self, reply: Message, place: int | None, source: str) -> None:
        """Add a reply to the sum.

        ``place``: position in the group. The reply waits until all lower positions are added. None adds it at
        once.
        ``source``: name of the client in errors.
        """
        self.ids.append(reply.metadata.reply_to_message_id)
        if place is None:
            self._sum(reply, source)
            return
        self._early[place] = reply, source
        while self._next in self._early:
            self._sum(*self._early.pop(self._next))
            self._next += 1

    def settle(self) -> None:
        """Add all waiting replies in order, because the missing replies before them will not come."""
        for place in sorted(self._early):
            self._sum(*self._early.pop(place))

    def _sum(self, reply: Message, source: str) -> None:
        if self.error is None:
            try:
                self.total.add(reply, source)
            except InvalidResultError as error:
                self.error = error


@dataclass(frozen=True)
class HostReport:
    """A host's report: outcomes, the requested sums, and True if the host accepts no more messages now.

    A sum contains all replies of its group in the outcomes up to now, including the outcomes of this report.
    """

    outcomes: Sequence[MessageOutcome] = ()
    sums: Sequence[GroupSum] = ()
    is_full: bool = False


class CallError(Error):
    """An error in place of a reply's content, with the traceback of the failed call.

    ``code``, ``reason``: as for Flower's ``Error``.
    ``traceback``: traceback in the worker, or what it wrote before it ended, or empty.
    ``ends_run``: exception that should end the run, or None.
    """

    def __init__(
        self, code: int, reason: str, traceback: str = "", ends_run: RunEndedError | None = None
    ) -> None:
        super().__init__(code, reason)
        self.traceback = traceback
        self.ends_run = ends_run


class NoSuchNodeError(FlowerGPUError):
    """The receiver of a message does not exist."""


def arrays_bytes(message: Message) -> int:
    """Return the size of a message's arrays in bytes."""
    records = records_in(message, ArrayRecord).values()
    return sum(size_bytes(array) for record in records for array in record.values())


def failed(message: Message, error: BaseException) -> Message:
    """Return an error as the reply to a message."""
    text = shortened(str(error) or type(error).__name__)
    ends_run = error if isinstance(error, RunEndedError) else None
    traceback = traceback_of(error)
    if not traceback and LAST_LINES in text:
        # Flower logs the reason, and the traceback is shown beside it. So the last lines of the worker, which
        # may be a stack, are in one of them only.
        text, traceback = text.partition(LAST_LINES)[0], text
    return Message(CallError(_code(error), text, traceback, ends_run), reply_to=message)


def expired(message: Message) -> Message:
    """Return the error that is the reply to an expired message."""
    error = CallError(ErrorCode.MESSAGE_UNAVAILABLE, f"{NO_REPLY} within the message's ttl")
    return Message(error, reply_to=message)


def _code(error: BaseException) -> int:
    if isinstance(error, NoSuchNodeError):
        return ErrorCode.NODE_UNAVAILABLE
    if isinstance(error, LoadClientAppError):
        return ErrorCode.LOAD_CLIENT_APP_EXCEPTION
    if isinstance(error, WorkerDiedError):
        return ErrorCode.CLIENT_APP_CRASHED
    return ErrorCode.CLIENT_APP_RAISED_EXCEPTION


#: Default number of messages that a worker handles. Before that, only the kernel or other users end it.
MANY: Final = 1000
#: For messages shorter than this many seconds, the time to hand over the next message matters.
_SHORT_S: Final = 0.1
# A host queues short messages for this many seconds, because it may need as many until the next ones arrive.
_AHEAD_S: Final = 0.5
# Lower bound for the duration of a message in seconds. It limits the number of queued messages.
_LEAST_S: Final = 1e-3


@dataclass(frozen=True)
class Work:
    """The description of a run for hosts. It can be pickled with cloudpickle.

    ``name``: name of the app.
    ``app``: the app that handles messages, or where to find it.
    ``settings``: settings of each call, as the process that planned the run resolved them.
    ``nodes``: the receivers of messages.
    ``max_workers``, ``calls_per_worker``: as for :func:`flower_gpu.simulate`.
    ``is_deterministic``: True if algorithms must give the same bits each time.
    ``is_strict``: True if accidents that another run would not have end this run.
    ``mps``: True if workers compute on a GPU at the same time, through an MPS daemon of the run.
    """

    name: str
    app: AppReference | ClientApp
    settings: CallSettings
    nodes: VirtualNodes
    max_workers: int | None = None
    calls_per_worker: int = MANY
    is_deterministic: bool = False
    is_strict: bool = False
    mps: bool = False


@dataclass(frozen=True)
class HostInfo:
    """A host's description of itself.

    ``name``: name of the machine.
    ``concurrency``: maximum number of messages handled at a time.
    ``threads``: number of threads of each worker's libraries.
    ``described``: processors, GPUs and versions, in the format of a run's settings.
    ``cores``: number of cores.
    ``gpus``: the host's GPUs, in the format of the trace.
    """

    name: str
    concurrency: int
    threads: int
    described: dict[str, Any]
    cores: int
    gpus: list[dict[str, Any]]


class Host(ABC):
    """A machine that handles messages: it takes assigned messages and returns their outcomes.

    Only one thread at a time calls :meth:`exchange`. All other methods may be called by any thread. An engine
    sets ``info``. The other attributes belong to the dispatcher, and an engine only reads them.

    ``info``: the host's description of itself.
    ``is_gone``: True if the host is lost.
    ``is_full``: True if the host accepts no more messages at the moment.
    ``in_flight``: number of messages on the host.
    ``is_exclusive``: True if the host gets no other message until its present message is done.
    ``messages``: number of replies from the host.
    ``failed``: number of replies that were errors.
    ``call_s``: mean duration of recent messages in seconds, by message type.
    """

    #: True if the host can be lost together with its messages and sums.
    can_be_lost: ClassVar[bool] = True

    def __init__(self, info: HostInfo) -> None:
        self.info = info
        self.is_gone = self.is_full = self.is_exclusive = False
        self.in_flight = self.messages = self.failed = 0
        self.call_s: dict[str, float] = {}

    @property
    def name(self) -> str:
        """The name of the machine."""
        return self.info.name

    @abstractmethod
    def submit(self, assigned_messages: Sequence[AssignedMessage]) -> None:
        """Send messages to the host, to be handled in this order.

        Does not fail if the host is gone. :meth:`exchange` raises then.
        """

    @abstractmethod
    def exchange(self, assigned_messages: Sequence[AssignedMessage]) -> HostReport:
        """Send messages to the host, and wait briefly for its report on earlier messages.

        Raises Exception if the host is gone or cannot be used.
        """

    @abstractmethod
    def ask_for_sum(self, group: int) -> None:
        """Request the sum of a group with the next outcomes. Later replies go into a new sum."""

    @abstractmethod
    def forget(self, group: int) -> None:
        """Drop a group with a sum that is no longer wanted."""

    @abstractmethod
    def cancel(self, message_id: str) -> None:
        """Cancel a message. If it has not arrived yet, it is cancelled on arrival."""

    def stuck_since(self) -> float | None:
        """Return the time since which messages have been waiting with no worker running, or None.

        None also if the host does not know.
        """
        return None

    def lost(self, error: Exception, remaining_hosts: int) -> None:  # noqa: B027
        """Handle the loss of this host.

        ``error``: exception that showed the loss.
        ``remaining_hosts``: number of remaining hosts.
        """

    def learn(self, kind: str, seconds: float) -> None:
        """Record the duration of a message on this host."""
        self.call_s[kind] = (3 * self.call_s.get(kind, seconds) + seconds) / 4

    def capacity(self, kind: str) -> int:
        """Return the maximum number of messages on this host: one per worker, and queued short messages."""
        call_s = self.call_s.get(kind)
        if call_s is None or call_s > _SHORT_S:
            return self.info.concurrency
        ahead = _AHEAD_S / max(call_s, _LEAST_S) * self.info.concurrency
        return self.info.concurrency + int(ahead)

    def messages_in_batches(self, kind: str) -> int:
        """Return the number of messages in the batches handled at a time, or 0 without batches."""
        return 0


class Hosts(Protocol):
    """All hosts of a run. An engine makes them from a :class:`Work`.

    ``info`` is read first, so the constructor must find the hosts. Then :meth:`begin`, :meth:`has_begun` and
    :meth:`load_data` are called, and messages are sent. :meth:`facts` and :meth:`close` come last. ``close``
    lets ``Host.exchange`` return.
    """

    @property
    def info(self) -> HostInfo:
        """The concurrency of all hosts together, with the description of the first host."""

    def location_line(self) -> str:
        """Return a line that says where messages are handled."""

    def begin(self, joined: Callable[[Host], object]) -> None:
        """Get ready for messages.

        ``joined``: called with each present host, and later with each host that joins.
        """

    def has_begun(self) -> None:
        """Allow hosts to write events, because the trace has the start of the run now."""

    def load_data(self) -> None:
        """Load the shared data for calls, if the options name any."""

    def facts(self) -> dict[str, Any]:
        """Return the facts about hosts for the result, with the keys of docs/reference/result.md."""

    def close(self) -> None:
        """End all workers."""
