"""Pending messages: the state of messages sent together, and of their replies.

::

    push ──> queue ──next_job──> running ──record_outcome──> replies ──collect──> the ServerApp
               ▲                    │                           ▲
               │                    │ held: the outcome does    │ it counts: its reply is pulled,
               └──────requeue───────┘ not count yet ────────────┘ or the sum that has it arrives
                 the host returned the message, or was lost

The ServerApp sends a set of messages, and hosts handle them in parallel. Any host may be lost, any message
may expire, and the ServerApp may stop waiting at any moment. A set records what happens to each message of
the set, so that no message is forgotten or answered twice.

All sets are of one class. They differ in these policies:

- **Which message comes next.** The queue decides. :class:`LongestFirst` starts with the messages that take
  longest. :class:`NodeBlocks` keeps the order of the nodes, and gives a host whole blocks of consecutive
  nodes. Results then do not depend on speed.
- **How many replies may be unread.** ``max_unread`` limits them if the ServerApp takes replies one by one.
- **What is summed.** With ``new_group``, hosts sum the replies. With LongestFirst, each host adds all its
  replies to one sum, in the order of arrival. With NodeBlocks, each block has a sum of its own, formed in the
  order of the nodes, and the ServerApp gets these sums in the order of the blocks.
- **When an outcome counts.** Only an outcome that counts changes the client's state and becomes a reply.
  Usually it counts when it arrives. With ``counts_when_pulled``, it counts when the ServerApp pulls the
  reply, so that an earlier checkpoint has the client's previous state. If replies are summed and the host can
  be lost, an outcome counts when the sum arrives. If the host is lost before that, the message goes back to
  the queue.

Threads. A set is shared by the ServerApp's thread and the threads of the dispatcher. The ServerApp's thread
runs the code of ``grid``: it calls ``push``, ``collect``, ``pull``, ``expire``, ``sums_to_fetch``, ``stop``,
``cancel`` and ``close``. The dispatcher's threads call ``next_job``, ``requeue``, ``record_outcome``,
``record_sum``, ``lost`` and ``put_reply``. Callers hold the grid's lock, so a set needs no lock of its own.
No method blocks or calls a host. A method returns the jobs to cancel or the groups to ask for, and the caller
tells the host after it releases the lock.

Races that follow from this:

- A message expires or is cancelled, and the host's outcome arrives before the host learns of it.
  ``is_pending`` is already False, so the outcome is dropped.
- If replies are summed, a message may expire at the moment its host adds the reply to a sum. An error would
  then be wrong, because the reply is already in the sum. So the set waits for the host's outcome, which shows
  if the message was cancelled in time.
- The deadline passes while hosts still handle messages and sum their replies. The grid fetches one last sum
  from each host, and the set then closes the group. Later replies are in no sum, so they are dropped.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

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
        group = self.partial_sum.group if self.partial_sum else None
        return AssignedMessage(self.message, seed, state, group, self.place)


@dataclass(eq=False)
class PartialSum:
    """A group on a host, with the jobs in its sum. :class:`SumGroup` describes the group to the host.

    ``block``: block of nodes with these replies, if the group is summed in order.
    ``held``: jobs with a reply in the host's current sum, by message id. If the host can be lost, also the
    outcome of the job, which counts when the sum arrives.
    ``total``: the sum of a block that has arrived, while sums of earlier blocks are missing.
    ``is_asked``: True while the host has been asked for the sum and has not sent it.
    ``is_closed``: True after the last sum. Later replies are in no sum.
    """

    host: Host
    group: SumGroup
    block: Block | None = None
    held: dict[str, tuple[Job, MessageOutcome | None]] = field(default_factory=dict)
    total: ReplySum | None = None
    is_asked: bool = False
    is_closed: bool = False


@dataclass(eq=False)
class Block:
    """Messages to consecutive nodes, which one host handles.

    ``pushed``: number of added messages.
    ``waiting``: queued messages with their positions in the block.
    ``partial_sum``: the group on the host, once a host has begun the block.
    """

    pushed: int = 0
    waiting: deque[tuple[int, Message]] = field(default_factory=deque)
    partial_sum: PartialSum | None = None


@dataclass(frozen=True)
class Queued:
    """A message that leaves a queue, with its block and its position there if the queue has blocks."""

    message: Message
    block: Block | None = None
    place: int | None = None


class LongestFirst:
    """A queue that begins with the longest message. Of equally long messages, the first one sent begins."""

    def __init__(self) -> None:
        # A heap
        self._waiting: list[tuple[float, int, Message]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message, expected_s: float) -> None:
        """Add a message with the expected duration of its call in seconds."""
        heapq.heappush(self._waiting, (-expected_s, next(self._numbers), message))

    def put_back(self, job: Job, *, is_last: bool) -> None:
        """Add the message of a job at the front, or at the end."""
        self.add(job.message, -math.inf if is_last else math.inf)

    def pop(self, host: Host) -> Queued | None:
        """Remove and return the next message, or None if the queue is empty."""
        return Queued(heapq.heappop(self._waiting)[-1]) if self._waiting else None

    def remove(self, message_ids: Collection[str]) -> list[Message]:
        """Remove and return the messages with these ids."""
        removed = [message for *_, message in self._waiting if message.metadata.message_id in message_ids]
        self._waiting = [entry for entry in self._waiting if entry[-1].metadata.message_id not in message_ids]
        heapq.heapify(self._waiting)
        return removed


class NodeBlocks:
    """A queue in the order of the nodes. A host handles whole blocks of nodes.

    All messages are added before the first one begins. Hosts must not keep too many sums, so only blocks near
    the first unfinished block may begin.

    ``block_of``: function that returns the block number of a message.
    ``min_ahead``: function that returns the number of blocks that may be in flight whatever memory they take.
    ``unfinished``: blocks whose sums are not available to the ServerApp yet, by number.
    """

    def __init__(self, block_of: Callable[[Message], int], min_ahead: Callable[[], int]) -> None:
        self.unfinished: dict[int, Block] = {}
        self._block_of = block_of
        self._min_ahead = min_ahead
        self._max_ahead = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, message: Message, expected_s: float) -> None:
        """Add a message to its block."""
        self._max_ahead = self._max_ahead or _max_blocks_ahead(message)
        block = self.unfinished.setdefault(self._block_of(message), Block())
        block.waiting.append((block.pushed, message))
        block.pushed += 1
        self._count += 1

    def put_back(self, job: Job, *, is_last: bool) -> None:
        """Put the message of a job back at the end of its block. ``is_last`` has no effect."""
        assert job.partial_sum is not None and job.partial_sum.block is not None and job.place is not None
        job.partial_sum.block.waiting.append((job.place, job.message))
        self._count += 1

    def pop(self, host: Host) -> Queued | None:
        """Remove and return a message of a block that the host has begun, or of a new block, or None."""
        next_block = None
        for block in itertools.islice(self.unfinished.values(), max(self._max_ahead, self._min_ahead())):
            if not block.waiting:
                continue
            if block.partial_sum is None:
                next_block = next_block or block
            elif block.partial_sum.host is host:
                next_block = block
                break
        if next_block is None:
            return None
        self._count -= 1
        place, message = next_block.waiting.popleft()
        return Queued(message, next_block, place)

    def remove(self, message_ids: Collection[str]) -> list[Message]:
        """Remove and return the messages with these ids."""
        removed: list[Message] = []
        for block in self.unfinished.values():
            queued, block.waiting = block.waiting, deque()
            for place, message in queued:
                if message.metadata.message_id in message_ids:
                    removed.append(message)
                else:
                    block.waiting.append((place, message))
        self._count -= len(removed)
        return removed


def _max_blocks_ahead(message: Message) -> int:
    """Return how many sums of blocks may wait in memory, if replies are as large as the message."""
    # Sums are 64-bit floats, so they take twice the memory of 32-bit arrays.
    return min(_MAX_AHEAD, _AHEAD_BYTES // max(2 * arrays_bytes(message), 1))


class PendingMessages:
    """Messages of one set, and their replies.

    ``queue``: decides which message comes next; by default, the longest.
    ``max_unread``: function that returns the maximum number of replies in flight or unread, by message type.
    ``counts_when_pulled``: True if an outcome counts when its reply is pulled.
    ``new_group``: function that returns a new group, if hosts sum the replies.
    """

    def __init__(
        self,
        queue: LongestFirst | NodeBlocks | None = None,
        *,
        max_unread: Callable[[str], float] = lambda _: math.inf,
        counts_when_pulled: bool = False,
        new_group: Callable[[], SumGroup] | None = None,
    ) -> None:
        # Type of the last message. Nearly always, all messages of a set have the same type.
        self.kind = ""
        self._queue = LongestFirst() if queue is None else queue
        #: The unfinished blocks, by number. Empty if the queue has no blocks.
        self._blocks = self._queue.unfinished if isinstance(self._queue, NodeBlocks) else {}
        self._max_unread = max_unread
        self._counts_when_pulled = counts_when_pulled
        self._new_group = new_group
        # A heap of the times at which messages expire, with their ids
        self._ends: list[tuple[float, str]] = []
        self._unanswered: set[str] = set()
        self._is_closed = self._is_late = False
        #: Error that makes all further replies useless. The ServerApp gets it instead.
        self.error: Exception | None = None
        self.running: dict[str, Job] = {}
        self.expired: set[str] = set()  # ids of expired messages
        self.groups: dict[int, PartialSum] = {}  # groups on hosts, by number
        # Outcomes that do not count until they are pulled, with their jobs, by message id
        self._arrived: dict[str, tuple[Job, MessageOutcome]] = {}
        self._replies: dict[str, Message] = {}  # arrived and not taken, by message id
        self._sums: list[tuple[str, ReplySum]] = []  # arrived sums with the names of their hosts

    def push(self, message: Message, expected_s: float = 0.0) -> None:
        """Add a message to the queue.

        ``expected_s``: expected duration of its call in seconds.
        """
        metadata = message.metadata
        self.kind = metadata.message_type
        self._unanswered.add(metadata.message_id)
        ends_s = time.monotonic() + metadata.created_at + metadata.ttl - time.time()
        heapq.heappush(self._ends, (ends_s, metadata.message_id))
        self._queue.add(message, expected_s)

    @property
    def is_in_order(self) -> bool:
        """True if the queue keeps the order of the nodes, whatever the expected durations are."""
        return isinstance(self._queue, NodeBlocks)

    @property
    def is_summed(self) -> bool:
        """True if hosts sum the replies."""
        return self._new_group is not None

    @property
    def queued_count(self) -> int:
        """The number of messages in the queue."""
        return len(self._queue)

    @property
    def remaining(self) -> int:
        """The number of messages without an outcome that counts."""
        return len(self._unanswered)

    # Jobs of hosts

    def next_job(self, host: Host) -> Job | None:
        """Return the next message for a host as a job, or None if it gets no message now."""
        if len(self._replies) + len(self.running) >= self._max_unread(self.kind):
            return None
        queued = self._queue.pop(host)
        if queued is None:
            return None
        job = Job(host, queued.message, self, self._partial_sum(host, queued.block), queued.place)
        self.running[job.message_id] = job
        return job

    def _partial_sum(self, host: Host, block: Block | None) -> PartialSum | None:
        """Return the group that a host adds its next reply to, or None if replies are not summed."""
        if self._new_group is None:
            return None
        if block is None:
            groups = (partial_sum for partial_sum in self.groups.values() if partial_sum.host is host)
            partial_sum = next(groups, None)
        else:
            partial_sum = block.partial_sum
        if partial_sum is None:
            partial_sum = PartialSum(host, self._new_group(), block)
            self.groups[partial_sum.group.number] = partial_sum
        if block is not None:
            block.partial_sum = partial_sum
        return partial_sum

    def requeue(self, job: Job, *, is_last: bool = False) -> None:
        """Requeue a message that a host returned or lost, if its reply is still wanted.

        ``is_last``: True puts the message at the end of a LongestFirst queue, False at the front.
        """
        self.running.pop(job.message_id, None)
        if not self.is_pending(job.message_id):
            return
        if job.message_id in self.expired:
            self.put_reply(job.message, expired(job.message))
        elif not self._is_late:
            self._queue.put_back(job, is_last=is_last)

    def lost(self, host: Host) -> None:
        """Requeue the messages with replies in the sums of a lost host.

        The dispatcher requeues the host's running messages with :meth:`requeue`. A block of the lost host
        starts again: the next host that begins it gets all its messages.
        """
        for partial_sum in [partial_sum for partial_sum in self.groups.values() if partial_sum.host is host]:
            del self.groups[partial_sum.group.number]
            if partial_sum.block is not None and partial_sum.total is None:
                partial_sum.block.partial_sum = None
            for job, _ in partial_sum.held.values():
                self.requeue(job)

    def is_pending(self, message_id: str) -> bool:
        """Return True if the message has no reply yet and the ServerApp still waits for it."""
        return not self._is_closed and message_id in self._unanswered

    def record_outcome(self, job: Job, outcome: MessageOutcome) -> list[MessageOutcome]:
        """Record a host's outcome with a reply, and return the outcomes that count now.

        In a summed set, an error counts at once, because it is in no sum.
        """
        self.running.pop(job.message_id, None)
        partial_sum, reply = job.partial_sum, outcome.reply
        if not self.is_pending(job.message_id) or (partial_sum is not None and partial_sum.is_closed):
            return []
        if partial_sum is None:
            if not self._counts_when_pulled:
                return [outcome]
            self._arrived[job.message_id] = job, outcome
            return []
        assert reply is not None
        if reply.has_error():
            # The worker of an expired message was killed, so the crash only reflects the expiry.
            if job.message_id in self.expired and reply.error.code == ErrorCode.CLIENT_APP_CRASHED:
                reply = expired(job.message)
            return [replace(outcome, reply=reply)]
        partial_sum.held[job.message_id] = job, outcome if job.host.can_be_lost else None
        return [] if job.host.can_be_lost else [outcome]

    def put_reply(self, message: Message, reply: Message) -> None:
        """Put the reply to a message into the set, unless it is no longer wanted."""
        message_id = message.metadata.message_id
        if self.is_pending(message_id):
            self._unanswered.discard(message_id)
            reply.metadata.__dict__["_message_id"] = f"{message_id}-reply"
            self._replies[message_id] = reply

    # Sums

    def sums_to_fetch(self, *, is_due: bool) -> list[PartialSum]:
        """Return the groups to fetch sums of now, and mark them as asked.

        All sums are fetched when no message is queued or running, or the deadline has passed. Before that,
        only the sums of complete blocks are fetched, in order, up to the first incomplete block. Without
        blocks, hosts that can be lost are asked from time to time, so that a loss costs less.

        ``is_due``: True if enough time has passed since the last fetch.
        """
        self._pass_on()
        wanted: Iterable[PartialSum] = ()
        if self._is_late or not (self.running or self._queue):
            wanted = self.groups.values()
        elif self._blocks:
            complete = itertools.takewhile(self._is_complete, self._blocks.values())
            wanted = (block.partial_sum for block in complete if block.partial_sum is not None)
        elif is_due:
            wanted = (partial_sum for partial_sum in self.groups.values() if partial_sum.host.can_be_lost)
        asked = [partial_sum for partial_sum in wanted if partial_sum.held and not partial_sum.is_asked]
        for partial_sum in asked:
            partial_sum.is_asked = True
        return asked

    def record_sum(self, part: GroupSum) -> list[tuple[Job, MessageOutcome]]:
        """Record the sum of a group, and return the outcomes that count now, with their jobs."""
        partial_sum = self.groups.get(part.group.number)
        if partial_sum is None:
            return []
        partial_sum.is_asked, partial_sum.is_closed = False, self._is_late
        self.error = self.error or part.error
        if partial_sum.block is None:
            self._sums.append((partial_sum.host.name, part.total))
        else:
            partial_sum.total = part.total
            self._pass_on()
        held = [partial_sum.held.pop(message_id) for message_id in part.ids if message_id in partial_sum.held]
        return [(job, outcome) for job, outcome in held if outcome is not None]

    def _pass_on(self) -> None:
        """Move the sums of blocks to :meth:`collect` in order, up to the first missing sum."""
        while self._blocks:
            number, block = next(iter(self._blocks.items()))
            partial_sum = block.partial_sum
            if partial_sum is not None and partial_sum.total is not None:
                self._sums.append((partial_sum.host.name, partial_sum.total))
                # After the deadline, the host may still have replies of this group. So the group stays until
                # the set is closed.
                if not self._is_late:
                    self.groups.pop(partial_sum.group.number, None)
            elif not (self._is_late or self._is_complete(block)) or (partial_sum and partial_sum.held):
                return
            elif partial_sum is not None:
                # None of the nodes has sent a reply to sum, and a reply that comes now is too late.
                partial_sum.is_closed = True
            del self._blocks[number]

    def _is_complete(self, block: Block) -> bool:
        """Return True if all messages of a block have an outcome."""
        return not block.waiting and all(
            job.partial_sum is not block.partial_sum for job in self.running.values()
        )

    # The ServerApp's side

    @property
    def can_collect(self) -> bool:
        """True if :meth:`collect` would return an item."""
        return bool(self._replies or self._sums)

    def collect(self) -> list[SumItem]:
        """Return arrived items, and remove them from the set.

        These are all replies without their arrays, and sums, if replies are summed. Otherwise, it is at most
        one reply. The others stay and count against ``max_unread``, so that they do not fill the memory.
        """
        taken = list(itertools.islice(self._replies, None if self.is_summed else 1))
        items: list[SumItem] = [*(self._replies.pop(message_id) for message_id in taken), *self._sums]
        self._sums.clear()
        return items

    def has_reply(self, message_id: str) -> bool:
        """Return True if the message has a reply to pull."""
        return message_id in self._arrived or message_id in self._replies

    def outcome_to_count(self, message_id: str) -> tuple[Job, MessageOutcome] | None:
        """Remove and return the outcome of a reply that is about to be pulled, with its job, or None.

        The outcome counts from now on.
        """
        return self._arrived.pop(message_id, None)

    def pull(self, message_id: str) -> Message | None:
        """Return the reply to a message and remove it from the set, or None if there is no reply."""
        return self._replies.pop(message_id, None)

    @property
    def is_done(self) -> bool:
        """True if no further items will come.

        After the deadline, only the remaining sums are still awaited.
        """
        return (
            not self.can_collect
            and (self._is_late or not self._unanswered)
            and not self._blocks
            and not any(partial_sum.held for partial_sum in self.groups.values())
        )

    # The end of messages

    @property
    def expires_s(self) -> float:
        """The time at which the next message expires, as in ``time.monotonic``, or infinity."""
        return self._ends[0][0] if self._ends else math.inf

    def expire(self) -> tuple[int, list[Job]]:
        """Reply with errors to expired messages.

        If replies are summed, a running message gets its error later.

        Returns their number, and the jobs among them that hosts still handle. The caller cancels these.
        """
        expired_ids = set()
        while self.expires_s <= time.monotonic():
            expired_ids.add(heapq.heappop(self._ends)[1])
        if not expired_ids:
            return 0, []
        self.expired |= expired_ids
        queued = self._queue.remove(expired_ids)
        running = [job for message_id, job in self.running.items() if message_id in expired_ids]
        # A host may just have added the reply to a sum. It will say if the handling was cancelled in time.
        ended = queued if self.is_summed else [*queued, *(job.message for job in running)]
        for message in ended:
            self.put_reply(message, expired(message))
        return len(queued) + len(running), running

    def clear_queue(self) -> list[Message]:
        """Remove all messages from the queue and return them."""
        return self._queue.remove(self._unanswered)

    def stop(self) -> None:
        """Stop waiting for replies, because the deadline has passed.

        Replies that have arrived can still be collected.
        """
        self._is_late = True
        self.clear_queue()

    def cancel(self, message_ids: Collection[str]) -> list[Job]:
        """Drop some of the messages. Returns the jobs among them that the caller cancels on their hosts."""
        self._unanswered.difference_update(message_ids)
        self._queue.remove(set(message_ids))
        for message_id in message_ids:
            self._arrived.pop(message_id, None)
            self._replies.pop(message_id, None)
        return [self.running[message_id] for message_id in message_ids if message_id in self.running]

    def close(self) -> list[Job]:
        """Close the set and drop all replies.

        Returns the running jobs that have not expired. The caller cancels them.
        """
        self._is_closed = True
        self.clear_queue()
        self._replies.clear()
        return [job for message_id, job in self.running.items() if message_id not in self.expired]
