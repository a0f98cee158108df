"""Messages that were sent together, and their replies.

::

    push ──> waiting ──begin──> running (a job: a host has it) ──answered──> replies ──next──> the ServerApp
                ▲                  │
                └──────again───────┘  given back, or its host is lost

Where hosts sum the replies, an answered message is *held* by its host until the sum is here; if the host is
lost before, the message waits again. Whoever calls a method of a box has the grid's lock.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from flwr.app import Message
from flwr.common.constant import ErrorCode

from flower_gpu.flower.averaging import ReplySum, SumItem
from flower_gpu.simulation.host import Answer, GroupSum, Host, SumGroup, Visit, arrays_bytes, expired

# Sums of blocks that wait for a slow message of a block before them: so much memory and so many of them.
_AHEAD_BYTES: Final = 1 << 28
_MOST_AHEAD: Final = 64

#: In a heap the longest message is the first one, and of those that are as long the one that was sent first.
_Waiting = tuple[float, int, Message]


@dataclass(frozen=True, eq=False)
class Job:
    """A message that a host has.

    ``held``: what its reply goes to, if that is summed there, and ``place``: where in that.
    """

    host: Host
    message: Message
    box: Box
    held: Held | None = None
    place: int | None = None

    @property
    def message_id(self) -> str:
        """The message's."""
        return self.message.metadata.message_id

    def visit(self, seed: int, state: bytes) -> Visit:
        """Return the visit for the host."""
        return Visit(self.message, seed, state, self.held.group if self.held else None, self.place)


@dataclass(eq=False)
class Held:
    """A group of replies on a host.

    ``jobs``: whose replies are in it, and not in a sum that is here.
    ``answers``: of these, where the host may be lost: they count when the sum is here.
    ``is_asked``: whether the host was asked for the sum.
    ``is_closed``: whether what is answered from now on is in no sum any more.
    """

    host: Host
    group: SumGroup
    jobs: dict[str, Job] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    is_asked: bool = False
    is_closed: bool = False


