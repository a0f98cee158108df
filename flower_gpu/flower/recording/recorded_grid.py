"""A grid that records its messages and replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import zip_longest
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flower_gpu.flower.averaging import SumItem, in_order_of_sending
from flower_gpu.flower.recording.recorder import NOT_PULLED, Phase, Recorder
from flower_gpu.flower.resuming.checkpoint import Checkpoints
from flower_gpu.flower.resuming.kept_rounds import KeptRounds
from flower_gpu.flower.rounds import RoundState
from flower_gpu.flower.streaming import Buffered, ComingReplies, Configured


@Grid.register
class RecordedGrid:
    """Tells the recorder of messages and replies; in all else it is the grid that it passes them on to.

    ``checkpoints``, ``resumed``: as :class:`.KeptRounds` has them.
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
        KeptRounds(checkpoints, resumed, recorder).on(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also where this object is not made yet, as in copy.copy()
            raise AttributeError(name)
        return getattr(self._grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have messages handled; returns their ids, by which replies can be pulled."""
        self._recorder.check()
        if isinstance(messages, Buffered):
            return list(self._grid.push_messages(messages))  # recorded when their replies are taken
        batch = _Batch(self._recorder)
        phases: list[tuple[Phase, int]] = []
        ids = list(self._grid.push_messages(batch.sent(messages, phases)))
        # Flower's own grid returns None for a message that it could not push (an empty text since flwr 1.43),
        # and no ids at all if the messages are too large together.
        for id_, (phase, node_id) in zip_longest(ids, phases):
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
        """Return the replies that have arrived, each once.

        The parameter's name is that of flwr 1.43, or ``message_ids`` as in earlier versions.
        """
        wanted = reply_to_message_ids if message_ids is None else message_ids
        replies: list[Message] = list(self._grid.pull_messages(wanted))
        for reply in replies:
            with self._lock:
                found = self._awaited.pop(reply.metadata.reply_to_message_id, None)
            if found is not None:
                phase, node_id, batch = found
                self._recorder.replied(phase, reply, node_id)
                batch.may_be_settled(phase)
        self._recorder.check()
        return replies

    def taken(self, reply: Message, node_id: int) -> None:
        """Note that a node's reply to one of :class:`Buffered` messages is of the round that is open now."""
        self._recorder.taken(reply, node_id)

    def name_of(self, node_id: int) -> str:
        """Return how errors name a node."""
        return self._recorder.name_of(node_id)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Have messages handled; returns the replies that came in time, or are to come for a strategy."""
        replies = self._recorded(messages, timeout, partial(self._grid.stream, timeout=timeout))
        if not isinstance(messages, Configured):
            return in_order_of_sending(replies)
        return ComingReplies(replies, partial(self.sums, messages, timeout))

    def sums(
        self,
        messages: Iterable[Message],
        timeout: float | None,
        *how: Any,
    ) -> Generator[SumItem, None, None]:
        """Have messages handled, and yield sums of the replies, and the rest of each reply."""
        return self._recorded(messages, timeout, lambda sent: self._grid.sums(sent, timeout, *how))

    def _recorded(
        self, messages: Iterable[Message], timeout: float | None, send: Callable[[Iterable[Message]], Any]
    ) -> Generator[Any, None, None]:
        """Send messages, yield replies, and record each of them."""
        self._recorder.check()
        batch = _Batch(self._recorder)
        # Closed with this one: whoever wants no further replies has the grid give up the messages.
        with closing(send(batch.sent(messages))) as found:
            for item in found:
                if isinstance(item, Message):
                    batch.replied(item)
                    self._recorder.check()
                yield item
                del item  # or it stays until the next one is there
        batch.end("no reply" if timeout is None else f"no reply within {timeout:g} s")
        self._recorder.check()

    def close(self) -> None:
        """Tell of the messages that nobody has pulled a reply of, and close the grid."""
        self.give_up(list(self._awaited), NOT_PULLED)
        self._grid.close()

    def give_up(self, message_ids: Iterable[str], why: str) -> None:
        """Record for each of these messages without a reply that there will be none."""
        with self._lock:
            left = [found for id_ in message_ids if (found := self._awaited.pop(id_, None)) is not None]
        for phase, node_id, _ in left:
            self._recorder.missed(phase, node_id, why)


class _Batch:
    """Messages that are sent together."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._count = 0
        self._awaited: dict[tuple[int, str], list[Phase]] = {}
        self._lock = threading.Lock()  # a grid may take messages in another thread

    def sent(
        self, messages: Iterable[Message], phases: list[tuple[Phase, int]] | None = None
    ) -> Iterator[Message]:
        """Note each message when the grid takes it."""
        for message in messages:
            node_id, kind = message.metadata.dst_node_id, message.metadata.message_type
            phase = self._recorder.sent(message, self)
            self._recorder.check()
            self._count += 1
            if phases is None:
                with self._lock:
                    self._awaited.setdefault((node_id, kind), []).append(phase)
            else:
                phases.append((phase, node_id))
            yield message
            del message

    def replied(self, reply: Message) -> None:
        """Note a reply."""
        node_id, kind = reply.metadata.src_node_id, reply.metadata.message_type
        with self._lock:
            # An app may give its reply another type.
            others = (phases for (node, _), phases in self._awaited.items() if node == node_id and phases)
            waiting = self._awaited.get((node_id, kind)) or next(others, None)
            phase = waiting.pop() if waiting else None
        if phase is not None:
            self._recorder.replied(phase, reply)
            self.may_be_settled(phase)

    def may_be_settled(self, phase: Phase) -> None:
        """Note that a reply is there, and maybe all of them."""
        # To one client after the other, nobody can tell how many there will be.
        if self._count > 1:
            self._recorder.may_be_settled(phase)

    def end(self, why: str) -> None:
        """Note that no more replies come."""
        for (node_id, _), phases in self._awaited.items():
            for phase in phases:
                self._recorder.missed(phase, node_id, why)
        self._recorder.batch_ended(self)
