"""Reads fields of events and checks their types, because a trace may come from an untrusted source."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from flower_gpu import printable

_MAX_METRICS: Final = 3  # number of metrics in a line about a round
# Well-known metrics in the order in which they are shown.
_KNOWN_METRICS: Final = ({"accuracy", "acc"}, {"loss"}, {"f1", "f1score"}, {"precision"}, {"recall"})
_WORD: Final = re.compile("[a-z0-9]+")
#: Name in place of a client for calls on the server.
SERVER: Final = "server"
_MAX_DIGITS: Final = 15  # digits of a client's number
# Larger integers cannot be valid figures of a run, and may not fit into a float.
_HUGE: Final = 1 << 63


def text(value: object) -> str:
    """Return a text unchanged, and an empty text for any other value."""
    return value if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """Return a finite number as a float, and None for any other value."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    integer = whole_number(value)
    return None if integer is None else float(integer)


def whole_number(value: object) -> int | None:
    """Return an integer of plausible size unchanged, and None for any other value."""
    return value if type(value) is int and abs(value) < _HUGE else None


def node_id(value: object) -> int | None:
    """Return a node id (an unsigned 64-bit integer) unchanged, and None for any other value."""
    return value if type(value) is int and 0 <= value < 1 << 64 else None


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in a list, or an empty list if the value is not a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def first_line(value: object) -> str:
    """Return the first line of a text, such as an error: see :func:`flower_gpu.printable.first_line`."""
    return printable.first_line(text(value))


def mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping unchanged, and an empty mapping for any other value."""
    return value if isinstance(value, Mapping) else {}


def metrics_text(metrics: Mapping[str, Any], max_count: int = _MAX_METRICS) -> str:
    """Return the first ``max_count`` numeric metrics as a text."""
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return ", ".join(f"{name} {value:.4g}" for name, value in list(numbers.items())[:max_count])


def metric_rank(name: str) -> int:
    """Return the sort key of a metric: accuracy and loss first, unknown names last."""
    words = _WORD.findall(name.lower())
    ranks = (rank for rank, known in enumerate(_KNOWN_METRICS) if not known.isdisjoint(words))
    return next(ranks, len(_KNOWN_METRICS))


def call_label(event: Mapping[str, Any]) -> str:
    """Return the name of a call, such as ``fit of client 3`` or ``evaluate on the server``."""
    task, client = event.get("task") or "call", event.get("client")
    return f"{task} on the server" if client in (None, "", SERVER) else f"{task} of client {client}"


def client_key(client: str) -> tuple[bool, int, str]:
    """Return the sort key of a client: the server first, then numbers by value, then names."""
    return client != SERVER, len(client) if client.isdecimal() else _MAX_DIGITS, client


def owner_fields(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event that identify its call: call, client, task, host and round."""
    texts = {name: text(event.get(name)) for name in ("call", "client", "task", "host")}
    return {**texts, "round": whole_number(event.get("round"))}
