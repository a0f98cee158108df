"""The reply of a confined worker: data that is checked, and nothing that is unpickled.

The app in such a worker may write what it likes into the memory file. What is read is a description in JSON,
of known fields, and bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flower_gpu.errors import MOST_CHARACTERS, InvalidResultError, shortened
from flower_gpu.workers import memory_files
from flower_gpu.workers.outcome import Outcome

_MAGIC: Final = b"fgplain1"
_START: Final = struct.Struct("<8sQ")  # magic, bytes of the description

#: Of a description, which is read as a whole. Arrays are not in it.
MOST_DESCRIBED_BYTES: Final = 64 << 20

_BYTES, _JSON = "bytes", "json"  # what a value is


@dataclass(frozen=True)
class PlainBytes:
    """A value that travels as bytes, in parts. The caller gets one memoryview."""

    parts: Sequence[bytes | memoryview]


def write_reply(outcome: Outcome, descriptor: int) -> None:
    """Write an outcome into an empty memory file for the caller of this confined worker.

    Raises InvalidResultError if its value is neither :class:`PlainBytes` nor something that JSON has.
    """
    described: dict[str, Any] = {
        "cpu_s": outcome.cpu_s,
        "error": None
        if outcome.error_type is None
        else [outcome.error_type, outcome.error_text, outcome.error_traceback],
    }
    parts: Sequence[bytes | memoryview] = ()
    if isinstance(outcome.value, PlainBytes):
        described["kind"], parts = _BYTES, outcome.value.parts
    else:
        described |= {"kind": _JSON, "value": outcome.value}
    try:
        head = json.dumps(described).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidResultError(
            f"a confined worker returns numbers, texts, and lists and dicts of them ({error})"
        ) from error
    if len(head) > MOST_DESCRIBED_BYTES:
        raise InvalidResultError(f"the result has more than {MOST_DESCRIBED_BYTES >> 20} MiB besides arrays")
    end = memory_files.write(descriptor, _START.pack(_MAGIC, len(head)) + head, 0)
    for part in parts:
        end = memory_files.write(descriptor, memoryview(part).cast("B"), end)
    memory_files.seal(descriptor)


def read_reply(descriptor: int) -> Outcome:
    """Read, in the caller, what a confined worker wrote, once the worker is gone.

    Its value is a memoryview, or of JSON. Raises InvalidResultError if the file holds something else.
    """
    status = os.fstat(descriptor)
    try:
        magic, size = _START.unpack(os.pread(descriptor, _START.size, 0))
        # A file with holes may be larger than any memory.
        if magic != _MAGIC or size > MOST_DESCRIBED_BYTES or status.st_size > status.st_blocks * 512:
            raise ValueError("not in the form of a result")
        described = json.loads(bytes(memory_files.read(descriptor, size, _START.size)))
        kind, told, cpu_s = described["kind"], described["error"], described["cpu_s"]
        if not (cpu_s is None or (type(cpu_s) in (int, float) and 0 <= cpu_s < 1e9)):
            raise ValueError("no CPU time")
        if told is not None:
            name, text, lines = map(_text, told)
            return Outcome(None, cpu_s, name, text, lines)
        value = (
            described["value"] if kind == _JSON else _bytes(descriptor, _START.size + size, status.st_size)
        )
    except Exception as error:  # whatever an app may have written there
        raise InvalidResultError(f"a confined worker left no result that can be read ({error})") from None
    return Outcome(value, cpu_s)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return shortened(value, MOST_CHARACTERS)


def _bytes(descriptor: int, start: int, end: int) -> memoryview:
    # Unsealed, a process that the worker left behind could change it after it was checked.
    if memory_files.seal(descriptor):
        try:
            return memory_files.Map(descriptor, end).view[start:].toreadonly()
        except OSError:  # too many maps
            pass
    return memoryview(memory_files.read(descriptor, end - start, start)).toreadonly()
