"""A message on its way to a host (a visit), and back (an answer, or an error in the place of a reply)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Error, Message
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.constant import ErrorCode

from flower_gpu.errors import FlowerGPUError, InvalidResultError, RunEndedError, WorkerDiedError, shortened
from flower_gpu.flower.arrays import size_bytes
from flower_gpu.flower.averaging import ReplySum
from flower_gpu.flower.records import records_in
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
    _early: dict[int, Message] = field(default_factory=dict)  # those before them are not here
    _next: int = 0

    def __post_init__(self) -> None:
        self.total = ReplySum(self.group.weighted_by_key, keeps_integers=self.group.keeps_integers)

    def add(self, reply: Message, place: int | None) -> None:
        """Add a reply: at once, or when all those with a lower place are there."""
        self.ids.append(reply.metadata.reply_to_message_id)
        if place is None:
            self._sum(reply)
            return
        self._early[place] = reply
        while self._next in self._early:
            self._sum(self._early.pop(self._next))
            self._next += 1

    def settle(self) -> None:
        """Add, in their order, replies that wait for others before them: those do not come any more."""
        for place in sorted(self._early):
            self._sum(self._early.pop(place))

    def _sum(self, reply: Message) -> None:
        if self.error is None:
            try:
                self.total.add(reply)
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
