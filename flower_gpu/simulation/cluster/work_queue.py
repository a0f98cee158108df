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
# Of replies and states: so much is fetched at a time, where that is more than one message, and so much may be
# there that nobody has fetched. Then no further message is begun.
_MOST_BYTES: Final = 1 << 26
_MOST_KEPT_BYTES: Final = 1 << 28
_MOST_CANCELLED: Final = 1000  # messages given up that are remembered: they may come later


class WorkQueue:
    """Messages of a host. All methods may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_finished = threading.Condition(self._lock)
        self._waiting: deque[Visit] = deque()
        self._cancelled: deque[str] = deque(maxlen=_MOST_CANCELLED)
        self._finished: deque[tuple[Visited, int]] = deque()  # with their sizes in bytes
        self._bytes = 0  # of these
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
            self._has_work.wait_for(self._may_begin, timeout_s)
            if self._is_closed or not self._may_begin():
                return None
            visit = self._waiting.popleft()
            if self._finished and not self._waiting:
                self._has_finished.notify()  # whoever fetches brings messages
            return visit

    def finish(self, visited: Visited) -> None:
        """Take what has become of a message."""
        size = len(visited.state) + (0 if visited.reply is None else reply_bytes(visited.reply))
        with self._lock:
            self._finish(visited, size)

    def fetch(self, timeout_s: float) -> list[Visited]:
        """Wait for messages that are finished; empty where there are none in time.

        While others wait for a thread, several are returned at a time.

        Raises BaseException: what :meth:`fail` was told.
        """
        with self._lock:
            self._has_finished.wait_for(lambda: self._finished or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            if self._finished:
                left_s = self._first_at + _GATHER_S - time.monotonic()
                self._has_finished.wait_for(self._is_enough, max(0.0, left_s))
            found: list[Visited] = []
            taken = 0
            while self._finished and (not found or taken + self._finished[0][1] <= _MOST_BYTES):
                visited, size = self._finished.popleft()
                found.append(visited)
                taken += size
            if self._bytes > _MOST_KEPT_BYTES:
                self._has_work.notify_all()
            self._bytes -= taken
            self._first_at = time.monotonic()
            return found

    def fail(self, error: BaseException) -> None:
        """Take note that this host cannot handle messages."""
        with self._lock:
            self._error = error
            self._has_finished.notify()

    def cancel(self, message_id: str) -> None:
        """Give up a message that no thread has taken, also one that comes later."""
        with self._lock:
            self._cancelled.append(message_id)
            for visit in self._waiting:
                if visit.message.metadata.message_id == message_id:
                    self._waiting.remove(visit)
                    self._finish(Visited.unhandled(visit), 0)
                    break

    def is_cancelled(self, visit: Visit) -> bool:
        """Tell whether a message was given up."""
        with self._lock:
            return visit.message.metadata.message_id in self._cancelled

    def give_back(self) -> None:
        """Give up all messages that no thread has taken: others may handle them earlier."""
        with self._lock:
            while self._waiting:
                self._finish(Visited.unhandled(self._waiting.popleft()), 0)

    def close(self) -> None:
        """Have all who wait for a message go on: there will be none."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._has_work.notify_all()

    def _may_begin(self) -> bool:
        return self._is_closed or (bool(self._waiting) and self._bytes <= _MOST_KEPT_BYTES)

    def _is_enough(self) -> bool:
        """Tell whether what is finished is to be fetched at once: workers need messages, or memory."""
        return not self._waiting or self._bytes > _MOST_BYTES

    def _finish(self, visited: Visited, size: int) -> None:
        if not self._finished:
            self._first_at = time.monotonic()
        self._finished.append((visited, size))
        self._bytes += size
        if len(self._finished) == 1 or self._is_enough():
            self._has_finished.notify()
