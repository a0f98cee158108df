"""The number of messages that a worker handles at once, measured in the run.

Larger batches share the fixed costs of a message: Python, kernel launches, the transfer to the worker. They
also need more memory at a time, which no longer fits into a processor's caches. Which effect wins depends on
the network, the data and the device. So a run tries the sizes 1, 4, 16, 64 ... and keeps the fastest.

A run is slower at its start, and other programs come and go. If the sizes were measured one after the other,
the first sizes would look slow. So each size has a contest with the fastest size so far, in which batches of
both sizes take turns. The first batches of a size do not count, because libraries prepare each new shape in
each worker. A size that takes twice as long per message ends the search. Larger sizes would take even longer,
and would need memory that the host may not have.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

_FACTOR: Final = 4  # ratio of a size to the previous one
# Minimum numbers for each side of a contest, without its first batches, which warm up the workers. A few
# messages would say little, because clients differ.
_CONTEST_BATCHES: Final = 3
_CONTEST_MESSAGES: Final = 16
_HOPELESS: Final = 2.0  # ratio of times per message above which larger sizes are not tried


@dataclass
class _Side:
    """The batches of one size in a contest.

    ``warm_up``: number of further batches that do not count.
    ``batches``, ``messages``, ``seconds``: totals of the batches that count.
    """

    warm_up: int
    batches: int = 0
    messages: int = 0
    seconds: float = 0.0

    @property
    def progress(self) -> float:
        """Measured fraction of the minimum. At 1 or more, the side has enough batches and messages."""
        return min(self.batches / _CONTEST_BATCHES, self.messages / _CONTEST_MESSAGES)

    @property
    def message_s(self) -> float:
        """Mean seconds per message."""
        return self.seconds / self.messages


class BatchSize:
    """Chooses the number of messages of each batch, from the seconds that earlier batches took.

    ``max_messages``: maximum for the app's handler.
    ``workers``: number of workers that handle batches at the same time.
    ``fastest``: the size with the shortest time per message so far.
    """

    def __init__(self, max_messages: int, workers: int) -> None:
        sizes = {max_messages}
        size = 1
        while size < max_messages:
            sizes.add(size)
            size *= _FACTOR
        self._sizes = sorted(sizes)
        self._workers = workers
        self.fastest = 1
        self._contest = {size: _Side(workers) for size in self._sizes[:2]}

    @property
    def largest(self) -> int:
        """Maximum number of messages in a batch."""
        return self._sizes[-1]

    @property
    def largest_in_use(self) -> int:
        """Maximum number of messages in the next batches."""
        return max([self.fastest, *self._contest])

    def choose(self, available: int) -> int:
        """Return the number of messages for the next batch, up to ``available``."""
        # In a contest, the side with less progress comes next.
        for size, side in sorted(self._contest.items(), key=lambda item: (item[1].progress, item[0])):
            if side.progress < 1 and self._size_of(min(size, available)) == size:
                return min(size, available)
        return min(self.fastest, available)

    def learn(self, messages: int, seconds: float) -> None:
        """Record the seconds that a batch took."""
        side = self._contest.get(self._size_of(messages) or 0)
        if side is None:
            return
        if side.warm_up:
            side.warm_up -= 1
            return
        side.batches += 1
        side.messages += messages
        side.seconds += seconds
        if all(side.progress >= 1 for side in self._contest.values()):
            self._decide()

    def _decide(self) -> None:
        """End a contest, and begin the next one if there is a larger size worth trying."""
        candidate = max(self._contest)
        ratio = self._contest[candidate].message_s / self._contest[self.fastest].message_s
        if ratio < 1:
            self.fastest = candidate
        larger = [size for size in self._sizes if size > candidate]
        self._contest = {}
        if larger and ratio <= _HOPELESS:
            self._contest = {self.fastest: _Side(0), larger[0]: _Side(self._workers)}

    def refuse(self, messages: int) -> int:
        """Exclude the size of a batch that ran out of memory. Return the next smaller size."""
        self._sizes = [size for size in self._sizes if size < messages] or [1]
        self.fastest = min(self.fastest, self.largest)
        if any(size > self.largest for size in self._contest):
            self._contest = {}
        return self.largest

    def _size_of(self, messages: int) -> int | None:
        """Return the size that a batch counts for, or None if no size is less than twice the batch."""
        return next((size for size in self._sizes if size // 2 < messages <= size), None)


class Batches:
    """The batch sizes of one host by message type, and the number of its batches. Thread-safe.

    ``workers``: as for :class:`BatchSize`.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._sizes: dict[str, BatchSize] = {}  # only of types with a handler for several messages
        self._count = self._messages = 0

    def largest(self, message_type: str) -> int:
        """Return the maximum number of messages in an assignment; 1 until a worker has reported more."""
        with self._lock:
            return self._sizes[message_type].largest if message_type in self._sizes else 1

    def largest_in_use(self, message_type: str) -> int:
        """Return the maximum number of messages in the next assignments."""
        with self._lock:
            return self._sizes[message_type].largest_in_use if message_type in self._sizes else 1

    def choose(self, message_type: str, available: int) -> int:
        """Return the number of messages for the next assignment, up to ``available``."""
        with self._lock:
            return self._sizes[message_type].choose(available) if message_type in self._sizes else 1

    def learn(self, message_type: str, max_messages: int, messages: int, seconds: float | None) -> None:
        """Record an assignment that was handled.

        ``max_messages``: maximum for the app's handler.
        ``seconds``: duration, or None if it is not representative.
        """
        with self._lock:
            if max_messages > 1 and message_type not in self._sizes:
                self._sizes[message_type] = BatchSize(max_messages, self._workers)
            elif seconds is not None and message_type in self._sizes:
                self._sizes[message_type].learn(messages, seconds)

    def refuse(self, message_type: str, messages: int) -> int:
        """Exclude the size of a batch that ran out of memory. Return the next smaller size."""
        with self._lock:
            return self._sizes[message_type].refuse(messages) if message_type in self._sizes else 1

    def count(self, messages: int) -> None:
        """Count an assignment for :meth:`facts`. An assignment of a single message is not a batch."""
        with self._lock:
            self._count += messages > 1
            self._messages += messages if messages > 1 else 0

    def facts(self) -> dict[str, Any]:
        """Return the facts about batches for the result of the run."""
        with self._lock:
            fastest = {message_type: size.fastest for message_type, size in self._sizes.items()}
            return {"count": self._count, "messages": self._messages, "fastest": fastest}
