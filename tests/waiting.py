"""Waits for what another process does, where there is nothing to select on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: object = "", timeout_s: float = 120.0) -> T:
    """Wait until a condition gives something true, and return that; fail after more than enough time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return found
