"""The messages that a host was given: they wait for a thread there, and, handled, to be fetched."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from flower_gpu.simulation.boxes import reply_bytes
from flower_gpu.simulation.cluster.visits import Visit, Visited

# Of short messages several are fetched at a time, as each time costs more than a short message does.
_GATHER_S: Final = 0.1
_MOST_BYTES: Final = 1 << 26  # of replies that are fetched at a time, where these are more than one


class WorkQueue:
    """Messages of a host. All methods may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_finished = threading.Condition(self._lock)
        self._waiting: deque[Visit] = deque()
        self._finished: deque[tuple[Visited, int]] = deque()  # with their sizes in bytes
        self._first_at = 0.0  # when the first of these was
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether there will be no message."""
        return self._is_closed

    def give(self, visits: Sequence[Visit]) -> None:
        """Take messages that are to be handled in this order."""
        with self._lock:
            self._waiting += visits
            self._has_work.notify(len(visits))

    def next(self, timeout_s: float | None) -> Visit | None:
        """Wait for a message that is to be handled; None where there is none in time, or no more."""
        with self._lock:
            self._has_work.wait_for(lambda: self._waiting or self._is_closed, timeout_s)
            visit = self._waiting.popleft() if self._waiting and not self._is_closed else None
            if self._finished and not self._waiting:
                self._has_finished.notify()  # whoever fetches brings messages
            return visit

    def finish(self, visited: Visited) -> None:
        """Take what has become of a message."""
        size = 0 if visited.reply is None else reply_bytes(visited.reply)
        with self._lock:
            self._finish(visited, size)

    def fetch(self, timeout_s: float) -> list[Visited]:
        """Wait for messages that are finished; empty where there are none in time.

        While others wait for a thread, several are returned at a time.

        Raises
        ------
        BaseException
            What :meth:`fail` was told.
        """
        with self._lock:
            self._has_finished.wait_for(
                lambda: self._finished or self._is_closed or self._error is not None, timeout_s
            )
            if self._error is not None:
                raise self._error
            if self._finished and self._waiting:
                left_s = self._first_at + _GATHER_S - time.monotonic()
                self._has_finished.wait_for(lambda: not self._waiting or self._is_closed, max(0.0, left_s))
            found: list[Visited] = []
            size = 0
            while self._finished and (not found or size + self._finished[0][1] <= _MOST_BYTES):
                visited, its_size = self._finished.popleft()
                found.append(visited)
                size += its_size
            self._first_at = time.monotonic()
            return found

    def fail(self, error: BaseException) -> None:
        """Take note that this host cannot handle messages."""
        with self._lock:
            self._error = error
            self._has_finished.notify()

    def cancel(self, message_id: str) -> bool:
        """Give up a message that no thread has taken; tells whether that is so."""
        with self._lock:
            for visit in self._waiting:
                if visit.message.metadata.message_id == message_id:
                    self._waiting.remove(visit)
                    self._finish(Visited.unhandled(visit), 0)
                    return True
        return False

    def give_back(self) -> None:
        """Give up all messages that no thread has taken: others may handle them earlier."""
        with self._lock:
            while self._waiting:
                self._finish(Visited.unhandled(self._waiting.popleft()), 0)

    def close(self) -> None:
        """Have all that wait go on: there will be no message."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._has_work.notify_all()
            self._has_finished.notify_all()

    def _finish(self, visited: Visited, size: int) -> None:
        if not self._finished:
            self._first_at = time.monotonic()
        self._finished.append((visited, size))
        if len(self._finished) == 1 or not self._waiting:
            self._has_finished.notify()
