"""Names and figures as people read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from flower_gpu import printable as shown
from flower_gpu.leases.request import format_bytes
from flower_gpu.printable import printable
from flower_gpu.watch.spans import GPUInfo

UNKNOWN: Final = "-"
_SERVER: Final = "server"
_MOST_DIGITS: Final = 15

#: Whose metrics they are, by the kind of the messages that they come from.
_WHOSE: Final[Mapping[str, str]] = {
    "server-evaluate": "server, evaluate",
    "evaluate": "clients, evaluate",
    "train": "clients, train",
    "fit": "clients, fit",
}


def client_key(client: str) -> tuple[bool, list[tuple[int, int, str]]]:
    """Return what sorts clients as people do: numbers by their value, the server first."""
    words = [word for word in re.split(r"([0-9]+)", client) if word]
    key = [
        (0, int(word), word) if word.isdecimal() and len(word) <= _MOST_DIGITS else (1, 0, word)
        for word in words
    ]
    return client != _SERVER, key


def client_name(client: str) -> str:
    """Name a client: ``"client 3"``, ``"server"``."""
    if client == _SERVER:
        return client
    return f"client {printable(client)}" if client else "unnamed client"


def gpu_name(gpu: GPUInfo, others: Sequence[GPUInfo]) -> str:
    """Name a GPU by its number; by its UUID as well if another has this number: MIG devices, other hosts."""
    if gpu.index < 0:
        return f"GPU {printable(gpu.uuid)}"
    if sum(one.index == gpu.index for one in others) > 1:
        return f"GPU {gpu.index} ({printable(gpu.uuid)[:12]})"
    return f"GPU {gpu.index}"


def task_name(task: str) -> str:
    """Name messages or metrics of one kind: ``"clients, fit"``."""
    return _WHOSE.get(task, printable(task))


def bytes_text(nbytes: int | None) -> str:
    """Write a size, or that nobody knows it."""
    return UNKNOWN if nbytes is None else format_bytes(nbytes)


def percent_text(share: float | None) -> str:
    """Write a share of 1 in percent."""
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def duration_text(seconds: float | None) -> str:
    """Write how long something took, or that nobody knows it."""
    return UNKNOWN if seconds is None else shown.duration_text(seconds)


def moment_text(time: float | None) -> str:
    """Write a moment in this host's time zone."""
    if time is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (OverflowError, OSError, ValueError):  # no year that there is
        return UNKNOWN


def number_text(value: float) -> str:
    """Write a metric."""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """Write a number and what is counted: ``"1 client"``, ``"3 clients"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(counts: Mapping[str, int]) -> str:
    """Write several counts: ``"3 error, 1 died"``."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
