"""Messages that were sent together, and the replies to them."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Container
from typing import ClassVar, Final

from flwr.app import Message

from flower_gpu.flower.arrays import size_bytes

# Replies in order that wait for a slow one before them: so much memory and so many of them, at most. (Each
# is a mapping of its own, of which the kernel allows a process 65,530.)
_WAITING_BYTES: Final = 1 << 28
_MOST_WAITING: Final = 1000

#: In a heap the longest message is the first one, and of those that are as long the one that was sent first.
_Waiting = tuple[float, int, Message]


class Box:
    """Messages that were sent together, and the replies to them. Whoever calls its methods has the lock."""

    #: Whether the longest message may be handled first.
    has_any_order: ClassVar = True
    _ends_running: ClassVar = True  # whether a message that expires while it is handled is answered at once

    def __init__(self, changed: threading.Condition, most_unread: int | None = None) -> None:
        self.kind = ""  # the type of the messages, of all that are here in nearly every case
        self.waiting: list[_Waiting] = []  # a heap
        self._numbers = itertools.count()
        self.running: dict[str, Message] = {}
        self._changed = changed
        self._most_unread = most_unread
        self.replies: dict[str, Message] = {}  # that are there
        self.expected_s: dict[str, float] = {}  # by message, where something is known
        self._ends: list[tuple[float, str]] = []  # a heap of when the ttl of each message is over
        self.expired: set[str] = set()  # messages whose ttl is over
        self._is_closed = False

    def push(self, message: Message, expected_s: float = 0.0) -> None:
        """Take a message that is to be handled; the one that takes longest is the first."""
        self.kind = message.metadata.message_type
        if expected_s > 0:
            self.expected_s[message.metadata.message_id] = expected_s
        heapq.heappush(self.waiting, (-expected_s, next(self._numbers), message))

    def limit(self, message: Message) -> None:
        """Note when the ttl of a message is over, on the clock of ``time.monotonic``."""
        metadata = message.metadata
        ends_s = time.monotonic() + metadata.created_at + metadata.ttl - time.time()
        heapq.heappush(self._ends, (ends_s, metadata.message_id))

    @property
    def expires_s(self) -> float:
        """When the next ttl is over, on the clock of ``time.monotonic``; infinity if there is none."""
        return self._ends[0][0] if self._ends else math.inf

    def expire(self) -> tuple[list[Message], list[Message]]:
        """Note which messages have expired.

        Returns messages that are to be answered with an error, by :meth:`end`, and those whose handling is to
        be ended.
        """
        over = set()
        while self.expires_s <= time.monotonic():
            over.add(heapq.heappop(self._ends)[1])
        self.expired |= over
        running = [message for message_id, message in self.running.items() if message_id in over]
        waiting = self._taken_from_waiting(over) if over else []
        self.running |= {message.metadata.message_id: message for message in waiting}
        return [*waiting, *(running if self._ends_running else ())], running

    def _taken_from_waiting(self, message_ids: Container[str]) -> list[Message]:
        taken = [message for *_, message in self.waiting if message.metadata.message_id in message_ids]
        self.waiting = [each for each in self.waiting if each[-1].metadata.message_id not in message_ids]
        heapq.heapify(self.waiting)
        return taken

    def begin(self) -> Message:
        """Return the message that is handled next."""
        message = heapq.heappop(self.waiting)[-1]
        self.running[message.metadata.message_id] = message
        return message

    @property
    def count_waiting(self) -> int:
        """How many messages wait that nobody has taken."""
        return len(self.waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether there are any of these."""
        return self.count_waiting > 0

    def again(self, message: Message, *, is_last: bool = False) -> None:
        """Take a message back that was begun and that nobody handles; it is the next one, or the last."""
        if self.running.pop(message.metadata.message_id, None) is not None and not self._is_closed:
            is_last = is_last and self.has_any_order
            heapq.heappush(self.waiting, (math.inf if is_last else -math.inf, next(self._numbers), message))

    def is_wanted(self, message: Message) -> bool:
        """Tell whether the reply to a message that was begun is waited for."""
        return not self._is_closed and message.metadata.message_id in self.running

    def has_room(self) -> bool:
        """Tell whether there is room for the reply to one message more."""
        return self._most_unread is None or len(self.replies) + len(self.running) < self._most_unread

    def begin_all(self) -> list[Message]:
        """Return all messages that wait."""
        return [self.begin() for _ in range(len(self.waiting))]

    def end(self, message: Message, reply: Message | None) -> None:
        """Put a reply into the box."""
        message_id = message.metadata.message_id
        is_waited_for = self.running.pop(message_id, None) is not None  # not if it has expired
        if reply is not None and is_waited_for and not self._is_closed:
            reply.metadata.__dict__["_message_id"] = f"{message_id}-reply"
            self.replies[message_id] = reply
        self._changed.notify_all()

    def next(self, timeout_s: float) -> Message | None:
        """Wait for any reply; None where there is none in time."""
        message_id = self._changed.wait_for(self._first, timeout_s)
        if message_id is None:
            return None
        reply = self._pop(message_id)
        self._changed.notify_all()
        return reply

    def leave_out_late(self) -> None:
        """Yield from now on the replies that are there, without the others."""

    def _first(self) -> str | None:
        """Return the message whose reply is next; None where that is not there."""
        return next(iter(self.replies), None)

    def _pop(self, message_id: str) -> Message:
        return self.replies.pop(message_id)

    def close(self) -> list[Message]:
        """Want no more replies; return the messages that are being handled."""
        self._is_closed = True
        self.waiting.clear()
        self.replies.clear()
        return list(self.running.values())


class OrderedBox(Box):
    """The same where replies come in the order of the messages: those after a slow one wait for it.

    Meanwhile others are handled, as long as there is room for their replies, too.
    """

    has_any_order = False  # or many replies would wait for that to a short message

    def __init__(self, changed: threading.Condition, most_unread: int | None = None) -> None:
        super().__init__(changed, most_unread)
        self._order: deque[str] = deque()  # of messages whose replies nobody has taken
        self._sizes: dict[str, int] = {}  # of replies that are there
        self._bytes = self._largest = 0

    def push(self, message: Message, expected_s: float = 0.0) -> None:
        """Take a message that is to be handled, and whose reply comes after those to the ones before."""
        super().push(message)
        self._order.append(message.metadata.message_id)

    def has_room(self) -> bool:
        """Tell whether there is room for the reply to one message more."""
        if super().has_room():
            return True
        size = self._bytes + (len(self.running) + 1) * self._largest
        return len(self.replies) + len(self.running) < _MOST_WAITING and size <= _WAITING_BYTES

    def end(self, message: Message, reply: Message | None) -> None:
        """Put a reply into the box."""
        if reply is not None and message.metadata.message_id in self.running:
            size = self._sizes[message.metadata.message_id] = reply_bytes(reply)
            self._bytes += size
            self._largest = max(self._largest, size)
        super().end(message, reply)

    def leave_out_late(self) -> None:
        """Yield from now on the replies that are there, without the others."""
        self._order = deque(message_id for message_id in self._order if message_id in self.replies)

    def _first(self) -> str | None:
        return self._order[0] if self._order and self._order[0] in self.replies else None

    def _pop(self, message_id: str) -> Message:
        self._order.popleft()
        self._bytes -= self._sizes.pop(message_id)
        return super()._pop(message_id)


def reply_bytes(reply: Message) -> int:
    """Return what the arrays of a reply take."""
    if reply.has_error():
        return 0
    records = reply.content.array_records.values()
    return sum(size_bytes(array) for record in records for array in record.values())
