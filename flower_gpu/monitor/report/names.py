"""Names and figures as people read them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from flower_gpu.gpu.request import format_bytes
from flower_gpu.monitor.spans import GPUInfo
from flower_gpu.printable import printable

UNKNOWN: Final = "-"
_SERVER: Final = "server"
_MOST_DIGITS: Final = 15


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


def gpu_name(gpu: GPUInfo, others: list[GPUInfo]) -> str:
    """Name a GPU by its number; by its UUID as well if another has this number: MIG devices, other hosts."""
    if gpu.index < 0:
        return f"GPU {printable(gpu.uuid)}"
    if sum(one.index == gpu.index for one in others) > 1:
        return f"GPU {gpu.index} ({printable(gpu.uuid)[:12]})"
    return f"GPU {gpu.index}"


def bytes_text(nbytes: int | None) -> str:
    """Write a size, or that nobody knows it."""
    return UNKNOWN if nbytes is None else format_bytes(nbytes)


def percent_text(share: float | None) -> str:
    """Write a share of 1 in percent."""
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def duration_text(seconds: float | None) -> str:
    """Write how long something took: ``"0.12 s"``, ``"41.3 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


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
