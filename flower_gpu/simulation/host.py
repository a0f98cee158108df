"""A host: a machine that handles messages of a run. The interface between it and the grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

from flwr.app import ArrayRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.constant import ErrorCode

from flower_gpu.errors import FlowerGPUError, InvalidResultError, RunEndedError, WorkerDiedError, shortened
from flower_gpu.flower.arrays import size_bytes
from flower_gpu.flower.averaging import ReplySum
from flower_gpu.flower.records import records_in
from flower_gpu.options import CallOptions
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.trace import NO_REPLY
from flower_gpu.workers.call_end import traceback_of


@dataclass(frozen=True)
class SumGroup:
    """Replies that a host sums.

    ``number``: no two groups of a run have the same.
    ``weighted_by_key``, ``keeps_integers``: as for :class:`flower_gpu.flower.averaging.ReplySum`.
    """

    number: int
    weighted_by_key: str
    keeps_integers: bool


@dataclass(frozen=True)
class Visit:
    """A message on its way to a host.

    ``seed``: of the client's random numbers.
    ``state``: what the client has kept; empty where that is nothing.
    ``group``: what the reply is summed with.
    ``place``: the reply's in its group, if the group is summed in order.
    """

    message: Message
    seed: int
    state: bytes = b""
    group: SumGroup | None = None
    place: int | None = None

    @property
    def message_id(self) -> str:
        """The message's."""
        return self.message.metadata.message_id


@dataclass(frozen=True)
class Answer:
    """What has become of a message.

    ``reply``: without its arrays if they are summed on the host. None: the message was not handled; it was
    given up, or is to be handled elsewhere.
    ``state``: what the client keeps from now on; None: what it had.
    ``seconds``: how long the message was handled.
    ``call_s``: what the call took in its worker, if that is to be learned.
    """

    message_id: str
    reply: Message | None = None
    state: bytes | None = None
    seconds: float = 0.0
    call_s: float | None = None

    @property
    def size_bytes(self) -> int:
        """What the arrays of the reply and the state take."""
        size = len(self.state or b"")
        if self.reply is None or self.reply.has_error():
            return size
        return size + arrays_bytes(self.reply)


