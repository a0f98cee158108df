"""Replies and events of a confined worker, which are checked and never unpickled.

The app in a confined worker may write anything. Its reply lies in a memory file, and consists of a JSON
description with known fields, and of bytes. Only known events are accepted, and only fields with values of
the right type. docs/explanation/security.md says what the app could do with a wrong number.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.errors import MOST_CHARACTERS, InvalidResultError, shortened
from flower_gpu.workers import memory_files
from flower_gpu.workers.call_end import Outcome

_MAGIC: Final = b"fgplain1"
_START: Final = struct.Struct("<8sQ")  # magic, bytes of the description

#: Limit of a description, which is read as a whole and contains no arrays. Nested lists take 22 times as much
#: memory in Python as in JSON. In a measurement, 64 MiB of JSON took 1.4 GiB in the reader.
MOST_DESCRIBED_BYTES: Final = 4 << 20
#: Limit of an event, which consists of a few numbers and short texts.
MOST_EVENT_BYTES: Final = 1 << 20

_BYTES, _JSON = "bytes", "json"  # kinds of values


@dataclass(frozen=True)
class PlainBytes:
    """A value that is sent as bytes, in parts. The caller gets one memoryview."""

    parts: Sequence[bytes | memoryview]


def write_reply(outcome: Outcome, descriptor: int) -> None:
    """Write an outcome into an empty memory file for the caller of this confined worker.

    Raises InvalidResultError if its value is neither :class:`PlainBytes` nor a JSON value.
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
    """Return the outcome in a confined worker's reply. The caller calls this once the worker is gone.

    The value is a memoryview or a JSON value. Raises InvalidResultError if the file holds no valid reply.
    """
    status = os.fstat(descriptor)
    try:
        magic, size = _START.unpack(os.pread(descriptor, _START.size, 0))
        # Files with holes are refused, because such a file may be larger than any memory.
        if magic != _MAGIC or size > MOST_DESCRIBED_BYTES or status.st_size > status.st_blocks * 512:
            raise ValueError("not in the form of a result")
        described = json.loads(bytes(memory_files.read(descriptor, size, _START.size)))
        kind, error_texts, cpu_s = described["kind"], described["error"], described["cpu_s"]
        if not (cpu_s is None or (type(cpu_s) in (int, float) and 0 <= cpu_s < 1e9)):
            raise ValueError("no CPU time")
        if error_texts is not None:
            name, text, lines = map(_text, error_texts)
            return Outcome(None, cpu_s, name, text, lines)
        value = (
            described["value"] if kind == _JSON else _bytes(descriptor, _START.size + size, status.st_size)
        )
    except Exception as error:  # The app may have written anything, so any error is possible.
        raise InvalidResultError(f"a confined worker left no result that can be read ({error})") from None
    return Outcome(value, cpu_s)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return shortened(value, MOST_CHARACTERS)


def _bytes(descriptor: int, start: int, end: int) -> memoryview:
    # Without a seal, a process that the worker left behind could change the bytes after the check.
    if memory_files.seal(descriptor):
        try:
            return memory_files.Map(descriptor, end).view[start:].toreadonly()
        except OSError:  # too many maps
            pass
    return memoryview(memory_files.read(descriptor, end - start, start)).toreadonly()


_MOST_TEXT: Final = 200
_MAX_NUMBER: Final = 1 << 53  # limit of every number: bytes, seconds, counts
_MOST_GPUS: Final = 64

#: A function that gets a reported value, and returns a valid value or a substitute.
_Take = Callable[[Any], Any]


def _seconds(value: Any) -> float:
    is_valid = type(value) in (int, float) and math.isfinite(value) and 0 <= value <= _MAX_NUMBER
    return float(value) if is_valid else 0.0


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def _truth(value: Any) -> bool | None:
    return value if type(value) is bool else None


def _short_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in value[:_MOST_TEXT])


def _gpus(value: Any) -> list[dict[str, Any]]:
    gpus = value[:_MOST_GPUS] if isinstance(value, list) else []
    return [_valid_fields(gpu, _GPU) for gpu in gpus if isinstance(gpu, dict)]


def _used(value: Any) -> dict[str, int]:
    items = list(value.items())[:_MOST_GPUS] if isinstance(value, dict) else []
    return {name[:_MOST_TEXT]: size for name, number in items if (size := _count(number)) is not None}


_GPU: Final[Mapping[str, _Take]] = MappingProxyType(
    {
        "uuid": _short_text,
        # context_bytes is not accepted, because its value would be kept for all apps on GPUs of this model.
        **dict.fromkeys(("peak_bytes", "reserved_peak_bytes", "allocated_peak_bytes"), _count),
        **dict.fromkeys(("reserved_before_bytes", "alloc_retries", "outside_bytes"), _count),
        **dict.fromkeys(("lease_bytes", "cap_bytes", "cap_in_force_bytes"), _count),
        "told_by_driver": _truth,
    }
)
_EVENTS: Final[Mapping[str, Mapping[str, _Take]]] = MappingProxyType(
    {
        "result": {"cpu_s": _seconds, "memory_bytes": _count, "mapped_bytes": _count},
        "importing": {"seconds": _seconds},
        # The caller only needs to know that such variables exist. It does not take over their values.
        "set_too_late": {"variables": lambda _: {}},
        "sys_exit": {"where": lambda value: _short_text(value) or ""},
        "task_started": {},
        "progress": {
            "desc": lambda value: _short_text(value) or "",
            "n": lambda n: _count(n) or 0,
            "total": _count,
        },
        "gpu_memory": {"gpus": _gpus},
        "gpu_used": {"used": _used},
        "lacks": {"text": _short_text},
        "no_cuda": dict.fromkeys(("reason", "torch", "torch_cuda"), _short_text),
        "out_of_memory": {
            **dict.fromkeys(("kind", "uuid"), lambda value: _short_text(value) or ""),
            **dict.fromkeys(("asked_bytes", "reserved_bytes", "allocated_bytes", "cap_bytes"), _count),
            **dict.fromkeys(("allocated_peak_bytes", "free_bytes", "total_bytes", "outside_bytes"), _count),
        },
    }
)


def checked_event(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an event with its valid fields only, or None if the event is unknown."""
    name = event.get("event")
    fields = _EVENTS.get(name) if isinstance(name, str) else None
    return None if fields is None else {"event": name, **_valid_fields(event, fields)}


def _valid_fields(report: Mapping[str, Any], fields: Mapping[str, _Take]) -> dict[str, Any]:
    return {name: take(report.get(name)) for name, take in fields.items()}