class Box:
    """Messages whose replies are taken one by one.

    ``changed``: the grid's lock.
    ``most_unread``: returns how many replies to messages of a type may be here or on their way.
    """

    _ends_running: ClassVar = True  # whether a message that expires while it is handled is answered at once

    def __init__(
        self, changed: threading.Condition, most_unread: Callable[[str], float] = lambda _: math.inf
    ) -> None:
        self.kind = ""  # the type of the messages, of all that are here in nearly every case
        self._changed = changed
        self._most_unread = most_unread
        self._waiting: list[_Waiting] = []  # a heap
        self._numbers = itertools.count()
        self._ends: list[tuple[float, str]] = []  # a heap of when the ttl of each message is over
        self._unanswered: set[str] = set()
        self._is_closed = self._is_late = False
        #: Why what comes is of no use.
        self.error: Exception | None = None
        self.running: dict[str, Job] = {}
        self.replies: dict[str, Message] = {}  # that are here
        self.expired: set[str] = set()  # messages whose ttl is over

    def push(self, message: Message, expected_s: float = 0.0) -> None:
        """Take a message that is to be handled; the one that takes longest is the first."""
        metadata = message.metadata
        self.kind = metadata.message_type
        self._unanswered.add(metadata.message_id)
        ends_s = time.monotonic() + metadata.created_at + metadata.ttl - time.time()
        heapq.heappush(self._ends, (ends_s, metadata.message_id))
        self._wait(message, expected_s)

    def _wait(self, message: Message, expected_s: float) -> None:
        heapq.heappush(self._waiting, (-expected_s, next(self._numbers), message))

    @property
    def count_waiting(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    def begin(self, host: Host) -> Job | None:
        """Return the message that a host handles next, if there is one for it."""
        has_room = len(self.replies) + len(self.running) < self._most_unread(self.kind)
        if not (self._waiting and has_room):
            return None
        return self._begun(Job(host, heapq.heappop(self._waiting)[-1], self))

    def _begun(self, job: Job) -> Job:
        self.running[job.message_id] = job
        return job

    def again(self, job: Job, *, is_last: bool = False) -> None:
        """Have a message handled that no host has any more, if it is wanted: as the next one, or the last."""
        self.running.pop(job.message_id, None)
        if not self.wants(job.message_id):
            return
        if job.message_id in self.expired:
            self.end(job.message, expired(job.message))
        else:
            self._wait_again(job, is_last=is_last)

    def _wait_again(self, job: Job, *, is_last: bool) -> None:
        self._wait(job.message, -math.inf if is_last else math.inf)

    def wants(self, message_id: str) -> bool:
        """Tell whether the reply to a message is waited for."""
        return not self._is_closed and message_id in self._unanswered

    def answered(self, job: Job, answer: Answer) -> list[Answer]:
        """Take an answer with a reply; returns the answers that count from now on."""
        self.running.pop(job.message_id, None)
        return [answer] if self.wants(job.message_id) else []

    def end(self, message: Message, reply: Message) -> None:
        """Put the reply to a message into the box."""
        message_id = message.metadata.message_id
        if self.wants(message_id):
            self._unanswered.discard(message_id)
            reply.metadata.__dict__["_message_id"] = f"{message_id}-reply"
            self.replies[message_id] = reply

    @property
    def expires_s(self) -> float:
        """When the next ttl is over, on the clock of ``time.monotonic``; infinity if there is none."""
        return self._ends[0][0] if self._ends else math.inf

    def expire(self) -> tuple[int, list[Job]]:
        """Answer messages that have expired with errors.

        Returns how many there are, and those that hosts handle: they are to be cancelled.
        """
        over = set()
        while self.expires_s <= time.monotonic():
            over.add(heapq.heappop(self._ends)[1])
        if not over:
            return 0, []
        self.expired |= over
        waiting = self._take_waiting(over)
        running = [job for message_id, job in self.running.items() if message_id in over]
        ended = [*waiting, *(job.message for job in running if self._ends_running)]
        for message in ended:
            self.end(message, expired(message))
        return len(waiting) + len(running), running

    def take_waiting(self) -> list[Message]:
        """Return all messages that wait; they do not wait any more."""
        return self._take_waiting(self._unanswered)

    def _take_waiting(self, message_ids: Collection[str]) -> list[Message]:
        taken = [message for *_, message in self._waiting if message.metadata.message_id in message_ids]
        self._waiting = [each for each in self._waiting if each[-1].metadata.message_id not in message_ids]
        heapq.heapify(self._waiting)
        return taken

    @property
    def has_some(self) -> bool:
        """Whether there is something to take."""
        return bool(self.replies)

    def take(self) -> list[SumItem]:
        """Return a reply that is here: those that nobody has taken keep their room."""
        if not self.replies:
            return []
        self._changed.notify_all()
        return [self.replies.pop(next(iter(self.replies)))]

    def stop(self) -> None:
        """Wait for no further replies."""
        self._is_late = True
        self.take_waiting()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return not self.replies and (self._is_late or not self._unanswered)

    @property
    def left(self) -> int:
        """How many messages have no answer that counts."""
        return len(self._unanswered)

    def to_ask(self, *, is_due: bool) -> list[Held]:
        """Return the groups whose sums are to be fetched now; ``is_due``: the last time is long ago."""
        return []

    def cancel(self, message_ids: Collection[str]) -> list[Job]:
        """Drop some of the messages; return those that hosts handle, which are to be cancelled there."""
        self._unanswered.difference_update(message_ids)
        self._take_waiting(set(message_ids))
        for message_id in message_ids:
            self.replies.pop(message_id, None)
        return [self.running[message_id] for message_id in message_ids if message_id in self.running]

    def close(self) -> list[Job]:
        """Want no more replies; returns the messages that are being handled: they are to be cancelled."""
        self._is_closed = True
        self.take_waiting()
        self.replies.clear()
        return [job for message_id, job in self.running.items() if message_id not in self.expired]


class PulledBox(Box):
    """Messages whose answers count when they are pulled: a checkpoint before that has the client as it was.

    ``held``: answers that are here.
    """

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__(changed)
        self.held: dict[str, tuple[Job, Answer]] = {}

    def answered(self, job: Job, answer: Answer) -> list[Answer]:
        """Keep an answer with a reply."""
        for each in super().answered(job, answer):
            self.held[job.message_id] = job, each
        return []

    def cancel(self, message_ids: Collection[str]) -> list[Job]:
        """Drop some of the messages; return those that hosts handle, which are to be cancelled there."""
        for message_id in message_ids:
            self.held.pop(message_id, None)
        return super().cancel(message_ids)

    def has_reply(self, message_id: str) -> bool:
        """Tell whether there is something to pull for a message."""
        return message_id in self.held or message_id in self.replies


class SumBox(Box):
    """Messages whose replies are summed by the hosts that handle them, as they come.

    ``new_group``: makes a group.
    ``sums``: that are here, with the names of their hosts.
    """

    # A host may just have added its reply to a sum. It says whether it could end the handling.
    _ends_running: ClassVar = False

    def __init__(self, changed: threading.Condition, new_group: Callable[[], SumGroup]) -> None:
        super().__init__(changed)
        self._make_group = new_group
        self.groups: dict[int, Held] = {}  # on hosts, by number
        self.sums: list[tuple[str, ReplySum]] = []

    def begin(self, host: Host) -> Job | None:
        """Return the message that a host handles next, if there is one for it."""
        if not self._waiting:
            return None
        held = next((held for held in self.groups.values() if held.host is host), None)
        return self._begun(Job(host, heapq.heappop(self._waiting)[-1], self, held or self._new_group(host)))

    def answered(self, job: Job, answer: Answer) -> list[Answer]:
        """Take an answer with a reply; returns the answers that count from now on."""
        held, reply = job.held, answer.reply
        assert held is not None and reply is not None
        if not super().answered(job, answer) or held.is_closed:
            return []
        if reply.has_error():  # there is nothing to sum
            if job.message_id in self.expired and reply.error.code == ErrorCode.CLIENT_APP_CRASHED:
                reply = expired(job.message)  # its worker was ended for that
            return [replace(answer, reply=reply)]
        held.jobs[job.message_id] = job
        if not job.host.can_be_lost:
            return [answer]
        held.answers[job.message_id] = answer
        return []

    def summed(self, part: GroupSum) -> list[tuple[Job, Answer]]:
        """Take the sum of a group; returns the answers that count from now on, with their messages."""
        held = self.groups.get(part.group.number)
        if held is None:
            return []
        held.is_asked, held.is_closed = False, self._is_late
        self.error = self.error or part.error
        self._add_sum(held, part.total)
        found = []
        for message_id in part.ids:
            job, answer = held.jobs.pop(message_id, None), held.answers.pop(message_id, None)
            if job is not None and answer is not None:
                found.append((job, answer))
        return found

    def _add_sum(self, held: Held, total: ReplySum) -> None:
        self.sums.append((held.host.name, total))

    def lost(self, host: Host) -> None:
        """Have all that a lost host held handled again. What it runs comes back by :meth:`again`."""
        for held in [held for held in self.groups.values() if held.host is host]:
            del self.groups[held.group.number]
            for job in held.jobs.values():
                self.again(job)

    def _wait_again(self, job: Job, *, is_last: bool) -> None:
        if not self._is_late:
            super()._wait_again(job, is_last=is_last)

    @property
    def has_some(self) -> bool:
        """Whether there is something to take."""
        return bool(self.replies or self.sums)

    def take(self) -> list[SumItem]:
        """Return all replies and sums that are here."""
        found: list[SumItem] = [*self.replies.values(), *self.sums]
        self.replies.clear()
        self.sums.clear()
        return found

    def to_ask(self, *, is_due: bool) -> list[Held]:
        """Return the groups whose sums are to be fetched now; ``is_due``: the last time is long ago."""
        is_last = self._is_late or self._is_handled
        groups = (held for held in self.groups.values() if held.jobs)
        return self._asked(held for held in groups if is_last or (is_due and held.host.can_be_lost))

    def _asked(self, groups: Iterable[Held]) -> list[Held]:
        asked = [held for held in groups if not held.is_asked]
        for held in asked:
            held.is_asked = True
        return asked

    @property
    def _is_handled(self) -> bool:
        return not self.running and not self.count_waiting

    @property
    def is_over(self) -> bool:
        """Whether all sums are here: also when it is late, of the replies that are in one."""
        return (self._is_late or self._is_handled) and not any(held.jobs for held in self.groups.values())

    def _new_group(self, host: Host) -> Held:
        group = self._make_group()
        held = self.groups[group.number] = Held(host, group)
        return held


@dataclass(eq=False)
class _Block:
    """Messages to consecutive nodes: one host handles all of them.

    ``waiting``: their places in the block, and they themselves.
    ``total``: the sum of the replies, with the name of its host, when it is here.
    """

    pushed: int = 0
    waiting: deque[tuple[int, Message]] = field(default_factory=deque)
    held: Held | None = None
    total: tuple[str, ReplySum] | None = None


class BlockBox(SumBox):
    """Messages in the order of the nodes: a host handles a block of nodes, and sums its replies in order.

    All messages are pushed before one is begun. Sums come in the order of the blocks. So that hosts do not
    keep too many of them, no block begins that is far ahead of the first one whose sum is not here.

    ``changed``, ``new_group``: as for :class:`SumBox`.
    ``block_of``: returns the number of a message's block.
    ``most_ahead``: returns how many blocks may be under way at least.
    """

    def __init__(
        self,
        changed: threading.Condition,
        new_group: Callable[[], SumGroup],
        block_of: Callable[[Message], int],
        most_ahead: Callable[[], int],
    ) -> None:
        super().__init__(changed, new_group)
        self._block_of = block_of
        self._least_ahead = most_ahead
        self._most_ahead = 0
        self._blocks: dict[int, _Block] = {}  # those without their sums
        self._of: dict[str, _Block] = {}  # by message
        self._count = 0

    @property
    def count_waiting(self) -> int:
        """How many messages wait."""
        return self._count

    def _wait(self, message: Message, expected_s: float) -> None:
        self._most_ahead = self._most_ahead or _ahead(message)
        block = self._blocks.setdefault(self._block_of(message), _Block())
        self._of[message.metadata.message_id] = block
        block.waiting.append((block.pushed, message))
        block.pushed += 1
        self._count += 1

    def _wait_again(self, job: Job, *, is_last: bool) -> None:
        if not self._is_late:
            assert job.place is not None
            self._of[job.message_id].waiting.append((job.place, job.message))
            self._count += 1

    def begin(self, host: Host) -> Job | None:
        """Return a message of a block that the host has begun, else of a new one."""
        new = None
        for block in itertools.islice(self._blocks.values(), max(self._most_ahead, self._least_ahead())):
            if not block.waiting:  # of a lost host's block, all may be on their way back
                continue
            if block.held is None:
                new = new or block
            elif block.held.host is host:
                new = block
                break
        if new is None:
            return None
        new.held = new.held or self._new_group(host)
        place, message = new.waiting.popleft()
        self._count -= 1
        return self._begun(Job(host, message, self, new.held, place))

    def _take_waiting(self, message_ids: Collection[str]) -> list[Message]:
        taken: list[Message] = []
        for block in self._blocks.values():
            found, block.waiting = block.waiting, deque()
            for place, message in found:
                if message.metadata.message_id in message_ids:
                    taken.append(message)
                else:
                    block.waiting.append((place, message))
        self._count -= len(taken)
        return taken

    def lost(self, host: Host) -> None:
        """Have all that a lost host held handled again, by whoever begins the block anew."""
        for block in self._blocks.values():
            if block.held is not None and block.held.host is host and block.total is None:
                block.held = None
        super().lost(host)

    def to_ask(self, *, is_due: bool) -> list[Held]:
        """Return the groups whose hosts are to be asked for sums now: of whole blocks without a gap."""
        self._pass_on()
        if self._is_late:
            return self._asked(held for held in self.groups.values() if held.jobs)
        whole = itertools.takewhile(self._is_whole, self._blocks.values())
        return self._asked(block.held for block in whole if block.held is not None)

    def _is_whole(self, block: _Block) -> bool:
        """Tell whether all messages of a block have an answer."""
        if block.waiting:
            return False
        return block.held is None or all(job.held is not block.held for job in self.running.values())

    def _add_sum(self, held: Held, total: ReplySum) -> None:
        (block,) = [block for block in self._blocks.values() if block.held is held]
        block.total = held.host.name, total
        self._pass_on()

    @property
    def is_over(self) -> bool:
        """Whether all sums are here."""
        return not self._blocks

    def _pass_on(self) -> None:
        """Pass on the sums of the first blocks, as far as they are here."""
        while self._blocks:
            number, block = next(iter(self._blocks.items()))
            if block.total is not None:
                self.sums.append(block.total)
            elif not self._has_no_sum(block):
                break
            if block.held is not None and not self._is_late:  # else its host may have more of it
                self.groups.pop(block.held.group.number, None)  # it is gone if the host was lost since
            del self._blocks[number]

    def _has_no_sum(self, block: _Block) -> bool:
        if block.held is None:  # of no node of it there was a reply
            return self._is_late or self._is_whole(block)
        return self._is_late and not block.held.jobs


def _ahead(message: Message) -> int:
    """Return how many sums of blocks, of replies that are as large as a message, may wait in memory."""
    return min(_MOST_AHEAD, _AHEAD_BYTES // max(2 * arrays_bytes(message), 1))  # sums are 64-bit floats
