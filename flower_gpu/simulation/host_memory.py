"""Main memory of this host: decides which messages of a run may begin.

A message begins when the free memory is enough for a worker as large as the largest one so far. If the kernel
killed a worker because memory ran out, its message is handled again *alone*, with no other message in flight.

This module only decides. :class:`flower_gpu.simulation.pool.WorkerPool` asks for each message, under its
lock, and lets messages wait. Two rules keep these waits from blocking each other:

- A message does not wait for memory if a worker with a lease on a GPU waits for it, because messages that
  have begun may wait for this lease.
- As soon as a message waits to be alone, no other message begins, with or without a lease. Otherwise other
  messages could always be in flight, and this message would starve.

Messages that must be alone take turns, first come, first served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from flower_gpu import control_group
from flower_gpu.leases.host import RESERVED_PART
from flower_gpu.printable import and_others

# Minimum seconds between two queries of the kernel, because a query takes longer than a small message
_LOOK_S: Final = 0.1
_GROWTH_S: Final = 2.0  # seconds until a new worker has most of its memory


class Entrant(Protocol):
    """A message that wants to begin."""

    @property
    def label(self) -> str:
        """Name of the message in texts."""

    @property
    def must_run_alone(self) -> bool:
        """True if no other message may be in flight together with this message."""


class HostMemory:
    """The messages in flight, and the memory of the largest worker so far. Not thread-safe.

    ``available``: returns free and total bytes, as :func:`flower_gpu.control_group.available_memory` does.
    """

    def __init__(self, available: Callable[[], tuple[int, int]] = control_group.available_memory) -> None:
        self._available = available
        self._entered_at: dict[Entrant, float] = {}  # messages in flight
        self._alone: list[Entrant] = []  # messages alone, or waiting to be alone, in order
        #: Peak memory of the largest worker so far, in bytes.
        self.largest_bytes = 0
        self._measured_at, self._measured = -_LOOK_S, available()

    def enter(self, entrant: Entrant, *, has_lease: bool = False) -> bool:
        """Let a message begin. Return False if the message has to wait. The caller then tries again.

        ``has_lease``: True if a worker with a lease on a GPU waits for the message.
        """
        if entrant.must_run_alone and entrant not in self._alone:
            self._alone.append(entrant)
        is_admitted = self._may_enter(entrant, has_lease=has_lease)
        if is_admitted:
            self._entered_at[entrant] = time.monotonic()
        return is_admitted

    def leave(self, entrant: Entrant) -> None:
        """Record that a message has ended, or no longer waits."""
        self._entered_at.pop(entrant, None)
        if entrant in self._alone:
            self._alone.remove(entrant)

    def learn(self, worker_bytes: int) -> None:
        """Record the peak memory of a worker."""
        self.largest_bytes = max(self.largest_bytes, worker_bytes)

    def blocking(self, entrant: Entrant) -> str:
        """Return a text with the messages that must end before ``entrant`` can be handled alone."""
        labels = [other.label for other in self._entered_at]
        if labels:
            verb = "is" if len(labels) == 1 else "are"
            return f"{labels[0]}{and_others(len(labels) - 1)} {verb} still in flight"
        return f"{self._alone[0].label} is before it"

    def _may_enter(self, entrant: Entrant, *, has_lease: bool) -> bool:
        if self._alone:
            return self._alone[0] is entrant and not self._entered_at
        if has_lease or not self._entered_at:
            return True
        now = time.monotonic()
        if now > self._measured_at + _LOOK_S:
            self._measured_at, self._measured = now, self._available()
        available, total = self._measured
        # Workers of recently admitted messages have not allocated their memory yet.
        recent = sum(entered_at > now - _GROWTH_S for entered_at in self._entered_at.values())
        return available >= self.largest_bytes * (1 + recent) + RESERVED_PART * total
