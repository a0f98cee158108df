"""Waiting for descriptors, whatever their numbers.

``select.select`` takes numbers below 1,024 only (``FD_SETSIZE``), and raises ValueError for others. A server
with many connections, or a run with thousands of clients, has more open files than that. So the package uses
``poll``, and a rule of ruff (``banned-api``) rejects ``select.select``.
"""

from __future__ import annotations

import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Return the readable descriptors; a descriptor is readable, too, when its other end is closed.

    Blocks until a descriptor is readable, or until the timeout.

    ``timeout_s``: seconds; None for no timeout. A deadline that has passed gives a number below 0, which
    counts as 0: ``poll`` itself would wait for ever.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    timeout_ms = None if timeout_s is None else max(0.0, timeout_s) * 1000
    return {descriptor for descriptor, _ in poll.poll(timeout_ms)}
