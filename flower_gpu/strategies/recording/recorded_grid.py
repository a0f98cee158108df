"""A wrapper around a grid that records its messages and replies.

The recorder has to know for each message in which round it was sent, and how it ended: with a reply, with an
error or without a reply. A grid offers two ways to send messages, and each needs a table of its own:

- ``push_messages`` and ``pull_messages`` return ids, so :class:`RecordedGrid` keeps the pending messages by
  id (``_awaited``). The app may push in one thread and pull in another, so a lock guards the table.
- ``send_and_receive`` and ``sums`` return replies without ids. So a :class:`_Batch` keeps the pending
  messages by node and message type. The grid may read the messages in another thread than the caller who
  reads the replies, so a batch has a lock as well.

The recorder has a lock of its own. It is never called while one of the locks here is held. If it finds that
the run is over, ``Recorder.check`` raises the error in the thread that uses the grid. That happens before a
message is sent and after a reply is recorded.

A pushed message ends when it is removed from its table, under the lock. So it ends once, even if a reply is
pulled while another thread closes the grid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import zip_longest
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flower_gpu.strategies.averaging import SumItem, in_order_of_sending
from flower_gpu.strategies.recording.recorder import NOT_PULLED, Phase, Recorder
from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.resuming.kept_rounds import KeptRounds
from flower_gpu.strategies.rounds import RoundState
from flower_gpu.strategies.streaming import Buffered, ComingReplies, Configured


@Grid.register
class RecordedGrid:
    """A grid that reports messages and replies to the recorder, and otherwise behaves as the wrapped grid.

    ``checkpoints``, ``resumed``: as for :class:`.KeptRounds`.
    """

    def __init__(
        self,
        grid: Any,
        recorder: Recorder,
        checkpoints: Checkpoints | None = None,
        resumed: RoundState | None = None,
    ) -> None:
        self._grid = grid
        self._recorder = recorder
        self._lock = threading.Lock()
        self._awaited: dict[str, tuple[Phase, int, _Batch]] = {}
        #: Records a node's reply to one of :class:`Buffered` messages as part of the current round.
        self.taken = recorder.taken
        #: Returns how errors name a node.
        self.name_of = recorder.name_of
        KeptRounds(checkpoints, resumed, recorder).on(self)

    def __getattr__(self, name: str) -> Any:
        # Without this, copy.copy() would recurse, because its new object has no _grid yet.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids, by which replies can be pulled."""
        self._recorder.check()
        if isinstance(messages, Buffered):
            # These are recorded when their replies are consumed.
            return list(self._grid.push_messages(messages))
        batch = _Batch(self._recorder)
        ids = list(self._grid.push_messages(batch.sent(messages)))
        # Flower's own grid returns None for a message that it could not push (an empty string since flwr
        # 1.43). If the messages together are too large, it returns no ids at all.
        for id_, (phase, node_id) in zip_longest(ids, batch.phases):
            if not id_:
                self._recorder.missed(phase, node_id, "the message could not be sent")
                continue
            with self._lock:
                self._awaited[id_] = (phase, node_id, batch)
        return ids

    def pull_messages(
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the replies that have arrived. Each reply is returned once.

        The parameter is called ``reply_to_message_ids`` in flwr 1.43, and ``message_ids`` in earlier
        versions.
        """
        wanted = reply_to_message_ids if message_ids is None else message_ids
        replies: list[Message] = list(self._grid.pull_messages(wanted))
        for reply in replies:
            with self._lock:
                pending = self._awaited.pop(reply.metadata.reply_to_message_id, None)
            if pending is not None:
                phase, node_id, batch = pending
                self._recorder.replied(phase, reply, node_id)
                batch.may_be_settled(phase)
        self._recorder.check()
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies that arrive in time.

        A strategy with :class:`.Configured` messages gets :class:`.ComingReplies` at once.
        """
        replies = self._recorded(messages, timeout, partial(self._grid.stream, timeout=timeout))
        if not isinstance(messages, Configured):
            return in_order_of_sending(replies)
        return ComingReplies(replies, partial(self.sums, messages, timeout))

    def sums(
        self,
        messages: Iterable[Message],
        timeout: float | None,
        *options: Any,
    ) -> Generator[SumItem, None, None]:
        """Send messages; yield sums of the replies, and each reply without its arrays."""
        return self._recorded(messages, timeout, lambda sent: self._grid.sums(sent, timeout, *options))

    def _recorded(
        self, messages: Iterable[Message], timeout: float | None, send: Callable[[Iterable[Message]], Any]
    ) -> Generator[Any, None, None]:
        """Send messages, and record and yield each reply."""
        self._recorder.check()
        batch = _Batch(self._recorder)
        # A caller that closes this generator also closes the grid's, which then cancels its messages.
        with closing(send(batch.sent(messages))) as items:
            for item in items:
                if isinstance(item, Message):
                    batch.replied(item)
                    self._recorder.check()
                yield item
                del item  # frees its memory before the wait for the next item
        batch.end("no reply" if timeout is None else f"no reply within {timeout:g} s")
        self._recorder.check()

    def close(self) -> None:
        """Record the messages whose replies were never pulled, and close the grid."""
        self.abandon(list(self._awaited), NOT_PULLED)
        self._grid.close()

    def abandon(self, message_ids: Iterable[str], why: str) -> None:
        """Record that these messages get no reply, except messages that are no longer pending."""
        with self._lock:
            entries = (self._awaited.pop(id_, None) for id_ in message_ids)
            pending = [entry for entry in entries if entry is not None]
        for phase, node_id, _ in pending:
            self._recorder.missed(phase, node_id, why)


class _Batch:
    """The messages of a call, which are sent together."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.phases: list[tuple[Phase, int]] = []  # with the node, in the order of sending
        self._awaited: dict[tuple[int, str], list[Phase]] = {}
        self._lock = threading.Lock()  # the grid may read the messages in another thread

    def sent(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield the messages, and record each when the grid reads it."""
        for message in messages:
            node_id, kind = message.metadata.dst_node_id, message.metadata.message_type
            phase = self._recorder.sent(message, self)
            self._recorder.check()
            self.phases.append((phase, node_id))
            with self._lock:
                self._awaited.setdefault((node_id, kind), []).append(phase)
            yield message
            del message

    def replied(self, reply: Message) -> None:
        """Record a reply."""
        node_id, kind = reply.metadata.src_node_id, reply.metadata.message_type
        with self._lock:
            # An app may give its reply another type. Then any pending message to the node counts.
            others = (phases for (node, _), phases in self._awaited.items() if node == node_id and phases)
            waiting = self._awaited.get((node_id, kind)) or next(others, None)
            phase = waiting.pop() if waiting else None
        if phase is not None:
            self._recorder.replied(phase, reply)
            self.may_be_settled(phase)

    def may_be_settled(self, phase: Phase) -> None:
        """Record that a reply has arrived, possibly the last of the batch."""
        # If an app sends to clients one by one, the number of messages is not known.
        if len(self.phases) > 1:
            self._recorder.may_be_settled(phase)

    def end(self, why: str) -> None:
        """Record that no more replies will arrive."""
        for (node_id, _), phases in self._awaited.items():
            for phase in phases:
                self._recorder.missed(phase, node_id, why)
        self._recorder.batch_ended(self)
