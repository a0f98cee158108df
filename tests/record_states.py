"""A store of the states of virtual nodes that takes and returns records instead of bytes."""

from __future__ import annotations

from flwr.app import RecordDict

from flower_gpu.flower import record_bytes
from flower_gpu.strategies.resuming.states import StateStore


class RecordStates(StateStore):
    """A store that encodes records on `put` and decodes them on `get`."""

    def get(self, partition: int) -> RecordDict:
        data = self.read(partition)
        return record_bytes.decode(data) if data else RecordDict()

    def put(self, partition: int, data: RecordDict | bytes) -> None:
        if isinstance(data, RecordDict):
            data = record_bytes.encode(data) if data else b""
        super().put(partition, data)
