"""Polls for an action of another process if there is no descriptor to wait on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: object = "", timeout_s: float = 120.0) -> T:
    """Wait until a condition returns a true value, and return the value. Fail after `timeout_s` seconds."""
    start = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - start
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        # The interval grows, because a condition may be expensive, for example if it looks at all processes.
        time.sleep(min(max(0.01, waited_s / 20), 0.1))
    return value
