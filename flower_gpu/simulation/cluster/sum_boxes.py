"""Messages whose replies hosts sum, as the driver sees them: what is where, and what has to be done again.

A message is waiting, then running on a host, then held there (its reply is in a group of that host), and done
when the group's sum is at the driver. When a host is lost, what it ran and what it held waits again.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from flwr.app import Message

from flower_gpu.simulation.boxes import Box
from flower_gpu.simulation.cluster.visits import SumGroup

#: An agent. Another one on the same machine is another host.
Host = Hashable


@dataclass
class Held:
    """A group of replies on a host."""

    host: Host
    group: SumGroup
    messages: dict[str, Message] = field(default_factory=dict)  # whose replies are in it, by id


class SumBox(Box):
    """Each host sums the replies to the messages that it handles, as they come.

    ``changed``: the grid's.
    ``numbers``: of groups; all boxes of a run have the same.
    ``weighted_by_key``, ``keeps_integers``: as for :class:`flower_gpu.flower.averaging.SummedReplies`.
    """

    in_order: ClassVar = False
    # A host may just have added its reply to a sum. It says whether it could end the handling.
    _ends_running: ClassVar = False

    def __init__(
        self,
        changed: threading.Condition,
        numbers: Iterator[int],
        weighted_by_key: str,
        keeps_integers: bool,
    ) -> None:
        super().__init__(changed)
        self._group_numbers = numbers
        self._weighted_by_key = weighted_by_key
        self._keeps_integers = keeps_integers
        self._held: dict[Host, Held] = {}
        #: Errors in the place of replies of messages that no host handles any more.
        self.failed: list[Message] = []
        #: How many replies are in sums that are at the driver, or are errors there.
        self.finished = 0

    def begin_on(self, host: Host) -> tuple[Message, Held] | None:
        """Return a message that a host handles next, and what its reply goes to; None where there is none."""
        if not self.waiting:
            return None
        if host not in self._held:
            self._held[host] = self._new_group(host)
        return self.begin(), self._held[host]

    def hold(self, message: Message, held: Held) -> None:
        """Take note that a reply is in a group on a host."""
        if not self.is_current(held):  # the host was lost meanwhile, and the reply with it
            self.again(message)
        elif self.running.pop(message.metadata.message_id, None) is not None:
            held.messages[message.metadata.message_id] = message
        self._changed.notify_all()

    def end(self, message: Message, reply: Message | None) -> None:
        """Have an error in the place of a reply that no host has."""
        if self.running.pop(message.metadata.message_id, None) is not None and reply is not None:
            self.failed.append(reply)
        self._changed.notify_all()

    def lost(self, host: Host) -> None:
        """Have all that a host held handled again. What it runs comes back by :meth:`again`."""
        held = self._held.pop(host, None)
        if held is not None:
            self._wait_again(held)

    def done(self, held: Held, message_ids: list[str]) -> None:
        """Take note that the sum of replies to these messages is here."""
        self.finished += len(message_ids)
        for message_id in message_ids:
            held.messages.pop(message_id, None)
            self.running.pop(message_id, None)  # its host is about to tell that the reply is in the group

    def to_take(self, *, is_due: bool, is_last: bool) -> list[Held]:
        """Return the groups whose sums are to be fetched now.

        ``is_due``: the last time is long ago. ``is_last``: no replies are waited for any more.
        """
        if not (is_due or is_last or self._is_handled):
            return []
        return [held for held in self.groups if held.messages]

    @property
    def is_done(self) -> bool:
        """Whether all sums are at the driver."""
        return self._is_handled and not any(held.messages for held in self.groups)

    @property
    def _is_handled(self) -> bool:
        return not self.running and not self.has_waiting

    @property
    def groups(self) -> list[Held]:
        """All groups that hosts may have something of."""
        return list(self._held.values())

    def is_current(self, held: Held) -> bool:
        """Tell whether a group counts: its host was not lost."""
        return self._held.get(held.host) is held

    def _new_group(self, host: Host) -> Held:
        number = next(self._group_numbers)
        return Held(host, SumGroup(number, self._weighted_by_key, self._keeps_integers, self.in_order))

    def _wait_again(self, held: Held) -> None:
        for message in held.messages.values():
            self.running[message.metadata.message_id] = message
            self.again(message)


@dataclass
class _Block:
    """Messages to consecutive nodes: one host handles all of them."""

    messages: dict[str, Message] = field(default_factory=dict)  # whose replies are not here
    waiting: deque[Message] = field(default_factory=deque)
    held: Held | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all replies are in its group."""
        return self.held is not None and len(self.messages) == len(self.held.messages)


