"""Fields of events, as far as they are what they should be: a trace may have been written by anybody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def text(value: object) -> str:
    """Return a text; empty where it is none."""
    return value if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """Return a finite number; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of more than 300 digits
        return None


def whole(value: object) -> int | None:
    """Return a whole number; None where it is none."""
    return value if type(value) is int else None


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return what of a list is a mapping."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
