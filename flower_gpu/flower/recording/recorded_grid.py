"""A grid that notes what is sent through it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import zip_longest
from typing import Any

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flower_gpu.flower.averaging import SummedElsewhere, SummedReplies, in_order_of_sending
from flower_gpu.flower.recording.recorder import NOT_PULLED, Phase, Recorder
from flower_gpu.flower.rounds import replies_to_sum
from flower_gpu.flower.streaming import ComingReplies, Configured


class RecordedGrid(Grid):
    """Passes everything on to a grid of ours, and tells the recorder of messages and replies."""

    def __init__(self, grid: Any, recorder: Recorder) -> None:
        self._grid = grid
        self._recorder = recorder
        self._lock = threading.Lock()
        self._awaited: dict[str, tuple[Phase, int, _Batch]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also where this object is not made yet, as in copy.copy()
            raise AttributeError(name)
        return getattr(self._grid, name)

    @property
    def run(self) -> Run:
        """The run."""
        run: Run = self._grid.run
        return run

    def set_run(self, run: Run) -> None:
        """Take another description of the run."""
        self._grid.set_run(run)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        message: Message = self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)
        return message

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        ids: Iterable[int] = self._grid.get_node_ids()
        return ids

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return all nodes."""
        nodes: Iterable[NodeInfo] = self._grid.get_nodes()
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have messages handled; returns their ids, by which replies can be pulled."""
        self._recorder.check()
        batch = _Batch(self._recorder)
        phases: list[tuple[Phase, int]] = []
        ids = list(self._grid.push_messages(batch.sent(messages, phases)))
        # Flower's own grid has no id for a message that it could not push, and none at all if they are too
        # large together.
        for id_, (phase, node_id) in zip_longest(ids, phases):
            if id_ is None:
                self._recorder.missed(phase, node_id, "the message could not be sent")
                continue
            with self._lock:
                self._awaited[id_] = (phase, node_id, batch)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, once."""
        replies: list[Message] = list(self._grid.pull_messages(message_ids))
        for reply in replies:
            with self._lock:
                found = self._awaited.pop(reply.metadata.reply_to_message_id, None)
            if found is not None:
                phase, node_id, batch = found
                self._recorder.replied(phase, reply, node_id)
                batch.may_be_settled(phase)
        self._recorder.check()
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Have messages handled; returns the replies that came in time, or are to come for a strategy."""
        replies = self.stream(messages, timeout=timeout)
        if not isinstance(messages, Configured):
            return in_order_of_sending(replies)
        return ComingReplies(replies, replies_to_sum(self, messages, timeout, in_order=self.sums_in_order))

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None, in_order: bool = False
    ) -> Generator[Message, None, None]:
        """Have messages handled, and yield each reply when it is there, or in the order of the nodes."""
        self._recorder.check()
        batch = _Batch(self._recorder)
        # Closed with this one: whoever wants no further replies has the grid give up the messages.
        found = self._grid.stream(batch.sent(messages), timeout=timeout, in_order=in_order)
        with closing(found) as replies:
            for reply in replies:
                batch.replied(reply)
                self._recorder.check()
                yield reply
                del reply  # or it stays until the next one is there
        batch.end(_no_reply(timeout))
        self._recorder.check()

    def summed(
        self, messages: Iterable[Message], timeout: float | None, *, in_order: bool
    ) -> SummedElsewhere:
        """Return what sends messages and brings the sums of their replies, where the grid has such."""
        return _RecordedSums(self._grid, self._recorder, messages, timeout, in_order=in_order)

    def resumed(self) -> Any:
        """Return where to go on; None: from the start."""
        state = self._grid.resumed()
        if state is not None:
            self._recorder.run_resumed(state.server_round)
        return state

    def finished_round(self, state: Any) -> None:
        """Note the model and the evaluation on the server, and pass on."""
        metrics = state.evaluate_metrics.get(state.server_round)
        if metrics:
            self._recorder.evaluated(state.server_round, dict(metrics))
        self._recorder.model = state.arrays
        # Last: what is noted of a round with no checkpoint is cut off when the run is resumed.
        self._grid.finished_round(state)

    def close(self) -> None:
        """Tell of the messages that nobody has pulled a reply of, and close the grid."""
        self.give_up(list(self._awaited), NOT_PULLED)
        self._grid.close()

    def give_up(self, message_ids: Iterable[str], why: str) -> None:
        """Tell of those of these messages that have no reply that there will be none."""
        with self._lock:
            left = [found for id_ in message_ids if (found := self._awaited.pop(id_, None)) is not None]
        for phase, node_id, _ in left:
            self._recorder.missed(phase, node_id, why)


class _RecordedSums(SummedElsewhere):
    """Passes sums on, and tells the recorder of their replies."""

    def __init__(
        self,
        grid: Any,
        recorder: Recorder,
        messages: Iterable[Message],
        timeout: float | None,
        *,
        in_order: bool,
    ) -> None:
        super().__init__(messages, timeout, in_order=in_order)
        self._grid = grid
        self._recorder = recorder

    def sums(
        self, weighted_by_key: str, *, keeps_integers: bool
    ) -> Generator[tuple[str, SummedReplies], None, None]:
        """Send the messages, and yield sums of replies."""
        self._recorder.check()
        batch = _Batch(self._recorder)
        to_sum = self._grid.summed(batch.sent(self._messages), self._timeout, in_order=self._in_order)
        with closing(to_sum.sums(weighted_by_key, keeps_integers=keeps_integers)) as sums:
            for source, part in sums:
                for reply in part.rest:
                    batch.replied(reply)
                    self._recorder.check()
                yield source, part
                del part
        batch.end(_no_reply(self._timeout))
        self._recorder.check()


def _no_reply(timeout: float | None) -> str:
    return "no reply" if timeout is None else f"no reply within {timeout:g} s"


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