@dataclass
class GroupSum:
    """The sum of a group's replies on a host.

    ``total``: the sum so far.
    ``ids``: of the messages whose replies are in it.
    ``error``: why there is no sum.
    """

    group: SumGroup
    total: ReplySum = field(init=False)
    ids: list[str] = field(default_factory=list)
    error: InvalidResultError | None = None
    _early: dict[int, tuple[Message, str]] = field(default_factory=dict)  # those before them are not here
    _next: int = 0

    def __post_init__(self) -> None:
        self.total = ReplySum(self.group.weighted_by_key, keeps_integers=self.group.keeps_integers)

    def add(self, reply: Message, place: int | None, source: str) -> None:
        """Add a reply: at once, or when all those with a lower place are there.

        ``source``: whose reply it is, for errors.
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
        """Add, in their order, replies that wait for others before them: those do not come any more."""
        for place in sorted(self._early):
            self._sum(*self._early.pop(place))

    def _sum(self, reply: Message, source: str) -> None:
        if self.error is None:
            try:
                self.total.add(reply, source)
            except InvalidResultError as error:
                self.error = error


@dataclass(frozen=True)
class Answers:
    """What a host has to say: answers, the sums that were asked for, and whether it takes no more messages.

    A sum has all replies of its group that were in answers up to now, these included.
    """

    answers: Sequence[Answer] = ()
    sums: Sequence[GroupSum] = ()
    is_full: bool = False


class CallError(Error):
    """An error in the place of a reply's content, with the traceback of the call that failed.

    ``code``, ``reason``: as for Flower's ``Error``.
    ``traceback``: the worker's; empty where there is none.
    ``ends_run``: what the run is to be ended with.
    """

    def __init__(
        self, code: int, reason: str, traceback: str = "", ends_run: RunEndedError | None = None
    ) -> None:
        super().__init__(code, reason)
        self.traceback = traceback
        self.ends_run = ends_run


class NoSuchNodeError(FlowerGPUError):
    """A message is to a node that does not exist."""


def arrays_bytes(message: Message) -> int:
    """Return the bytes of the arrays of a message."""
    records = records_in(message, ArrayRecord).values()
    return sum(size_bytes(array) for record in records for array in record.values())


def failed(message: Message, error: BaseException) -> Message:
    """Return the reply to a message of which nothing but an error came."""
    text = shortened(str(error) or type(error).__name__)
    ends_run = error if isinstance(error, RunEndedError) else None
    return Message(CallError(_code(error), text, traceback_of(error), ends_run), reply_to=message)


def expired(message: Message) -> Message:
    """Return the reply to a message whose ttl is over."""
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


#: How many messages a worker handles if nobody says how many: only the kernel and other users end it before.
MANY: Final = 1000
#: Of shorter messages the handing over of others takes a part that counts.
_SHORT_S: Final = 0.1
# Short messages wait there that take so long together: so many may be needed until the next ones come.
_AHEAD_S: Final = 0.5
_LEAST_S: Final = 1e-3  # that a message is taken for


@dataclass(frozen=True)
class Work:
    """What a host must know of a run. It can be pickled.

    ``name``: the app's.
    ``app``: what handles messages.
    ``options``: of each call.
    ``nodes``: who gets messages.
    ``max_workers``, ``calls_per_worker``, ``verify_recycling``: as :func:`flower_gpu.simulate` has them.
    ``is_deterministic``: whether algorithms must give the same bits each time.
    ``is_strict``: whether what another run would not have ends this one.
    ``mps``: whether its workers compute on a GPU at the same time, by an MPS daemon of the run.
    """

    name: str
    app: AppReference | ClientApp
    options: CallOptions
    nodes: VirtualNodes
    max_workers: int | None = None
    calls_per_worker: int = MANY
    verify_recycling: bool = False
    is_deterministic: bool = False
    is_strict: bool = False
    mps: bool = False


@dataclass(frozen=True)
class About:
    """What a host says of itself.

    ``name``: the machine's.
    ``concurrency``: how many messages it handles at a time, at most.
    ``threads``: of each worker's libraries.
    ``described``: processors, GPUs and versions, as the settings of a run have them.
    ``cores``: how many it has.
    ``gpus``: its GPUs, as the trace has them.
    """

    name: str
    concurrency: int
    threads: int
    described: dict[str, Any]
    cores: int
    gpus: list[dict[str, Any]]


class Host(ABC):
    """Handles messages: it takes visits, and returns answers.

    One thread at a time calls :meth:`exchange`; the others may be called by any thread. An engine says
    ``about``; the rest is the dispatcher's, which an engine only reads.

    ``about``: what it says of itself.
    ``is_gone``: whether it is lost.
    ``is_full``: whether it can take no more messages at this moment.
    ``under_way``: how many messages it has.
    ``is_exclusive``: whether it gets no other message until the one is done that it has.
    ``messages``, ``failed``: how many replies came from it, and how many of them were errors.
    ``call_s``: how long it handles a message of each type, a mean of the last ones.
    """

    #: Whether it may be lost, with what it has.
    can_be_lost: ClassVar[bool] = True

    def __init__(self, about: About) -> None:
        self.about = about
        self.is_gone = self.is_full = self.is_exclusive = False
        self.under_way = self.messages = self.failed = 0
        self.call_s: dict[str, float] = {}

    @property
    def name(self) -> str:
        """The machine's."""
        return self.about.name

    @abstractmethod
    def take(self, visits: Sequence[Visit]) -> None:
        """Have messages handled, in this order. That the host is gone is told by :meth:`exchange`."""

    @abstractmethod
    def exchange(self, visits: Sequence[Visit]) -> Answers:
        """Have messages handled; waits, not for long, for what has become of others.

        Raises Exception if the host is gone, or of no use.
        """

    @abstractmethod
    def ask_for_sum(self, group: int) -> None:
        """Have the sum of a group come with the next answers; the group begins anew."""

    @abstractmethod
    def forget(self, groups: Sequence[int]) -> None:
        """Give up groups whose sums nobody wants."""

    @abstractmethod
    def cancel(self, message_id: str) -> None:
        """Give up a message, also one that comes later."""

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so, or not known."""
        return None

    def lost(self, error: Exception, left: int) -> None:  # noqa: B027
        """Take note of the error for which nobody asks this host any more, and how many others there are."""

    def learn(self, kind: str, seconds: float) -> None:
        """Take note of how long a message was handled here."""
        self.call_s[kind] = (3 * self.call_s.get(kind, seconds) + seconds) / 4

    def most(self, kind: str) -> int:
        """Return how many messages it has at most: those that it handles, and short ones that wait there."""
        call_s = self.call_s.get(kind)
        if call_s is None or call_s > _SHORT_S:
            return self.about.concurrency
        ahead = _AHEAD_S / max(call_s, _LEAST_S) * self.about.concurrency
        return self.about.concurrency + int(ahead)

    def messages_in_batches(self, kind: str) -> int:
        """Return the number of messages in the batches that it handles at a time; 0 if it has no batches."""
        return 0


class Hosts(Protocol):
    """The hosts of a run, made by an engine from a :class:`Work`.

    ``about`` is read first, so hosts are there once it is made. Then come :meth:`begin`, :meth:`has_begun`,
    :meth:`load_data`, messages, :meth:`facts`, and :meth:`close`, which lets ``Host.exchange`` return.
    """

    @property
    def about(self) -> About:
        """How many messages all of them handle at a time; the rest as one of them says."""

    def where(self) -> str:
        """Say where messages are handled."""

    def begin(self, joined: Callable[[Host], object]) -> None:
        """Get ready for messages; ``joined`` is told of each host that is there, or joins."""

    def has_begun(self) -> None:
        """Take note that the trace says that the run has begun: hosts' own events come after that."""

    def load_data(self) -> None:
        """Load the data for calls, if there are any."""

    def facts(self) -> dict[str, Any]:
        """Return the hosts' facts for the result, with keys of docs/reference/result.md."""

    def close(self) -> None:
        """End all workers."""
