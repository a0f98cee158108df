"""Filters events about the progress of workers and leases, for tests that do not check these events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

PHASES = ("task_started", "worker_result", "lease_requested", "lease_not_granted")


def without_phases(into: list[Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that appends events to the list `into`, except for those named in PHASES."""

    def take(event: Mapping[str, Any]) -> None:
        if event["event"] not in PHASES:
            into.append(event)

    return take
