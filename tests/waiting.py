"""Waits for what another process does, where there is nothing to select on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: object = "", timeout_s: float = 120.0) -> T:
    """Wait until a condition gives something true, and return that; fail after more than enough time."""
    began = time.monotonic()
    while not (found := condition()):
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(min(max(0.01, waited_s / 20), 0.1))  # a look may cost much: at all processes
    return found
