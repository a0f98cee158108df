"""Flower's records as bytes, and the result of a message, which is a reply and a state, as bytes.

The bytes begin with a description in JSON. The unchanged bytes of the arrays follow. Nothing is pickled.
Flower's own conversion to protobuf is not used: it is limited to 2 GiB and to integers of 64 bits, and copies
each array twice.

Because nothing is pickled, untrusted bytes can be read safely. The app of a confined worker may have written
them. So the caller makes a new reply to the message that it sent, and takes only the content, the error and
the time to live from the app.
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

# Sizes in bytes of a reply's description, its content, and the state.
_REPLY_START: Final = struct.Struct("<QQQ")

_ARRAYS, _METRICS, _CONFIGS = "arrays", "metrics", "configs"
# Key that describes a config value of bytes. Its value is the size, or a list of sizes.
_BYTES = "bytes"

#: Bytes, or memory of an array.
Buffer = bytes | memoryview
# Returns the next bytes after the description, of the given size.
_Take = Callable[[int], memoryview]


def encode(records: RecordDict) -> bytes:
    """Return the records as one copy that shares no memory with them; see :func:`encode_parts`."""
    return b"".join(encode_parts(records))


def encode_parts(records: RecordDict) -> list[Buffer]:
    """Return the bytes in parts. Large parts are views of the records' own memory.

    Raises TypeError if a list in a record was changed into something that Flower does not take.
    """
    buffers: list[Buffer] = []
    described: list[tuple[str, str, list[Any]]] = []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            described.append((name, _ARRAYS, [_array(key, array, buffers) for key, array in record.items()]))
        elif isinstance(record, MetricRecord):
            # A new record checks the values, so a value that Flower refuses fails here and not in the reader.
            described.append((name, _METRICS, list(MetricRecord(dict(record)).items())))
        else:
            values = ConfigRecord(dict(record)).items()
            described.append((name, _CONFIGS, [(key, _config(value, buffers)) for key, value in values]))
    head = json.dumps(described).encode()
    return [_START.pack(_MAGIC, len(head)), head, *buffers]


def decode(data: Buffer) -> RecordDict:
    """Return new records. All but small arrays are views of ``data``.

    Raises ValueError if ``data`` does not come from :func:`encode`.
    """
    magic, size = _START.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("not records of Flower in the format of this version")
    view, offset = memoryview(data), _START.size + size
    description = json.loads(bytes(view[_START.size : offset]))

    def take(size: int) -> memoryview:
        nonlocal offset
        part = view[offset : offset + size]
        if len(part) != size:
            raise ValueError("records of Flower that end too early")
        offset += size
        return part

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
    # An array from a worker is read by its region, because its `data` would first copy the memory to bytes.
    region = array.__dict__.get("_region")
    data = memoryview(array.data if region is None else region.memory)
    buffers.append(data)
    return key, array.dtype, [int(length) for length in array.shape], array.stype, data.nbytes


def _array_of(take: _Take, dtype: str, shape: Sequence[int], stype: str, size: int) -> Array:
    view = take(size)
    if size < SMALL_BYTES:
        return Array(dtype=dtype, shape=tuple(shape), stype=stype, data=bytes(view))
    # Not Flower's own Array: if its bytes were sent again, they would count as a model that all calls share.
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
    """Return a reply and a state as bytes in parts. Large parts are views of the records' own memory."""
    error = [reply.error.code, reply.error.reason] if reply.has_error() else None
    head = json.dumps({"error": error, "ttl": reply.metadata.ttl}).encode()
    content = [] if error else encode_parts(reply.content)
    kept = encode_parts(state)
    sizes = [sum(memoryview(part).nbytes for part in parts) for parts in (content, kept)]
    return PlainBytes([_REPLY_START.pack(len(head), *sizes), head, *content, *kept])


def decode_reply(data: Any, message: Message) -> tuple[Message, RecordDict]:
    """Return the reply to a message, and the state.

    ``data``: result of :func:`encode_reply`, in one piece.
    ``message``: the message that was given to the worker.
    Raises InvalidResultError if ``data`` is anything else.
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
        # Not as an argument: the message's remaining time has become shorter, and Flower would log a warning.
        reply.metadata.ttl = min(ttl, reply.metadata.ttl)
        return reply, _records(state)
    except Exception as error:
        # An app may have written any bytes, and Flower's records raise exceptions of many types for them.
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
        raise TypeError("not an error of Flower")
    return Error(code, None if reason is None else shortened(reason, MOST_CHARACTERS))
