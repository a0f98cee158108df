"""What tests of something else leave out of events: how far a worker is, how long a lease was waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

PHASES = ("task_started", "worker_result", "lease_requested", "lease_not_granted")


def without_phases(into: list[Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return what takes events into a list, but for those."""

    def take(event: Mapping[str, Any]) -> None:
        if event["event"] not in PHASES:
            into.append(event)

    return take
