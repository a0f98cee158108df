"""Limits on the memory of a history that does not keep finished items."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

#: Number of recent entries that each list of finished items keeps.
KEPT_ENTRIES: Final = 50
#: Maximum number of unfinished items of each kind. Without a maximum, memory use would grow without bound if
#: a trace never reports their ends.
MOST_OPEN: Final = 10_000
#: Maximum number of hosts of a run, and of all runs together.
MOST_HOSTS: Final = 1000


def drop_oldest(entries: dict[Any, Any], max_count: int) -> None:
    """Remove the oldest entries of a dict until it has ``max_count`` or fewer."""
    if len(entries) > max_count:
        for key in list(islice(entries, len(entries) - max_count)):
            del entries[key]
