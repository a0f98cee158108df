"""The messages that a host was given: they wait for a thread there, and, handled, to be fetched."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from flower_gpu.flower.averaging import without_arrays
from flower_gpu.simulation.host import About, Host
from flower_gpu.simulation.visits import Answer, Answers, GroupSum, Visit

# Of short messages several are fetched at a time, as each time costs more than a short message does.
_GATHER_S: Final = 0.1
# Of replies and states: so much is fetched at a time, where that is more than one message, and so much may be
# there that nobody has fetched. Then no further message is begun.
_MOST_BYTES: Final = 1 << 26
_MOST_KEPT_BYTES: Final = 1 << 28
_FETCH_S: Final = 1.0  # that whoever exchanges waits, at most


@dataclass(frozen=True)
class Finished:
    """A message that was handled or given up, and the size of its reply and its state."""

    visit: Visit
    answer: Answer
    size_bytes: int = 0


class HostQueue:
    """Messages of a host. All methods may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_finished = threading.Condition(self._lock)
        self._waiting: deque[Visit] = deque()
        self._finished: deque[Finished] = deque()
        self._asked: list[int] = []  # groups
        self._bytes = 0  # of what is finished
        self._first_at = 0.0  # when the first of it was
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether there will be no message."""
        return self._is_closed

    def take(self, visits: Sequence[Visit]) -> None:
        """Take messages that are to be handled in this order."""
        with self._lock:
            self._waiting += visits
            self._has_work.notify(len(visits))

    def next(self, *, waits: bool) -> Visit | None:
        """Return a message that is to be handled; None where there is none at this moment, or no more."""
        with self._lock:
            if waits:
                self._has_work.wait_for(self._may_begin)
            if self._is_closed or not self._may_begin():
                return None
            visit = self._waiting.popleft()
            if self._finished and not self._waiting:
                self._has_finished.notify()  # whoever fetches brings messages
            return visit

    def finish(self, visit: Visit, answer: Answer) -> None:
        """Take the answer to a message."""
        finished = Finished(visit, answer, answer.size_bytes)
        with self._lock:
            self._finish(finished)

    def ask_for_sum(self, group: int) -> None:
        """Mark the sum of a group to be fetched next."""
        with self._lock:
            self._asked.append(group)
            self._has_finished.notify()

    def fetch(self, timeout_s: float) -> tuple[list[Finished], list[int]]:
        """Wait for messages that are finished, and groups whose sums are wanted; none where none is in time.

        While others wait for a thread, several are returned at a time.
        """
        with self._lock:
            self._has_finished.wait_for(lambda: self._finished or self._asked or self._is_closed, timeout_s)
            if self._finished:
                left_s = self._first_at + _GATHER_S - time.monotonic()
                self._has_finished.wait_for(self._is_enough, max(0.0, left_s))
            found: list[Finished] = []
            taken = 0
            while self._finished:
                size = self._finished[0].size_bytes
                if found and taken + size > _MOST_BYTES:
                    break
                found.append(self._finished.popleft())
                taken += size
            if self._bytes > _MOST_KEPT_BYTES:
                self._has_work.notify_all()
            self._bytes -= taken
            self._first_at = time.monotonic()
            asked, self._asked = self._asked, []
            return found, asked

    def cancel(self, message_id: str) -> None:
        """Give up a message that no thread has taken."""
        with self._lock:
            for visit in self._waiting:
                if visit.message_id == message_id:
                    self._waiting.remove(visit)
                    self._finish(Finished(visit, Answer(message_id)))
                    break

    def give_back(self) -> None:
        """Give up all messages that no thread has taken: others may handle them earlier."""
        with self._lock:
            while self._waiting:
                visit = self._waiting.popleft()
                self._finish(Finished(visit, Answer(visit.message_id)))

    def close(self) -> None:
        """Have all who wait go on: there will be no message."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._has_work.notify_all()
            self._has_finished.notify_all()

    def _may_begin(self) -> bool:
        return self._is_closed or (bool(self._waiting) and self._bytes <= _MOST_KEPT_BYTES)

    def _is_enough(self) -> bool:
        """Tell whether what is finished is to be fetched at once: workers need messages, or memory."""
        return not self._waiting or self._bytes > _MOST_BYTES or bool(self._asked) or self._is_closed

    def _finish(self, finished: Finished) -> None:
        if not self._finished:
            self._first_at = time.monotonic()
        self._finished.append(finished)
        self._bytes += finished.size_bytes
        if len(self._finished) == 1 or self._is_enough():
            self._has_finished.notify()


