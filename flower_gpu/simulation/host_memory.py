"""Main memory of this host: messages of a run wait until a worker has room.

A message waits until the free memory is enough for a worker as large as the largest one so far. If the kernel
killed a worker because memory ran out, its message is handled again *alone*, with no other message in flight.

The threads of the slots call :meth:`HostMemory.room`, and any thread may call ``wake``. One condition
protects the messages in flight. ``before_wait`` is called without it, because it may take other locks.

Two rules keep these waits from blocking each other:

- A message does not wait for memory if its worker already exists and holds a lease. Messages that were
  admitted earlier may wait for this lease.
- As soon as a message waits to be alone, no other message is admitted, with or without a lease. Otherwise
  other messages could always be in flight, and this message would starve. Before a message waits, it
  offers the lease of its worker to the others (``before_wait``), because messages in flight may need the
  lease to finish.

Messages that must be alone take turns, first come, first served.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from typing import Final

from flwr.common.logger import log

from flower_gpu import control_group
from flower_gpu.errors import LeaseTimeoutError
from flower_gpu.leases.host import RESERVED_PART
from flower_gpu.leases.ledger import SAID_AFTER_S
from flower_gpu.printable import and_others

# Minimum seconds between two queries of the kernel, because a query takes longer than a small message
_LOOK_S: Final = 0.1
# Maximum seconds between two checks, because other processes of the host also release memory
_POLL_S: Final = 0.2
_GROWTH_S: Final = 2.0  # seconds until a new worker has most of its memory


@dataclass(frozen=True, eq=False)
class _Entrant:
    """A message that waits for room or is in flight."""

    label: str
    is_alone: bool


class HostMemory:
    """Admits messages while the host has memory for another worker of the largest size so far. Thread-safe.

    ``available``: returns free and total bytes, as :func:`flower_gpu.control_group.available_memory` does.
    """

    def __init__(self, available: Callable[[], tuple[int, int]] = control_group.available_memory) -> None:
        self._available = available
        self._changed = threading.Condition()
        self._entered_at: dict[_Entrant, float] = {}  # messages in flight
        self._alone: list[_Entrant] = []  # messages that are alone or wait to be, in order
        #: Peak memory of the largest worker so far, in bytes.
        self.largest_bytes = 0
        self._measured_at, self._measured = -_LOOK_S, available()
        #: Number of messages that had to wait.
        self.wait_count = 0

    @contextmanager
    def room(
        self,
        label: str = "a message",
        *,
        has_lease: bool = False,
        alone: bool = False,
        check: Callable[[], object] = lambda: None,
        before_wait: Callable[[], object] = lambda: None,
        timeout_s: float = math.inf,
    ) -> Iterator[None]:
        """Wait for memory, and admit a message for the block.

        The first message is always admitted.

        ``label``: name of the message in texts.
        ``has_lease``: True if a worker with a lease waits for the message.
        ``alone``: True to wait until no other message is in flight, and to admit no other during the block.
        ``check``: called repeatedly, and immediately after :meth:`wake`. Its errors end the wait.
        ``before_wait``: called before a wait, without any lock.
        ``timeout_s``: seconds until the wait ends with an error.

        Raises LeaseTimeoutError if the message was not admitted in time.
        """
        entrant = _Entrant(label, alone)
        with self._changed:
            if alone:
                self._alone.append(entrant)
            if is_let_in := self._may_enter(entrant, has_lease=has_lease):
                self._entered_at[entrant] = time.monotonic()
            else:
                self.wait_count += 1
        try:
            if not is_let_in:
                before_wait()
                self._wait(entrant, check, timeout_s)
            yield
        finally:
            with self._changed:
                self._entered_at.pop(entrant, None)
                if alone:
                    self._alone.remove(entrant)
                self._changed.notify_all()

    def wake(self) -> None:
        """Make all waiting messages call their ``check`` now."""
        with self._changed:
            self._changed.notify_all()

    def learn(self, worker_bytes: int) -> None:
        """Record the peak memory of a worker."""
        self.largest_bytes = max(self.largest_bytes, worker_bytes)

    def _wait(self, entrant: _Entrant, check: Callable[[], object], timeout_s: float) -> None:
        began = time.monotonic()
        # Other messages wait often. They are only counted, for the summary of the run.
        is_said = not entrant.is_alone
        with self._changed:
            check()
            while not self._may_enter(entrant):
                waited_s = time.monotonic() - began
                if waited_s >= timeout_s:
                    raise LeaseTimeoutError(
                        f"{entrant.label} could not be handled alone within lease_timeout_s={timeout_s:g}: "
                        f"{self._others(entrant)}. Raise lease_timeout_s, or let fewer clients run at a time"
                    )
                if waited_s >= SAID_AFTER_S and not is_said:
                    is_said = True
                    log(WARNING, "%s waits to be handled alone: %s", entrant.label, self._others(entrant))
                self._changed.wait(min(_POLL_S, timeout_s - waited_s))
                check()
            self._entered_at[entrant] = time.monotonic()

    def _others(self, entrant: _Entrant) -> str:
        """Return a text with the messages that must end before ``entrant`` can be handled alone."""
        labels = [other.label for other in self._entered_at]
        if labels:
            verb = "is" if len(labels) == 1 else "are"
            return f"{labels[0]}{and_others(len(labels) - 1)} {verb} still in flight"
        return f"{self._alone[0].label} is before it"

    def _may_enter(self, entrant: _Entrant, *, has_lease: bool = False) -> bool:
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
