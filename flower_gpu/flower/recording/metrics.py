"""Metrics of Flower's records as a trace and a file of JSON can hold them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from flower_gpu.errors import shortened

#: What a metric is: as in Flower's MetricRecord, and the texts that the NumPyClient API allows.
Metric = bool | int | float | str | None | list[int] | list[float]
Metrics = Mapping[str, Metric]


def clean(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """Make metrics of Python's own types; a value that is no metric becomes its text."""
    return {str(key): plain(value) for key, value in metrics.items()}


def plain(value: Any) -> Any:
    """Make a metric of Python's own types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a number of NumPy or torch
        try:
            return plain(value.item())
        except (TypeError, ValueError, RuntimeError):
            pass
    return shortened(str(value))


def finite(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are none become null, objects their text."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    found = plain(value)
    return None if isinstance(found, float) and not math.isfinite(found) else found
