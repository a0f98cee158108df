"""Models on their way to the hosts of a cluster: each goes to each host once.

The driver puts a model where Ray can fetch it, and a message carries its number. The host fetches a model
when the first message with it comes, and keeps it for those that follow.

Fetching can take minutes: a model of 10 GB needs 80 s at 1 Gbit/s. The driver takes an agent that gives no
answer for a minute for dead, because it may be stopped, or its disk may hang. So no method of an agent that
is asked for an answer fetches anything. Threads do, and a message is handed to the host once its models are
there; messages with other models do not wait for that. For the same reason, what is large in a message
itself (the state of a client, a record of bytes) is put and fetched as well: Ray carries out calls of an
agent in their order, and a call waits until its arguments have arrived.

Strategies have several models under way. With FedBuff, these are as many versions as messages were sent in,
and hosts ask for them in any order. Models are kept while they fit into a part of the memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_gpu import control_group
from flower_gpu.simulation.host import Visit

_LEAST_MODELS: Final = 4  # that are kept, however large: of this round and the last, and what strategies add
_KEPT_PART: Final = 16  # of the memory; beyond the first few, models are kept while they take less of it
_FETCHES: Final = 4  # at a time
_LARGE_BYTES: Final = 64 << 10  # Ray sends smaller arguments with the call itself


@dataclass(frozen=True)
class Sent:
    """Something that was put where hosts can fetch it.

    ``number``: of a model, which hosts keep; None for what one message has.
    ``where``: an ObjectRef in a list: as an argument of its own, Ray would fetch it for each message.
    """

    number: int | None
    where: Any = field(compare=False)
    size_bytes: int = field(compare=False)


@dataclass(frozen=True)
class PackedVisit:
    """A visit whose message has no content.

    ``content``: its records; a :class:`Sent` in the place of models and of what is large.
    ``state``: the client's state, if that is large.
    """

    visit: Visit
    content: list[tuple[str, Any]]
    state: Sent | None = None

    @property
    def sent(self) -> list[Sent]:
        """What is to be fetched."""
        found = [record for _, record in self.content if isinstance(record, Sent)]
        return found if self.state is None else [*found, self.state]


class SentModels:
    """Models that were put where hosts can fetch them.

    ``put``: puts an object there; returns what it is found by.
    ``kept_bytes``: how much models may take, beyond the first few; by default a part of the memory.
    """

    def __init__(self, put: Callable[[Any], Any], kept_bytes: int | None = None) -> None:
        self._put = put
        self._kept_bytes = _kept_bytes() if kept_bytes is None else kept_bytes
        self._lock = threading.Lock()
        # With the arrays' bytes, by whose identity a model is known: so they stay where they are.
        self._there: OrderedDict[tuple[Any, ...], tuple[Sent, list[bytes]]] = OrderedDict()
        self._count = 0

    def packed(self, visit: Visit) -> PackedVisit:
        """Pack a visit, with its models by their numbers."""
        content = [(name, self._packed(record)) for name, record in visit.message.content.items()]
        empty = copy(visit.message)
        empty.content = RecordDict()
        if len(visit.state) <= _LARGE_BYTES:
            return PackedVisit(replace(visit, message=empty), content)
        state = Sent(None, [self._put(visit.state)], len(visit.state))
        return PackedVisit(replace(visit, message=empty, state=b""), content, state)

    def _packed(self, record: ArrayRecord | MetricRecord | ConfigRecord) -> Any:
        if isinstance(record, ArrayRecord):
            return self._model(record)
        size = record.count_bytes()
        return Sent(None, [self._put(record)], size) if size > _LARGE_BYTES else record

    def _model(self, record: ArrayRecord) -> Sent:
        data = [array.data for array in record.values()]
        key = (tuple(record), tuple(map(id, data)))
        with self._lock:
            if key not in self._there:
                self._count += 1
                sent = Sent(self._count, [self._put(record)], sum(map(len, data)))
                self._there[key] = sent, data
                total = sum(sent.size_bytes for sent, _ in self._there.values())
                while len(self._there) > _LEAST_MODELS and total > self._kept_bytes:
                    total -= self._there.popitem(last=False)[1][0].size_bytes
            self._there.move_to_end(key)
            return self._there[key][0]


class FetchedModels:
    """Models that a host fetches, several at a time, and keeps.

    ``get``: returns what was put; it may take minutes.
    ``kept_bytes``: as for :class:`SentModels`.
    """

    def __init__(self, get: Callable[[Any], Any], kept_bytes: int | None = None) -> None:
        self._fetch = get
        self._kept_bytes = _kept_bytes() if kept_bytes is None else kept_bytes
        self._lock = threading.Lock()
        self._there: OrderedDict[int, tuple[Future[Any], int]] = OrderedDict()
        self._pool = ThreadPoolExecutor(_FETCHES, "flower-gpu-models")

    def receive(
        self,
        visits: Sequence[PackedVisit],
        take: Callable[[list[Visit]], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        """Have visits taken once their models are here; those with the same models are taken together.

        Returns at once. ``take`` and ``fail`` may be called in another thread. ``fail`` gets the exception if
        something cannot be fetched.
        """
        groups: dict[tuple[int | None, ...], list[tuple[PackedVisit, list[Future[Any]]]]] = {}
        for packed in visits:
            futures = [self._future(sent) for sent in packed.sent]
            numbers = tuple(sent.number for sent in packed.sent)
            groups.setdefault(numbers, []).append((packed, futures))
        for group in groups.values():
            self._take_when_there(group, take, fail)

    def _take_when_there(
        self,
        group: list[tuple[PackedVisit, list[Future[Any]]]],
        take: Callable[[list[Visit]], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        for _, futures in group:
            for future in futures:
                if not future.done():
                    future.add_done_callback(lambda _: self._take_when_there(group, take, fail))
                    return
        try:
            visits = [_unpacked(packed, futures) for packed, futures in group]
        except BaseException as error:
            fail(error)
        else:
            take(visits)

    def _future(self, sent: Sent) -> Future[Any]:
        """Return the future of something that was sent; a model is fetched once for all messages."""
        number = sent.number
        if number is None:
            return self._pool.submit(self._fetch, sent.where[0])
        with self._lock:
            if number not in self._there:
                future = self._pool.submit(self._fetch, sent.where[0])
                self._there[number] = future, sent.size_bytes
                total = sum(size for _, size in self._there.values())
                while len(self._there) > _LEAST_MODELS and total > self._kept_bytes:
                    total -= self._there.popitem(last=False)[1][1]
            self._there.move_to_end(number)
            return self._there[number][0]

    def close(self) -> None:
        """Fetch nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _unpacked(packed: PackedVisit, futures: Sequence[Future[Any]]) -> Visit:
    """Return a visit as it was. Messages with the same model share its arrays.

    ``futures``: of :attr:`PackedVisit.sent`, all of them done.
    """
    fetched = iter(futures)
    message = copy(packed.visit.message)
    message.content = RecordDict(
        {
            name: next(fetched).result() if isinstance(record, Sent) else record
            for name, record in packed.content
        }
    )
    state = packed.visit.state if packed.state is None else next(fetched).result()
    return replace(packed.visit, message=message, state=state)


def _kept_bytes() -> int:
    _, total = control_group.available_memory()
    return total // _KEPT_PART
