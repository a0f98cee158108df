"""Pending messages: the state of messages sent together, and of their replies.

::

    push ──> queued ──next_job──> running ──record_outcome──> replies ──collect──> the ServerApp
               ▲                     │
               └───────requeue───────┘  the host returned the message, or was lost

The ServerApp sends a set of messages, and hosts handle them in parallel. Any host may be lost, any message
may expire, and the ServerApp may stop waiting at any moment. A set records what happens to each message of
the set, so that no message is forgotten or answered twice.

The kinds of sets are:

- :class:`PendingMessages`: the ServerApp takes replies one by one.
- :class:`PulledMessages`: an outcome counts when its reply is pulled. An earlier checkpoint has the client's
  previous state.
- :class:`SummedMessages`: hosts sum the replies. An answered message is *held* by its host until the sum
  arrives. If the host is lost before that, the message goes back to the queue.
- :class:`SummedBlocks`: a SummedMessages with a fixed order of summation, for results that do not depend on
  speed.

Threads. A set is shared by the ServerApp's thread and the threads of the dispatcher. The ServerApp's thread
runs the code of ``grid``: it calls ``push``, ``collect``, ``expire``, ``sums_to_fetch``, ``stop``, ``cancel``
and ``close``. The dispatcher's threads call ``next_job``, ``requeue``, ``record_outcome``, ``record_sum``,
``lost`` and ``put_reply``. Callers hold the grid's lock, so a set needs no lock of its own. No method blocks
or calls a host. A method returns the jobs to cancel or the groups to ask for, and the caller tells the host
after it releases the lock.

Races that follow from this:

- A message expires or is cancelled, and its host answers before it hears of that. ``is_pending`` is False by
  then, so the outcome is dropped.
- In a SummedMessages, a message expires at the moment its host adds the reply to a sum. An error in its place
  would be wrong, because the reply counts already. So the set waits for the host's outcome, which says if the
  handling was cancelled in time.
- The deadline of a SummedMessages passes while its hosts still handle messages. The set fetches one last sum
  from each host, and then closes the group. Replies that are added later are in no sum, so they are dropped.
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

from flower_gpu.simulation.host import (
    AssignedMessage,
    GroupSum,
    Host,
    MessageOutcome,
    SumGroup,
    arrays_bytes,
    expired,
)
from flower_gpu.strategies.averaging import ReplySum, SumItem

# Sums of blocks may have to wait for a slow message of an earlier block. These are the limits on their memory
# and on their number.
_AHEAD_BYTES: Final = 1 << 28
_MAX_AHEAD: Final = 64

#: Entry of a heap. The longest message comes first. Of equally long messages, the first one sent comes first.
_Waiting = tuple[float, int, Message]


@dataclass(frozen=True, eq=False)
class Job:
    """A message handed to a host.

    ``partial_sum``: group that the reply is added to, if the host sums replies.
    ``place``: position of the reply in that group, if the group is summed in order.
    """

    host: Host
    message: Message
    pending: PendingMessages
    partial_sum: PartialSum | None = None
    place: int | None = None

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return self.message.metadata.message_id

    def assigned(self, seed: int, state: bytes) -> AssignedMessage:
        """Return the assigned message to send to the host.

        ``seed``: seed of the client's random numbers.
        ``state``: the client's encoded state.
        """
        return AssignedMessage(
            self.message, seed, state, self.partial_sum.group if self.partial_sum else None, self.place
        )


@dataclass(eq=False)
class PartialSum:
    """A group of replies that a host sums.

    ``jobs``: jobs with a reply in the host's current sum, by message id.
    ``outcomes``: outcomes of these jobs, if the host can be lost. They count when the sum arrives.
    ``is_asked``: True while the host has been asked for the sum and has not sent it.
    ``is_closed``: True after the last sum. Later replies are in no sum.
    """

    host: Host
    group: SumGroup
    jobs: dict[str, Job] = field(default_factory=dict)
    outcomes: dict[str, MessageOutcome] = field(default_factory=dict)
    is_asked: bool = False
    is_closed: bool = False


class PendingMessages:
    """Messages of one set. The ServerApp takes their replies one by one.

    ``changed``: the grid's lock.
    ``max_unread``: function that returns the maximum number of replies in flight or unread, by message type.
    """

    # True if a message that expires while a host handles it gets its error at once
    _ends_running: ClassVar = True

    def __init__(
        self, changed: threading.Condition, max_unread: Callable[[str], float] = lambda _: math.inf
    ) -> None:
        # Type of the last message. Nearly always, all messages of a set have the same type.
        self.kind = ""
        self._changed = changed
        self._max_unread = max_unread
        self._waiting: list[_Waiting] = []  # a heap
        self._numbers = itertools.count()
        # A heap of the times at which messages expire, with their ids
        self._ends: list[tuple[float, str]] = []
        self._unanswered: set[str] = set()
        self._is_closed = self._is_late = False
        #: Error that makes all further replies useless. The ServerApp gets it instead.
        self.error: Exception | None = None
        self.running: dict[str, Job] = {}
        self.replies: dict[str, Message] = {}  # arrived and not taken, by message id
        self.expired: set[str] = set()  # ids of expired messages

    def push(self, message: Message, expected_s: float = 0.0) -> None:
        """Add a message to the queue. The message with the longest expected duration is handled first.

        ``expected_s``: expected duration of its call in seconds.
        """
        metadata = message.metadata
        self.kind = metadata.message_type
        self._unanswered.add(metadata.message_id)
        ends_s = time.monotonic() + metadata.created_at + metadata.ttl - time.time()
        heapq.heappush(self._ends, (ends_s, metadata.message_id))
        self._enqueue(message, expected_s)

    def _enqueue(self, message: Message, expected_s: float) -> None:
        heapq.heappush(self._waiting, (-expected_s, next(self._numbers), message))

    @property
    def queued_count(self) -> int:
        """The number of messages in the queue."""
        return len(self._waiting)

    def next_job(self, host: Host) -> Job | None:
        """Return the next message for a host as a job, or None if it gets no message now."""
        has_room = len(self.replies) + len(self.running) < self._max_unread(self.kind)
        if not (self._waiting and has_room):
            return None
        return self._start(Job(host, heapq.heappop(self._waiting)[-1], self))

    def _start(self, job: Job) -> Job:
        self.running[job.message_id] = job
        return job

    def requeue(self, job: Job, *, is_last: bool = False) -> None:
        """Requeue a message that a host returned or lost, if its reply is still wanted.

        ``is_last``: True puts the message at the end of the queue, False at the front.
        """
        self.running.pop(job.message_id, None)
        if not self.is_pending(job.message_id):
            return
        if job.message_id in self.expired:
            self.put_reply(job.message, expired(job.message))
        else:
            self._put_back(job, is_last=is_last)

    def _put_back(self, job: Job, *, is_last: bool) -> None:
        self._enqueue(job.message, -math.inf if is_last else math.inf)

    def is_pending(self, message_id: str) -> bool:
        """Return True if the message has no reply yet and the ServerApp still waits for it."""
        return not self._is_closed and message_id in self._unanswered

    def record_outcome(self, job: Job, outcome: MessageOutcome) -> list[MessageOutcome]:
        """Record a host's outcome with a reply, and return the outcomes that count now.

        Only an outcome that counts changes the client's state and becomes a reply.
        """
        self.running.pop(job.message_id, None)
        return [outcome] if self.is_pending(job.message_id) else []

    def put_reply(self, message: Message, reply: Message) -> None:
        """Put the reply to a message into the set, unless it is no longer wanted."""
        message_id = message.metadata.message_id
        if self.is_pending(message_id):
            self._unanswered.discard(message_id)
            reply.metadata.__dict__["_message_id"] = f"{message_id}-reply"
            self.replies[message_id] = reply

    @property
    def expires_s(self) -> float:
        """The time at which the next message expires, as in ``time.monotonic``, or infinity."""
        return self._ends[0][0] if self._ends else math.inf

    def expire(self) -> tuple[int, list[Job]]:
        """Reply with errors to the messages that have expired.

        Returns their number, and the jobs among them that hosts still handle. The caller cancels these.
        """
        expired_ids = set()
        while self.expires_s <= time.monotonic():
            expired_ids.add(heapq.heappop(self._ends)[1])
        if not expired_ids:
            return 0, []
        self.expired |= expired_ids
        waiting = self._remove_queued(expired_ids)
        running = [job for message_id, job in self.running.items() if message_id in expired_ids]
        ended = [*waiting, *(job.message for job in running if self._ends_running)]
        for message in ended:
            self.put_reply(message, expired(message))
        return len(waiting) + len(running), running

    def clear_queue(self) -> list[Message]:
        """Remove all messages from the queue and return them."""
        return self._remove_queued(self._unanswered)

    def _remove_queued(self, message_ids: Collection[str]) -> list[Message]:
        taken = [message for *_, message in self._waiting if message.metadata.message_id in message_ids]
        self._waiting = [entry for entry in self._waiting if entry[-1].metadata.message_id not in message_ids]
        heapq.heapify(self._waiting)
        return taken

    @property
    def can_collect(self) -> bool:
        """True if :meth:`collect` would return an item."""
        return bool(self.replies)

    def collect(self) -> list[SumItem]:
        """Return at most one reply and remove it from the set.

        The other replies stay and count against ``max_unread``, so that they do not fill the memory.
        """
        if not self.replies:
            return []
        self._changed.notify_all()
        return [self.replies.pop(next(iter(self.replies)))]

    def stop(self) -> None:
        """Stop waiting for replies, because the deadline has passed. Replies that have arrived stay."""
        self._is_late = True
        self.clear_queue()

    @property
    def is_done(self) -> bool:
        """True if no further items will come."""
        return not self.replies and (self._is_late or not self._unanswered)

    @property
    def remaining(self) -> int:
        """The number of messages without an outcome that counts."""
        return len(self._unanswered)

    def sums_to_fetch(self, *, is_due: bool) -> list[PartialSum]:
        """Return the groups to fetch sums of now. Only a set with sums has any.

        ``is_due``: True if enough time has passed since the last fetch.
        """
        return []

    def cancel(self, message_ids: Collection[str]) -> list[Job]:
        """Drop some of the messages. Returns the jobs among them that the caller cancels on their hosts."""
        self._unanswered.difference_update(message_ids)
        self._remove_queued(set(message_ids))
        for message_id in message_ids:
            self.replies.pop(message_id, None)
        return [self.running[message_id] for message_id in message_ids if message_id in self.running]

    def close(self) -> list[Job]:
        """Close the set and drop all replies. Returns the running jobs, which the caller cancels."""
        self._is_closed = True
        self.clear_queue()
        self.replies.clear()
        return [job for message_id, job in self.running.items() if message_id not in self.expired]


class PulledMessages(PendingMessages):
    """Messages with outcomes that count only when they are pulled.

    A checkpoint written before that has the client's previous state.

    ``arrived``: arrived outcomes with their jobs, by message id.
    """

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__(changed)
        self.arrived: dict[str, tuple[Job, MessageOutcome]] = {}

    def record_outcome(self, job: Job, outcome: MessageOutcome) -> list[MessageOutcome]:
        """Keep an outcome until it is pulled. Returns an empty list, because none counts yet."""
        for wanted in super().record_outcome(job, outcome):
            self.arrived[job.message_id] = job, wanted
        return []

    def cancel(self, message_ids: Collection[str]) -> list[Job]:
        """Drop some of the messages. Returns the jobs among them that the caller cancels on their hosts."""
        for message_id in message_ids:
            self.arrived.pop(message_id, None)
        return super().cancel(message_ids)

    def has_reply(self, message_id: str) -> bool:
        """Return True if the message has a reply to pull."""
        return message_id in self.arrived or message_id in self.replies


class SummedMessages(PendingMessages):
    """Messages with replies that hosts sum in the order of arrival.

    ``new_group``: function that returns a new group.
    ``sums``: arrived sums with the names of their hosts.
    """

    # When a message expires, its host may just have added the reply to a sum. So the set waits for the host
    # to say if the handling was cancelled in time.
    _ends_running: ClassVar = False

    def __init__(self, changed: threading.Condition, new_group: Callable[[], SumGroup]) -> None:
        super().__init__(changed)
        self._make_group = new_group
        self.groups: dict[int, PartialSum] = {}  # groups on hosts, by number
        self.sums: list[tuple[str, ReplySum]] = []

    def next_job(self, host: Host) -> Job | None:
        """Return the next message for a host as a job, or None if no message waits."""
        if not self._waiting:
            return None
        partial_sum = next(
            (partial_sum for partial_sum in self.groups.values() if partial_sum.host is host), None
        )
        return self._start(
            Job(host, heapq.heappop(self._waiting)[-1], self, partial_sum or self._new_group(host))
        )

    def record_outcome(self, job: Job, outcome: MessageOutcome) -> list[MessageOutcome]:
        """Record a host's outcome with a reply, and return the outcomes that count now.

        If the host can be lost, the outcome counts when the sum with its reply arrives. An error counts at
        once, because it is in no sum.
        """
        partial_sum, reply = job.partial_sum, outcome.reply
        assert partial_sum is not None and reply is not None
        if not super().record_outcome(job, outcome) or partial_sum.is_closed:
            return []
        if reply.has_error():
            # The worker of an expired message was killed, so the crash only reflects the expiry.
            if job.message_id in self.expired and reply.error.code == ErrorCode.CLIENT_APP_CRASHED:
                reply = expired(job.message)
            return [replace(outcome, reply=reply)]
        partial_sum.jobs[job.message_id] = job
        if not job.host.can_be_lost:
            return [outcome]
        partial_sum.outcomes[job.message_id] = outcome
        return []

    def record_sum(self, part: GroupSum) -> list[tuple[Job, MessageOutcome]]:
        """Record the sum of a group, and return the outcomes that count now, with their jobs."""
        partial_sum = self.groups.get(part.group.number)
        if partial_sum is None:
            return []
        partial_sum.is_asked, partial_sum.is_closed = False, self._is_late
        self.error = self.error or part.error
        self._add_sum(partial_sum, part.total)
        counted = []
        for message_id in part.ids:
            job, outcome = partial_sum.jobs.pop(message_id, None), partial_sum.outcomes.pop(message_id, None)
            if job is not None and outcome is not None:
                counted.append((job, outcome))
        return counted

    def _add_sum(self, partial_sum: PartialSum, total: ReplySum) -> None:
        self.sums.append((partial_sum.host.name, total))

    def lost(self, host: Host) -> None:
        """Requeue the messages with replies in the sums of a lost host.

        The dispatcher requeues the host's running messages with :meth:`requeue`.
        """
        for partial_sum in [partial_sum for partial_sum in self.groups.values() if partial_sum.host is host]:
            del self.groups[partial_sum.group.number]
            for job in partial_sum.jobs.values():
                self.requeue(job)

    def _put_back(self, job: Job, *, is_last: bool) -> None:
        if not self._is_late:
            super()._put_back(job, is_last=is_last)

    @property
    def can_collect(self) -> bool:
        """True if :meth:`collect` would return an item."""
        return bool(self.replies or self.sums)

    def collect(self) -> list[SumItem]:
        """Return all arrived replies and sums, and remove them from the set."""
        items: list[SumItem] = [*self.replies.values(), *self.sums]
        self.replies.clear()
        self.sums.clear()
        return items

    def sums_to_fetch(self, *, is_due: bool) -> list[PartialSum]:
        """Return the groups to fetch sums of now, and mark them as asked.

        All sums are fetched when no message is queued or running, or the deadline has passed. Hosts that can
        be lost are also asked in between, so that less is lost with them.

        ``is_due``: True if enough time has passed since the last fetch.
        """
        is_last = self._is_late or self._is_handled
        groups = (partial_sum for partial_sum in self.groups.values() if partial_sum.jobs)
        return self._mark_asked(
            partial_sum for partial_sum in groups if is_last or (is_due and partial_sum.host.can_be_lost)
        )

    def _mark_asked(self, groups: Iterable[PartialSum]) -> list[PartialSum]:
        asked = [partial_sum for partial_sum in groups if not partial_sum.is_asked]
        for partial_sum in asked:
            partial_sum.is_asked = True
        return asked

    @property
    def _is_handled(self) -> bool:
        return not self.running and not self.queued_count

    @property
    def is_done(self) -> bool:
        """True if all sums have arrived. After the deadline, only replies that are in a sum count."""
        return (self._is_late or self._is_handled) and not any(
            partial_sum.jobs for partial_sum in self.groups.values()
        )

    def _new_group(self, host: Host) -> PartialSum:
        group = self._make_group()
        partial_sum = self.groups[group.number] = PartialSum(host, group)
        return partial_sum


@dataclass(eq=False)
class _Block:
    """Messages to consecutive nodes, which one host handles.

    ``pushed``: number of added messages.
    ``waiting``: queued messages with their positions in the block.
    ``partial_sum``: the group on the host, once a host has begun the block.
    ``total``: sum of the replies with the name of its host, once it has arrived.
    """

    pushed: int = 0
    waiting: deque[tuple[int, Message]] = field(default_factory=deque)
    partial_sum: PartialSum | None = None
    total: tuple[str, ReplySum] | None = None


class SummedBlocks(SummedMessages):
    """Messages in the order of the nodes. A host handles a block of nodes and sums its replies in order.

    All messages are pushed before the first one begins. The ServerApp gets the sums in the order of the
    blocks. Hosts must not keep too many sums, so only blocks near the first unfinished block may begin.

    ``changed``, ``new_group``: as for :class:`SummedMessages`.
    ``block_of``: function that returns the block number of a message.
    ``max_ahead``: function that returns the number of blocks that may be in flight whatever memory they
    take.
    """

    def __init__(
        self,
        changed: threading.Condition,
        new_group: Callable[[], SumGroup],
        block_of: Callable[[Message], int],
        max_ahead: Callable[[], int],
    ) -> None:
        super().__init__(changed, new_group)
        self._block_of = block_of
        self._min_ahead = max_ahead
        self._max_ahead = 0
        self._blocks: dict[int, _Block] = {}  # unfinished blocks, by number
        self._block_by_message: dict[str, _Block] = {}
        self._count = 0

    @property
    def queued_count(self) -> int:
        """The number of messages in the queue."""
        return self._count

    def _enqueue(self, message: Message, expected_s: float) -> None:
        self._max_ahead = self._max_ahead or _max_blocks_ahead(message)
        block = self._blocks.setdefault(self._block_of(message), _Block())
        self._block_by_message[message.metadata.message_id] = block
        block.waiting.append((block.pushed, message))
        block.pushed += 1
        self._count += 1

    def _put_back(self, job: Job, *, is_last: bool) -> None:
        if not self._is_late:
            assert job.place is not None
            self._block_by_message[job.message_id].waiting.append((job.place, job.message))
            self._count += 1

    def next_job(self, host: Host) -> Job | None:
        """Return a message of a block that the host has begun, or of a new block, or None."""
        next_block = None
        for block in itertools.islice(self._blocks.values(), max(self._max_ahead, self._min_ahead())):
            # After the loss of a host, all messages of its block may still be on their way back.
            if not block.waiting:
                continue
            if block.partial_sum is None:
                next_block = next_block or block
            elif block.partial_sum.host is host:
                next_block = block
                break
        if next_block is None:
            return None
        next_block.partial_sum = next_block.partial_sum or self._new_group(host)
        place, message = next_block.waiting.popleft()
        self._count -= 1
        return self._start(Job(host, message, self, next_block.partial_sum, place))

    def _remove_queued(self, message_ids: Collection[str]) -> list[Message]:
        taken: list[Message] = []
        for block in self._blocks.values():
            queued, block.waiting = block.waiting, deque()
            for place, message in queued:
                if message.metadata.message_id in message_ids:
                    taken.append(message)
                else:
                    block.waiting.append((place, message))
        self._count -= len(taken)
        return taken

    def lost(self, host: Host) -> None:
        """Requeue the messages of a lost host. The next host that begins a block gets all of it."""
        for block in self._blocks.values():
            if block.partial_sum is not None and block.partial_sum.host is host and block.total is None:
                block.partial_sum = None
        super().lost(host)

    def sums_to_fetch(self, *, is_due: bool) -> list[PartialSum]:
        """Return the groups to fetch sums of now, and mark them as asked.

        These are the groups of complete blocks that follow the last finished block without a gap.
        """
        self._pass_on()
        if self._is_late:
            return self._mark_asked(partial_sum for partial_sum in self.groups.values() if partial_sum.jobs)
        complete = itertools.takewhile(self._is_complete, self._blocks.values())
        return self._mark_asked(block.partial_sum for block in complete if block.partial_sum is not None)

    def _is_complete(self, block: _Block) -> bool:
        """Return True if all messages of a block have an outcome."""
        if block.waiting:
            return False
        return block.partial_sum is None or all(
            job.partial_sum is not block.partial_sum for job in self.running.values()
        )

    def _add_sum(self, partial_sum: PartialSum, total: ReplySum) -> None:
        (block,) = [block for block in self._blocks.values() if block.partial_sum is partial_sum]
        block.total = partial_sum.host.name, total
        self._pass_on()

    @property
    def is_done(self) -> bool:
        """True if all sums have been passed on."""
        return not self._blocks

    def _pass_on(self) -> None:
        """Make the sums of the first blocks available to :meth:`collect`, up to the first missing sum."""
        while self._blocks:
            number, block = next(iter(self._blocks.items()))
            if block.total is not None:
                self.sums.append(block.total)
            elif not self._has_no_sum(block):
                break
            # After the deadline, the host may have more of the group. If the host was lost, the group is
            # gone.
            if block.partial_sum is not None and not self._is_late:
                self.groups.pop(block.partial_sum.group.number, None)
            del self._blocks[number]

    def _has_no_sum(self, block: _Block) -> bool:
        # No host has this block, so none of its nodes has sent a reply to sum.
        if block.partial_sum is None:
            return self._is_late or self._is_complete(block)
        return self._is_late and not block.partial_sum.jobs


def _max_blocks_ahead(message: Message) -> int:
    """Return how many sums of blocks may wait in memory, if replies are as large as the message."""
    # Sums are 64-bit floats, so they take twice the memory of 32-bit arrays.
    return min(_MAX_AHEAD, _AHEAD_BYTES // max(2 * arrays_bytes(message), 1))
