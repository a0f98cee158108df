"""What comes from a confined worker: data that is checked, and nothing that is unpickled.

The app in such a worker may write what it likes. Of its reply, in a memory file, a description in JSON is
read, of known fields, and bytes. Of its events those are taken that are known, and of these only fields of
the right kind. What it could do by a lie in a number is told in docs/explanation/security.md.
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

#: Of a description, which is read as a whole. Arrays are not in it. In Python's memory nested lists take 22
#: times as much as in JSON, which was measured: 64 MiB of them took 1.4 GiB of their reader.
MOST_DESCRIBED_BYTES: Final = 4 << 20
#: Of an event, which is a few numbers and short texts.
MOST_EVENT_BYTES: Final = 1 << 20

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
    """Read a confined worker's reply in the caller, once the worker is gone.

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


_MOST_TEXT: Final = 200
_MOST: Final = 1 << 53  # of a number: bytes, seconds, counts
_MOST_GPUS: Final = 64

#: What takes a value as it was told, and returns what of it can be used.
_Take = Callable[[Any], Any]


def _seconds(value: Any) -> float:
    is_fine = type(value) in (int, float) and math.isfinite(value) and 0 <= value <= _MOST
    return float(value) if is_fine else 0.0


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST else None


def _truth(value: Any) -> bool | None:
    return value if type(value) is bool else None


def _short_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in value[:_MOST_TEXT])


def _gpus(value: Any) -> list[dict[str, Any]]:
    given = value[:_MOST_GPUS] if isinstance(value, list) else []
    return [_taken(each, _GPU) for each in given if isinstance(each, dict)]


def _used(value: Any) -> dict[str, int]:
    given = list(value.items())[:_MOST_GPUS] if isinstance(value, dict) else []
    return {name[:_MOST_TEXT]: size for name, told in given if (size := _count(told)) is not None}


_GPU: Final[Mapping[str, _Take]] = MappingProxyType(
    {
        "uuid": _short_text,
        # Not context_bytes: that is kept for all apps on a GPU of this model.
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
        "set_too_late": {"variables": lambda _: {}},  # that there are some is enough: none is taken over
        "sys_exit": {"where": lambda value: _short_text(value) or ""},
        "task_started": {},
        "cuda_started": {},
        "progress": {
            "desc": lambda value: _short_text(value) or "",
            "n": lambda n: _count(n) or 0,
            "total": _count,
        },
        "gpu_memory": {"gpus": _gpus, "cuda": _truth},
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
    """Return the valid fields of an event, or None."""
    name = event.get("event")
    fields = _EVENTS.get(name) if isinstance(name, str) else None
    return None if fields is None else {"event": name, **_taken(event, fields)}


def _taken(given: Mapping[str, Any], fields: Mapping[str, _Take]) -> dict[str, Any]:
    return {name: take(given.get(name)) for name, take in fields.items()}
