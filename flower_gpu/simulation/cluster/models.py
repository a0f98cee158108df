"""Models on their way to the hosts of a cluster: each goes to each host once.

The driver puts a model into Ray's object store, and messages carry the model's number. A host fetches a model
when the first message with this number arrives, and keeps the model for later messages.

Fetching can take minutes: a model of 10 GB needs 80 s at 1 Gbit/s. The driver considers an agent dead after a
minute without an answer, because the agent may be stopped, or its disk may hang. So the agent's methods never
fetch. Threads fetch, and pass a message on to the host when its models have arrived. Messages with other
models do not wait for that. Large client states and large records of bytes are fetched in the same way,
because Ray runs the calls of an agent in order, and a call waits until its arguments have arrived.

Several models are in use at the same time. With FedBuff, messages in flight have different versions of the
model, and hosts need these in any order. So models are kept as long as they fit into a part of the memory.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_gpu import control_group
from flower_gpu.simulation.host import AssignedMessage

#: Number of models that are kept, however large they are.
_MIN_MODELS: Final = 4
#: More models are kept while all of them take less than the memory divided by this number.
_KEPT_PART: Final = 16
#: Number of concurrent fetches.
_FETCHES: Final = 4
#: Ray sends smaller arguments with the call itself.
_LARGE_BYTES: Final = 64 << 10

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True)
class StoredObject:
    """An object in Ray's object store, for hosts to fetch.

    ``number``: number of the model, by which hosts keep it. None for an object of a single message.
    ``reference``: an ObjectRef in a list. Ray would fetch a direct argument of a call for each message.
    ``size_bytes``: size of the object.
    """

    number: int | None
    reference: Any = field(compare=False)
    size_bytes: int = field(compare=False)


@dataclass(frozen=True)
class PackedMessage:
    """An assigned message without its records, for the way to a host.

    ``content``: records of the message. A :class:`StoredObject` stands for a model or a large record.
    ``state``: the client's state if it is large, else None.
    """

    assigned: AssignedMessage
    content: list[tuple[str, Any]]
    state: StoredObject | None = None

    @property
    def sent(self) -> list[StoredObject]:
        """The objects to fetch, in the order of the records."""
        records = [record for _, record in self.content if isinstance(record, StoredObject)]
        return records if self.state is None else [*records, self.state]


class LastUsedModels(Generic[_K, _V]):
    """Models in the order of their last use. The least recently used models are dropped. Thread-safe.

    ``kept_bytes``: size up to which more than the first few models are kept; by default, a part of the
    memory.
    """

    def __init__(self, kept_bytes: int | None) -> None:
        _, memory_bytes = control_group.available_memory()
        self._kept_bytes = memory_bytes // _KEPT_PART if kept_bytes is None else kept_bytes
        self._lock = threading.Lock()
        self._models: OrderedDict[_K, tuple[_V, int]] = OrderedDict()

    def get(self, key: _K, make: Callable[[], _V], size_bytes: int) -> _V:
        """Return the model with this key. If it is not here, it is made."""
        with self._lock:
            if key not in self._models:
                self._models[key] = make(), size_bytes
                total = sum(size for _, size in self._models.values())
                while len(self._models) > _MIN_MODELS and total > self._kept_bytes:
                    total -= self._models.popitem(last=False)[1][1]
            self._models.move_to_end(key)
            return self._models[key][0]


class SentModels:
    """The driver's models in the object store.

    ``put``: function that stores an object and returns a reference to it.
    ``kept_bytes``: as for :class:`LastUsedModels`.
    """

    def __init__(self, put: Callable[[Any], Any], kept_bytes: int | None = None) -> None:
        self._put = put
        # A model is known by the identities of its arrays' bytes, so these must not be freed.
        self._models: LastUsedModels[tuple[Any, ...], tuple[StoredObject, list[bytes]]] = LastUsedModels(
            kept_bytes
        )
        self._numbers = itertools.count(1)

    def packed(self, assigned: AssignedMessage) -> PackedMessage:
        """Return a message with references instead of its models and large records. Stores new models."""
        content = [(name, self._packed(record)) for name, record in assigned.message.content.items()]
        empty = copy(assigned.message)
        empty.content = RecordDict()
        if len(assigned.state) <= _LARGE_BYTES:
            return PackedMessage(replace(assigned, message=empty), content)
        state = StoredObject(None, [self._put(assigned.state)], len(assigned.state))
        return PackedMessage(replace(assigned, message=empty, state=b""), content, state)

    def _packed(self, record: ArrayRecord | MetricRecord | ConfigRecord) -> Any:
        if isinstance(record, ArrayRecord):
            return self._model(record)
        size = record.count_bytes()
        return StoredObject(None, [self._put(record)], size) if size > _LARGE_BYTES else record

    def _model(self, record: ArrayRecord) -> StoredObject:
        data = [array.data for array in record.values()]
        size = sum(map(len, data))

        def store() -> tuple[StoredObject, list[bytes]]:
            return StoredObject(next(self._numbers), [self._put(record)], size), data

        return self._models.get((tuple(record), tuple(map(id, data))), store, size)[0]


class FetchedModels:
    """The models of a host. It fetches several at a time and keeps them for later messages.

    ``get``: function that returns a stored object, which may take minutes.
    ``kept_bytes``: as for :class:`LastUsedModels`.
    """

    def __init__(self, get: Callable[[Any], Any], kept_bytes: int | None = None) -> None:
        self._fetch = get
        self._models: LastUsedModels[int, Future[Any]] = LastUsedModels(kept_bytes)
        self._pool = ThreadPoolExecutor(_FETCHES, "flower-gpu-models")

    def receive(
        self,
        assigned_messages: Sequence[PackedMessage],
        submit: Callable[[list[AssignedMessage]], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        """Call ``submit`` with assigned messages when their models have arrived.

        Messages with equal models stay together. Does not block. ``submit`` and ``fail`` may be called in
        another thread. If a fetch fails, ``fail`` is called with the exception.
        """
        groups: dict[tuple[int | None, ...], list[tuple[PackedMessage, list[Future[Any]]]]] = {}
        for packed in assigned_messages:
            futures = [self._future(sent) for sent in packed.sent]
            numbers = tuple(sent.number for sent in packed.sent)
            groups.setdefault(numbers, []).append((packed, futures))
        for group in groups.values():
            self._submit_when_fetched(group, submit, fail)

    def _submit_when_fetched(
        self,
        group: list[tuple[PackedMessage, list[Future[Any]]]],
        submit: Callable[[list[AssignedMessage]], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        for _, futures in group:
            for future in futures:
                if not future.done():
                    future.add_done_callback(lambda _: self._submit_when_fetched(group, submit, fail))
                    return
        try:
            assigned_messages = [_unpacked(packed, futures) for packed, futures in group]
        except BaseException as error:
            fail(error)
        else:
            submit(assigned_messages)

    def _future(self, sent: StoredObject) -> Future[Any]:
        """Return the future of a stored object. A model is fetched once for all messages."""

        def fetch() -> Future[Any]:
            return self._pool.submit(self._fetch, sent.reference[0])

        return fetch() if sent.number is None else self._models.get(sent.number, fetch, sent.size_bytes)

    def close(self) -> None:
        """Cancel pending fetches."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _unpacked(packed: PackedMessage, futures: Sequence[Future[Any]]) -> AssignedMessage:
    """Return the original assigned message. Messages with the same model share its arrays.

    ``futures``: completed futures for :attr:`PackedMessage.sent`, in the same order.
    """
    fetched = iter(futures)
    message = copy(packed.assigned.message)
    message.content = RecordDict(
        {
            name: next(fetched).result() if isinstance(record, StoredObject) else record
            for name, record in packed.content
        }
    )
    state = packed.assigned.state if packed.state is None else next(fetched).result()
    return replace(packed.assigned, message=message, state=state)
