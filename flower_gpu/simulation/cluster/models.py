"""Models on their way to hosts: arrays that many messages have go to each host once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

from flwr.app import ArrayRecord, RecordDict

from flower_gpu.simulation.visits import Visit

_MODELS: Final = 4  # array records that are kept: of this round and the last ones, and what a strategy adds


@dataclass(frozen=True)
class Model:
    """Arrays that many messages have: where they are to be had."""

    number: int
    where: Any  # an ObjectRef in a list: as an argument of its own Ray would fetch it for each message


@dataclass(frozen=True)
class PackedVisit:
    """A visit whose message has no content; ``content``: its records; a ``Model`` in the place of arrays."""

    visit: Visit
    content: list[tuple[str, Any]]


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

    def packed(self, visit: Visit) -> PackedVisit:
        """Pack a visit, with its models by their numbers."""
        content = [
            (name, self._model(record) if isinstance(record, ArrayRecord) else record)
            for name, record in visit.message.content.items()
        ]
        empty = copy(visit.message)
        empty.content = RecordDict()
        return PackedVisit(replace(visit, message=empty), content)

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

    def visit(self, packed: PackedVisit) -> Visit:
        """Return a visit as it was. Messages with the same model share its arrays."""
        message = copy(packed.visit.message)
        message.content = RecordDict(
            {
                name: self._fetched(record) if isinstance(record, Model) else record
                for name, record in packed.content
            }
        )
        return replace(packed.visit, message=message)

    def _fetched(self, model: Model) -> ArrayRecord:
        with self._lock:  # whoever comes second waits for the first
            if model.number not in self._there:
                self._there[model.number] = self._get(model.where[0])
                if len(self._there) > _MODELS:
                    self._there.popitem(last=False)
            self._there.move_to_end(model.number)
            return self._there[model.number]
