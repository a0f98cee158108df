"""What goes to a host with a message, and what comes back: replies, or sums of replies."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

from flwr.app import ArrayRecord, Message, RecordDict

from flower_gpu.errors import InvalidResultError
from flower_gpu.flower.averaging import SummedReplies

_MODELS: Final = 4  # array records that are kept: of this round and the last ones, and what a strategy adds


@dataclass(frozen=True)
class Model:
    """Arrays that many messages have: where they are to be had, once for each host."""

    number: int
    where: Any  # an ObjectRef in a list: as an argument of its own Ray would fetch it for each message


@dataclass(frozen=True)
class SumGroup:
    """Replies that a host sums.

    ``number``: no two groups of a run have the same.
    ``weighted_by_key``, ``keeps_integers``: as for :class:`flower_gpu.flower.averaging.SummedReplies`.
    ``in_order``: whether they are summed in the order of the nodes, as soon as the driver says that all are
    there. Else each one is added when it comes.
    """

    number: int
    weighted_by_key: str
    keeps_integers: bool
    in_order: bool


@dataclass(frozen=True)
class Visit:
    """A message on its way to a host.

    ``message``: it has no content; that is below.
    ``content``: its records; a ``Model`` in the place of arrays.
    ``seed``: of the client's random numbers.
    ``state``: what the client has kept; empty where that is nothing.
    ``group``: what the reply is summed with.
    """

    message: Message
    content: list[tuple[str, Any]]
    seed: int
    state: bytes
    group: SumGroup | None


@dataclass(frozen=True)
class Visited:
    """What comes back.

    ``message_id``: of the message.
    ``reply``: None: it is in a group, or there is none.
    ``state``: what the client keeps from now on, if that is not with a group.
    ``seconds``: how long the message was handled.
    ``call_s``: what the call took in its worker, if that is to be learned.
    ``is_handled``: whether the message was handled: else it was given up, or is to be handled elsewhere.
    """

    message_id: str
    reply: Message | None = None
    state: bytes = b""
    seconds: float = 0.0
    call_s: float | None = None
    is_handled: bool = True

    @classmethod
    def unhandled(cls, visit: Visit) -> Visited:
        """Return what becomes of a message that nobody has begun."""
        return cls(visit.message.metadata.message_id, is_handled=False)


@dataclass
class SummedPart:
    """Replies that were summed on a host.

    ``summed``: their sums, and what else is in them.
    ``states``: what the nodes with these ids keep. Those whose messages failed keep what they had.
    ``ids``: of all messages.
    ``error``: why there are no sums.
    """

    summed: SummedReplies
    states: dict[int, bytes] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    error: InvalidResultError | None = None

    def add(self, reply: Message, state: bytes) -> None:
        """Add a reply, and what its client keeps."""
        self.ids.append(reply.metadata.reply_to_message_id)
        if not reply.has_error():
            self.states[reply.metadata.src_node_id] = state
        if self.error is not None:
            return
        try:
            self.summed.add(reply)
        except InvalidResultError as error:
            self.error = error


class HostSums:
    """The groups of a host: replies are added as they come, or are kept until all of a group are there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[int, SummedPart] = {}
        self._kept: dict[int, list[tuple[int, Message, bytes]]] = {}

    def add(self, group: SumGroup, place: int, reply: Message, state: bytes) -> None:
        """Add the reply of a node with this place among all nodes."""
        with self._lock:
            part = self._parts.get(group.number)
            if part is None:
                part = self._parts[group.number] = SummedPart(
                    SummedReplies(group.weighted_by_key, keeps_integers=group.keeps_integers)
                )
            if group.in_order:
                self._kept.setdefault(group.number, []).append((place, reply, state))
            else:
                part.add(reply, state)

    def settle(self, number: int) -> None:
        """Sum what is kept of a group: all of it is there."""
        with self._lock:
            self._settle(number)

    def take(self, number: int) -> SummedPart | None:
        """Return the sums of a group so far, and begin anew; None where there is nothing."""
        with self._lock:
            self._settle(number)
            return self._parts.pop(number, None)

    def forget(self, numbers: Sequence[int]) -> None:
        """Give up groups that nobody wants any more."""
        with self._lock:
            for number in numbers:
                self._parts.pop(number, None)
                self._kept.pop(number, None)

    def _settle(self, number: int) -> None:
        kept = self._kept.pop(number, [])
        kept.sort(key=lambda each: each[0])
        for _, reply, state in kept:
            self._parts[number].add(reply, state)


class SentModels:
    """Models that were put where hosts can fetch them.

    ``put``: puts an object there; returns what it is found by.
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._lock = threading.Lock()
        # With the arrays' bytes, by whose identity a model is known: so they stay where they are.
        self._there: OrderedDict[tuple[Any, ...], tuple[Model, list[bytes]]] = OrderedDict()
        self._count = 0

    def visit(self, message: Message, seed: int, state: bytes, group: SumGroup | None) -> Visit:
        """Pack a message, with its models by their numbers."""
        content = [
            (name, self._model(record) if isinstance(record, ArrayRecord) else record)
            for name, record in message.content.items()
        ]
        empty = copy(message)
        empty.content = RecordDict()
        return Visit(empty, content, seed, state, group)

    def _model(self, record: ArrayRecord) -> Model:
        data = [array.data for array in record.values()]
        key = (tuple(record), tuple(map(id, data)))
        with self._lock:
            if key not in self._there:
                self._count += 1
                self._there[key] = Model(self._count, [self._put(record)]), data
                if len(self._there) > _MODELS:
                    self._there.popitem(last=False)
            self._there.move_to_end(key)
            return self._there[key][0]


class FetchedModels:
    """Models that a host has fetched.

    ``get``: returns what was put.
    """

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get
        self._lock = threading.Lock()
        self._there: OrderedDict[int, ArrayRecord] = OrderedDict()

    def message(self, visit: Visit) -> Message:
        """Return a message as it was sent. Messages with the same model share its arrays."""
        message = copy(visit.message)
        message.content = RecordDict(
            {
                name: self._fetched(record) if isinstance(record, Model) else record
                for name, record in visit.content
            }
        )
        return message

    def _fetched(self, model: Model) -> ArrayRecord:
        with self._lock:  # whoever comes second waits for the first
            if model.number not in self._there:
                self._there[model.number] = self._get(model.where[0])
                if len(self._there) > _MODELS:
                    self._there.popitem(last=False)
            self._there.move_to_end(model.number)
            return self._there[model.number]
