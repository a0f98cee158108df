"""Events of a confined worker: only those that are known, and of these only fields of the right kind.

The app in such a worker may write what it likes. What it could do by a lie in a number is told in
docs/explanation/security.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

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


def _text(value: Any) -> str | None:
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
        "uuid": _text,
        # Not context_bytes: that is kept for all apps on a GPU of this model.
        **dict.fromkeys(("peak_bytes", "reserved_peak_bytes", "allocated_peak_bytes"), _count),
        **dict.fromkeys(("reserved_before_bytes", "alloc_retries", "outside_bytes"), _count),
        **dict.fromkeys(("lease_bytes", "cap_bytes", "cap_in_force_bytes"), _count),
        "told_by_driver": _truth,
    }
)
_EVENTS: Final[Mapping[str, Mapping[str, _Take]]] = MappingProxyType(
    {
        "result": {"cpu_s": _seconds, "memory_bytes": _count},
        "importing": {"seconds": _seconds},
        "set_too_late": {"variables": lambda _: {}},  # that there are some is enough: none is taken over
        "sys_exit": {"where": lambda value: _text(value) or ""},
        "task_started": {},
        "cuda_started": {},
        "progress": {
            "desc": lambda value: _text(value) or "",
            "n": lambda n: _count(n) or 0,
            "total": _count,
        },
        "gpu_memory": {"gpus": _gpus, "cuda": _truth},
        "gpu_used": {"used": _used},
        "lacks": {"text": _text},
        "no_cuda": dict.fromkeys(("reason", "torch", "torch_cuda"), _text),
        "out_of_memory": {
            **dict.fromkeys(("kind", "uuid"), lambda value: _text(value) or ""),
            **dict.fromkeys(("asked_bytes", "reserved_bytes", "allocated_bytes", "cap_bytes"), _count),
            **dict.fromkeys(("allocated_peak_bytes", "free_bytes", "total_bytes", "outside_bytes"), _count),
        },
    }
)


def checked(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what of an event can be used; None where nothing can."""
    name = event.get("event")
    fields = _EVENTS.get(name) if isinstance(name, str) else None
    return None if fields is None else {"event": name, **_taken(event, fields)}


def _taken(given: Mapping[str, Any], fields: Mapping[str, _Take]) -> dict[str, Any]:
    return {name: take(given.get(name)) for name, take in fields.items()}
