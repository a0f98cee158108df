"""Checked fields of events: anybody may have written a trace."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from flower_gpu import printable

_MOST_METRICS: Final = 3  # of a round's task, in one line
_FIRST: Final = ({"accuracy", "acc"}, {"loss"}, {"f1", "f1score"}, {"precision"}, {"recall"})
_WORD: Final = re.compile("[a-z0-9]+")
#: The client of the server's own calls.
SERVER: Final = "server"
_MOST_DIGITS: Final = 15  # of the number of a client
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


def node_id(value: object) -> int | None:
    """Return the id of a node, which has 64 bits without a sign; None where it is none."""
    return value if type(value) is int and 0 <= value < 1 << 64 else None


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings of a list."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def first_line(value: object) -> str:
    """Return the first line of a text, such as an error: see :func:`flower_gpu.printable.first_line`."""
    return printable.first_line(text(value))


def mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping; empty where it is none."""
    return value if isinstance(value, Mapping) else {}


def metrics_text(metrics: Mapping[str, Any], most: int = _MOST_METRICS) -> str:
    """Write the first few numbers among metrics."""
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return ", ".join(f"{name} {value:.4g}" for name, value in list(numbers.items())[:most])


def metric_rank(name: str) -> int:
    """Return the sort key of metrics: accuracy and loss first, unknown names last."""
    words = _WORD.findall(name.lower())
    return next((rank for rank, known in enumerate(_FIRST) if not known.isdisjoint(words)), len(_FIRST))


def call_label(event: Mapping[str, Any]) -> str:
    """Name a call: ``fit of client 3``, ``evaluate on the server``."""
    task, client = event.get("task") or "call", event.get("client")
    return f"{task} on the server" if client in (None, "", SERVER) else f"{task} of client {client}"


def client_key(client: str) -> tuple[bool, int, str]:
    """Return what sorts clients as people do: the server first, then numbers by their value, then names."""
    return client != SERVER, len(client) if client.isdecimal() else _MOST_DIGITS, client


def whose(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return whose call an event is of: its call, client, task, host and round."""
    texts = {name: text(event.get(name)) for name in ("call", "client", "task", "host")}
    return {**texts, "round": whole(event.get("round"))}