class BlockBox(SumBox):
    """One host handles each block of consecutive nodes, and sums its replies in the order of the nodes.

    Blocks begin in their order, and their sums are taken in their order. So that hosts do not keep too many
    of them, no block begins that is far ahead of the first one whose sum is not here.

    ``changed``, ``numbers``, ``weighted_by_key``, ``keeps_integers``: as for :class:`SumBox`.
    ``block_of``: returns the block of a message.
    ``most_ahead``: returns how many blocks may be under way.
    """

    has_any_order: ClassVar = False
    in_order: ClassVar = True

    def __init__(
        self,
        changed: threading.Condition,
        numbers: Iterator[int],
        weighted_by_key: str,
        keeps_integers: bool,
        block_of: Callable[[Message], int],
        most_ahead: Callable[[], int],
    ) -> None:
        super().__init__(changed, numbers, weighted_by_key, keeps_integers)
        self._block_of = block_of
        self._most_ahead = most_ahead
        self._blocks: dict[int, _Block] = {}  # in their order; those whose sums are here are gone
        self._of: dict[str, _Block] = {}  # by message
        self._waiting = 0
        self._open: set[int] = set()  # groups that count

    def push(self, message: Message, expected_s: float = 0.0) -> None:
        """Take a message that is to be handled; they come in the order of the nodes."""
        self.kind = message.metadata.message_type
        number = self._block_of(message)
        block = self._blocks.setdefault(number, _Block())
        block.messages[message.metadata.message_id] = message
        block.waiting.append(message)
        self._waiting += 1
        self._of[message.metadata.message_id] = block

    @property
    def count_waiting(self) -> int:
        """How many messages wait that nobody has taken."""
        return self._waiting

    def begin_on(self, host: Host) -> tuple[Message, Held] | None:
        """Return a message of a block that the host has begun, else of a new one."""
        new = None
        for block in itertools.islice(self._blocks.values(), self._most_ahead()):
            if not block.waiting:  # of a lost host's block, all may be on their way back
                continue
            if block.held is None:
                new = new or block
            elif block.held.host == host:
                return self._begun(block, block.held)
        if new is None:
            return None
        new.held = self._new_group(host)
        self._open.add(new.held.group.number)
        return self._begun(new, new.held)

    def again(self, message: Message, *, is_last: bool = False) -> None:
        """Take a message back that was begun and that nobody handles; it is the last of its block."""
        if self.running.pop(message.metadata.message_id, None) is not None and not self._is_closed:
            self._of[message.metadata.message_id].waiting.append(message)
            self._waiting += 1

    def begin_all(self) -> list[Message]:
        """Return all messages that wait."""
        waiting = self._taken_from_waiting(self._of)
        self.running |= {message.metadata.message_id: message for message in waiting}
        return waiting

    def _taken_from_waiting(self, message_ids: Container[str]) -> list[Message]:
        taken: list[Message] = []
        for block in self._blocks.values():
            found, block.waiting = block.waiting, deque[Message]()
            for message in found:
                (taken if message.metadata.message_id in message_ids else block.waiting).append(message)
        self._waiting -= len(taken)
        return taken

    def end(self, message: Message, reply: Message | None) -> None:
        """Have an error in the place of a reply that no host has."""
        super().end(message, reply)
        self._of[message.metadata.message_id].messages.pop(message.metadata.message_id, None)

    def lost(self, host: Host) -> None:
        """Have all that a host held handled again, by whoever begins the block anew."""
        for block in self._blocks.values():
            if block.held is not None and block.held.host == host:
                held, block.held = block.held, None
                self._open.discard(held.group.number)
                self._wait_again(held)

    def done(self, held: Held, message_ids: list[str]) -> None:
        """Take note that the sum of a block is here."""
        super().done(held, message_ids)
        for message_id in message_ids:
            self._of.pop(message_id).messages.pop(message_id, None)

    def is_complete(self, message: Message) -> bool:
        """Tell whether all replies of a message's block are in its group, as far as one can say.

        Of the last block there may be messages that are not sent yet.
        """
        block = self._of.get(message.metadata.message_id)
        is_last = block is next(reversed(self._blocks.values()), None)
        return block is not None and block.is_complete and not is_last

    def to_take(self, *, is_due: bool, is_last: bool) -> list[Held]:
        """Return the group of the first block, if all of it is there."""
        if is_last:
            return [held for held in self.groups if held.messages]
        while self._blocks:
            first, block = next(iter(self._blocks.items()))
            if block.messages:
                break
            del self._blocks[first]  # its sum is here
        else:
            return []
        return [block.held] if block.held is not None and block.is_complete else []

    @property
    def groups(self) -> list[Held]:
        """All groups that hosts may have something of."""
        return [block.held for block in self._blocks.values() if block.held is not None]

    def close(self) -> list[Message]:
        """Want no more replies; return the messages that are being handled."""
        for block in self._blocks.values():
            block.waiting.clear()
        self._waiting = 0
        return super().close()

    def is_current(self, held: Held) -> bool:
        """Tell whether a group counts: its host was not lost."""
        return held.group.number in self._open

    def _begun(self, block: _Block, held: Held) -> tuple[Message, Held]:
        message = block.waiting.popleft()
        self._waiting -= 1
        self.running[message.metadata.message_id] = message
        return message, held
