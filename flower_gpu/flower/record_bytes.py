"""Flower's records as bytes, and the result of a message: a reply and a state.

The bytes are a description in JSON, then those of the arrays as they are. Nothing is pickled. Flower's own
way to protobuf is not used, since it ends at 2 GiB and at integers of 64 bits, and copies each array twice.

So bytes can be read without trust. The app of a confined worker may have written them: the caller makes the
reply anew, as one to the message that it had sent, and nothing of a reply but its content, its error and its
time to live is the app's.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_gpu.errors import MOST_CHARACTERS, InvalidResultError, shortened
from flower_gpu.flower import arrays
from flower_gpu.workers.confined_replies import MOST_DESCRIBED_BYTES, PlainBytes
from flower_gpu.workers.transport.regions import SMALL_BYTES, Region

_MAGIC = b"fgrecs01"
_START = struct.Struct("<8sQ")  # magic, bytes of the description

_REPLY_START: Final = struct.Struct("<QQQ")  # bytes of what describes a reply, of its content, of the state

_ARRAYS, _METRICS, _CONFIGS = "arrays", "metrics", "configs"
_BYTES = "bytes"  # what a config value of bytes is described by: their number, or a list of numbers

#: Bytes, or memory of an array.
Buffer = bytes | memoryview
_Take = Callable[[int], memoryview]  # returns the next bytes behind the description


def encode(records: RecordDict) -> bytes:
    """Return the records as bytes of their own: no memory of theirs is held; see :func:`encode_parts`."""
    return b"".join(encode_parts(records))


def encode_parts(records: RecordDict) -> list[Buffer]:
    """Return the bytes in parts, of which the large ones are the records' own memory.

    Raises TypeError if a list in a record was changed into something that Flower does not take.
    """
    buffers: list[Buffer] = []
    described: list[tuple[str, str, list[Any]]] = []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            described.append((name, _ARRAYS, [_array(key, array, buffers) for key, array in record.items()]))
        elif isinstance(record, MetricRecord):
            # Made anew, so that what Flower does not take is refused here and not when it is read.
            described.append((name, _METRICS, list(MetricRecord(dict(record)).items())))
        else:
            values = ConfigRecord(dict(record)).items()
            described.append((name, _CONFIGS, [(key, _config(value, buffers)) for key, value in values]))
    head = json.dumps(described).encode()
    return [_START.pack(_MAGIC, len(head)), head, *buffers]


def decode(data: Buffer) -> RecordDict:
    """Return new records; arrays of some size read ``data`` where it lies.

    Raises ValueError if these are not bytes of :func:`encode`.
    """
    magic, size = _START.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("no records of Flower in the form of this version")
    view, offset = memoryview(data), _START.size + size
    description = json.loads(bytes(view[_START.size : offset]))

    def take(size: int) -> memoryview:
        nonlocal offset
        found = view[offset : offset + size]
        if len(found) != size:
            raise ValueError("records of Flower that end too early")
        offset += size
        return found

    records = RecordDict()
    for name, kind, items in description:
        if kind == _ARRAYS:
            record = ArrayRecord()
            for key, *fields in items:
                record[key] = _array_of(take, *fields)
            records[name] = record
        elif kind == _METRICS:
            records[name] = MetricRecord(dict(items), keep_input=False)
        else:
            records[name] = ConfigRecord({key: _config_of(value, take) for key, value in items})
    return records


def _array(key: str, array: Array, buffers: list[Buffer]) -> tuple[Any, ...]:
    # One that came from a worker would first make bytes of its memory for `data`.
    region = array.__dict__.get("_region")
    data = memoryview(array.data if region is None else region.memory)
    buffers.append(data)
    return key, array.dtype, [int(length) for length in array.shape], array.stype, data.nbytes


def _array_of(take: _Take, dtype: str, shape: Sequence[int], stype: str, size: int) -> Array:
    view = take(size)
    if size < SMALL_BYTES:
        return Array(dtype=dtype, shape=tuple(shape), stype=stype, data=bytes(view))
    # Not Flower's own: its bytes, sent for a second time, would pass for a model that all calls share.
    return arrays._rebuild(dtype, tuple(shape), stype, Region(view))


def _config(value: Any, buffers: list[Buffer]) -> Any:
    if isinstance(value, bytes):
        buffers.append(value)
        return {_BYTES: len(value)}
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        buffers.extend(value)
        return {_BYTES: [len(part) for part in value]}
    return value


def _config_of(value: Any, take: _Take) -> Any:
    if not isinstance(value, dict):
        return value
    sizes = value[_BYTES]
    if isinstance(sizes, list):
        return [bytes(take(size)) for size in sizes]
    return bytes(take(sizes))


def encode_reply(reply: Message, state: RecordDict) -> PlainBytes:
    """Return a reply and a state as bytes; the large parts are the records' own memory."""
    error = [reply.error.code, reply.error.reason] if reply.has_error() else None
    head = json.dumps({"error": error, "ttl": reply.metadata.ttl}).encode()
    content = [] if error else encode_parts(reply.content)
    kept = encode_parts(state)
    sizes = [sum(memoryview(part).nbytes for part in parts) for parts in (content, kept)]
    return PlainBytes([_REPLY_START.pack(len(head), *sizes), head, *content, *kept])


def decode_reply(data: Any, message: Message) -> tuple[Message, RecordDict]:
    """Return the reply to a message, and the state.

    ``data``: what :func:`encode_reply` returned, in one piece.
    ``message``: as it was given to the worker.
    Raises InvalidResultError if it is something else.
    """
    try:
        if not isinstance(data, memoryview):
            raise TypeError("no bytes")
        sizes = _REPLY_START.unpack_from(data)
        if sum(sizes) != data.nbytes - _REPLY_START.size or sizes[0] > MOST_DESCRIBED_BYTES:
            raise ValueError("of another size")
        ends = accumulate(sizes, initial=_REPLY_START.size)
        head, content, state = (data[begin:end] for begin, end in pairwise(ends))
        described = json.loads(bytes(head))
        error, ttl = described["error"], described["ttl"]
        if type(ttl) not in (int, float) or not math.isfinite(ttl) or ttl <= 0:
            raise ValueError("no time to live")
        reply = Message(_records(content) if error is None else _error(*error), reply_to=message)
        # Not as an argument: what is left of the message's own time is less by now, which Flower would log.
        reply.metadata.ttl = min(ttl, reply.metadata.ttl)
        return reply, _records(state)
    except Exception as error:
        # Whatever an app may have written there: Flower's records raise what they like.
        raise InvalidResultError(
            f"the confined worker left no reply that can be read ({type(error).__name__}: "
            f"{shortened(str(error), 500)})"
        ) from None


def _records(data: memoryview) -> RecordDict:
    if _START.unpack_from(data)[1] > MOST_DESCRIBED_BYTES:
        raise ValueError(f"more than {MOST_DESCRIBED_BYTES >> 20} MiB besides arrays")
    return decode(data)


def _error(code: Any, reason: Any) -> Error:
    if type(code) is not int or not (reason is None or isinstance(reason, str)):
        raise TypeError("no error of Flower")
    return Error(code, None if reason is None else shortened(reason, MOST_CHARACTERS))
