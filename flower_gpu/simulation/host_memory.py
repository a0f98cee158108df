"""Memory of the host: one more worker is started only while there is room for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flower_gpu import control_group
from flower_gpu.leases.host import RESERVED_PART

_LOOK_S = 0.1  # asking the kernel takes longer than a small message
_POLL_S = 0.2  # others on the host give memory back, too
_GROWTH_S = 2.0  # from a worker's start until it has most of its memory


class HostMemory:
    """Lets workers start while there is memory for as much as the largest one took so far.

    ``available``: as :func:`flower_gpu.control_group.available_memory`.
    """

    def __init__(self, available: Callable[[], tuple[int, int]] = control_group.available_memory) -> None:
        self._available = available
        self._changed = threading.Condition()
        self._running = 0
        #: The most that a worker took so far.
        self.largest_bytes = 0
        self._looked, self._found = -_LOOK_S, available()
        self._started: list[float] = []
        #: How often a worker had to wait.
        self.waits = 0

    @contextmanager
    def room(self, *, at_once: bool = False) -> Iterator[None]:
        """Wait until there is room for a worker. There always is for the first one.

        ``at_once``: do not wait: the worker is there, and has what others who are let in wait for.
        """
        with self._changed:
            if not at_once and not self._has_room():
                self.waits += 1
                while not self._has_room():
                    self._changed.wait(_POLL_S)
            self._running += 1
            began = time.monotonic()
            self._started.append(began)
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._started.remove(began)
                self._changed.notify()

    def learn(self, worker_bytes: int) -> None:
        """Note a worker's memory."""
        self.largest_bytes = max(self.largest_bytes, worker_bytes)

    def _has_room(self) -> bool:
        if not self._running:
            return True
        now = time.monotonic()
        if now > self._looked + _LOOK_S:
            self._looked, self._found = now, self._available()
        available, total = self._found
        # Those that were let in just now have not taken theirs yet.
        recent = sum(began > now - _GROWTH_S for began in self._started)
        return available >= self.largest_bytes * (1 + recent) + RESERVED_PART * total
