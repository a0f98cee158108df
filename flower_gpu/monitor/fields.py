"""Fields of events, as far as they are what they should be: a trace may have been written by anybody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

_HUGE: Final = 1 << 63  # larger ones are no figures of a run, and fit into no float


def text(value: object) -> str:
    """Return a text; empty where it is none."""
    return value if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """Return a finite number; None where it is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    found = whole(value)
    return None if found is None else float(found)


def whole(value: object) -> int | None:
    """Return a whole number; None where it is none, or no figure of a run."""
    return value if type(value) is int and abs(value) < _HUGE else None


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return what of a list is a mapping."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
