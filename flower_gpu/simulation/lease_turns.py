"""Which message of a run asks the ledger for a lease: one at a time. The others wait here, without a limit.

They wait for their own run, whose calls end one after the other. That is no reason to give a message up, nor
for a ticket each: for every ticket in the ledger other runs let go of their leases.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flower_gpu.calls.leasing import MOST_TOO_MUCH
from flower_gpu.errors import GPUError
from flower_gpu.leases import tickets
from flower_gpu.leases.admission import Option
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Entry, Ticket


class LeaseTurns:
    """The leases of one run: who asks for the next one, and how many it holds.

    Parameters
    ----------
    most : int, optional
        How many leases there can be at a time, where that is known: with so many, nobody asks for more.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._lines: dict[str, deque[object]] = defaultdict(deque)
        self._held = 0
        self._none_since = time.monotonic()
        self._reading = threading.Lock()
        self._reader = tickets.Reader()
        self._pid_namespace = tickets.pid_namespace()

    @contextmanager
    def turn(self, kind: str, check: Callable[[], object]) -> Iterator[None]:
        """Wait until nobody else asks; in the block it is the caller who does.

        Parameters
        ----------
        kind : str
            What the lease is for. Calls of another kind ask for something else, and have a line of their own.
        check : callable
            Called after each :meth:`wake`; what it raises ends the wait.
        """
        me = object()
        with self._changed:
            line = self._lines[kind]
            line.append(me)
        try:
            with self._changed:
                check()
                while line[0] is not me or (self._most is not None and self._held >= self._most):
                    self._changed.wait()
                    check()
            yield
        finally:
            with self._changed:
                line.remove(me)
                self._changed.notify_all()

    def wake(self) -> None:
        """Have all who wait for their turn check whether they still want it."""
        with self._changed:
            self._changed.notify_all()

    def taken(self) -> None:
        """Take note of a lease that this run has now."""
        with self._changed:
            self._held += 1

    def given_back(self) -> None:
        """Take note of a lease that this run has no more."""
        with self._changed:
            self._held -= 1
            self._none_since = time.monotonic()
            self._changed.notify_all()

    def deadline(self, began: float, timeout_s: float) -> float:
        """Return until when a call may wait in the ledger, as it is now.

        While the run holds a lease there is no limit: its calls go on, and each that ends makes room. Without
        one it waits for others, and that is what the limit is for.

        Parameters
        ----------
        began : float
            When the call began to wait, on the clock of ``time.monotonic``.
        timeout_s : float
            How long it may.
        """
        with self._changed:
            return float("inf") if self._held else max(began, self._none_since) + timeout_s

    def is_wanted(self, ticket: Ticket) -> bool:
        """Tell whether somebody waits for room that a lease takes, other than for the same in this process.

        The mutex is not taken: a ticket that is just being written is seen after the next call.
        """
        uuids = {part.uuid for part in ticket.entry.parts}
        with self._reading:
            try:
                entries = self._reader.read(LedgerFolder.find().all())
            except (OSError, GPUError):  # no more files can be opened; whoever asks for a lease is told
                return False
        return any(
            not entry.parts
            and any(option.uuid in uuids for option in entry.options)
            and not self._is_same(entry, ticket.entry)
            and entry.is_alive()
            for entry in entries
        )

    def _is_same(self, entry: Entry, own: Entry) -> bool:
        if entry.pid != os.getpid() or entry.pid_namespace != self._pid_namespace:
            return False
        return entry.count == own.count and all(map(_is_alike, entry.options, own.options))


def _is_alike(one: Option, other: Option) -> bool:
    """Tell whether options ask for as much, as far as a footprint that is learned stays the same."""
    if (one.uuid, one.share, one.alone) != (other.uuid, other.share, other.alone):
        return False
    sizes = sorted([one.memory_bytes or 0, other.memory_bytes or 0])
    return sizes[1] <= MOST_TOO_MUCH * sizes[0]
