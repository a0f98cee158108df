"""Waiting for descriptors, whatever their numbers.

``select.select`` takes numbers below 1,024 only (``FD_SETSIZE``), and raises ValueError for others. A server
with many connections, or a run with thousands of clients, has more open files than that. So nothing here uses
it, and a rule of ruff (``banned-api``) refuses it.
"""

from __future__ import annotations

import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Return those of the descriptors that can be read, or whose other end is closed.

    Waits until there is one, but no longer than ``timeout_s``; None: as long as it takes.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