class MessageThreadHandler(Protocol):
    """Handles messages, one at a time in each thread; may keep a worker from one message to the next."""

    def __call__(self, visit: Visit) -> Answer:
        """Handle a message; what is raised is in the answer."""

    def idle(self) -> None:
        """Let others have what this thread's worker holds, if they need it: no message waits."""

    def leave(self) -> None:
        """Let go of this thread's worker: there will be no message."""

    def cancel(self, message_id: str) -> None:
        """End the handling of a message, in whatever thread that is, or comes to be."""

    def cancel_all(self) -> None:
        """End the handling of all messages."""

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so."""


class QueueHost(Host):
    """Threads have the messages handled that wait here; whoever exchanges sums the replies meanwhile."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self.queue = HostQueue()
        self._to_sum: list[Finished] = []  # that :meth:`exchange` has told of
        self._sums: dict[int, GroupSum] = {}
        self._forgotten: set[int] = set()  # groups
        self._handler: MessageThreadHandler
        self._threads: list[threading.Thread] = []

    def start(self, handler: MessageThreadHandler, threads: int) -> None:
        """Start so many threads."""
        self._handler = handler
        self._threads = [
            threading.Thread(target=self._work, name=f"flower-gpu-messages-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def most(self, kind: str) -> int:
        """Return how many messages it has at most: few wait, as the next ones are here at once."""
        return min(super().most(kind), 2 * self.about.concurrency)

    def take(self, visits: Sequence[Visit]) -> None:
        """Have messages handled, in this order."""
        self.queue.take(visits)

    def exchange(self, visits: Sequence[Visit]) -> Answers:
        """Have messages handled; waits, not for long, for what has become of others."""
        self.queue.take(visits)
        self._sum()  # now that workers have their next messages
        finished, asked = self.queue.fetch(_FETCH_S)
        self._to_sum += [one for one in finished if one.visit.group and one.answer.reply is not None]
        if asked:
            self._sum()
        useless = [number for number, found in list(self._sums.items()) if found.error]
        sums = [found for number in {*asked, *useless} if (found := self._sums.pop(number, None))]
        for found in sums:
            found.settle()
        return Answers([_told(one) for one in finished], sums)

    def _sum(self) -> None:
        while self._to_sum:
            one = self._to_sum.pop(0)
            group, reply = one.visit.group, one.answer.reply
            assert group is not None and reply is not None
            if group.number in self._forgotten:
                continue
            if group.number not in self._sums:
                self._sums[group.number] = GroupSum(group)
            self._sums[group.number].add(reply, one.visit.place)

    def ask_for_sum(self, group: int) -> None:
        """Have the sum of a group come with the next answers; the group begins anew."""
        self.queue.ask_for_sum(group)

    def forget(self, groups: Sequence[int]) -> None:
        """Give up groups whose sums nobody wants."""
        self._forgotten.update(groups)
        for group in groups:
            self._sums.pop(group, None)

    def cancel(self, message_id: str) -> None:
        """Give up a message, also one that comes later."""
        self.queue.cancel(message_id)
        self._handler.cancel(message_id)

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so."""
        return self._handler.stuck_since()

    def close(self) -> None:
        """End all workers: those that handle a message at once, the others by themselves."""
        self.queue.close()
        if self._threads:
            self._handler.cancel_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self.queue.is_closed:
            visit = self.queue.next(waits=False)
            if visit is None:
                self._handler.idle()
                visit = self.queue.next(waits=True)
            if visit is not None:
                self.queue.finish(visit, self._handler(visit))
            del visit
        self._handler.leave()


def _told(one: Finished) -> Answer:
    """Return an answer; arrays that are summed here stay here."""
    if one.visit.group is None or one.answer.reply is None:
        return one.answer
    return replace(one.answer, reply=without_arrays(one.answer.reply))
