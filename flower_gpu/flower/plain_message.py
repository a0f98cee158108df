"""What handling a message gives, a reply and a state, as bytes that can be read without trust.

A confined worker's app may have written them. The caller makes the reply anew, as one to the message that it
had sent: nothing of a reply but its content, its error and its time to live is the app's.
"""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from typing import Any, Final

from flwr.app import Error, Message, RecordDict

from flower_gpu.errors import MOST_CHARACTERS, InvalidResultError, shortened
from flower_gpu.flower import record_bytes
from flower_gpu.workers.transport.plain import MOST_DESCRIBED_BYTES, PlainBytes

_START: Final = struct.Struct("<QQQ")  # bytes of what describes the reply, of its content, of the state


def encode(reply: Message, state: RecordDict) -> PlainBytes:
    """Return a reply and a state as bytes; the large parts are the records' own memory."""
    error = [reply.error.code, reply.error.reason] if reply.has_error() else None
    head = json.dumps({"error": error, "ttl": reply.metadata.ttl}).encode()
    content = [] if error else record_bytes.encode_parts(reply.content)
    kept = record_bytes.encode_parts(state)
    sizes = [sum(memoryview(part).nbytes for part in parts) for parts in (content, kept)]
    return PlainBytes([_START.pack(len(head), *sizes), head, *content, *kept])


def decode(data: Any, message: Message) -> tuple[Message, RecordDict]:
    """Return the reply to a message, and the state.

    ``data``: what :func:`encode` returned, in one piece.
    ``message``: as it was given to the worker.
    Raises InvalidResultError if it is something else.
    """
    try:
        if not isinstance(data, memoryview):
            raise TypeError("no bytes")
        sizes = _START.unpack_from(data)
        if sum(sizes) != data.nbytes - _START.size or sizes[0] > MOST_DESCRIBED_BYTES:
            raise ValueError("of another size")
        ends = [_START.size, _START.size + sizes[0], _START.size + sizes[0] + sizes[1], data.nbytes]
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
    if record_bytes.described_bytes(data) > MOST_DESCRIBED_BYTES:
        raise ValueError(f"more than {MOST_DESCRIBED_BYTES >> 20} MiB besides arrays")
    return record_bytes.decode(data)


def _error(code: Any, reason: Any) -> Error:
    if type(code) is not int or not (reason is None or isinstance(reason, str)):
        raise TypeError("no error of Flower")
    return Error(code, None if reason is None else shortened(reason, MOST_CHARACTERS))
