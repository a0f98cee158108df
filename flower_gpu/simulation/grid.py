"""Flower's ``Grid`` without a network of SuperNodes: messages are in boxes, and hosts handle them."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from datetime import UTC, datetime
from logging import WARNING
from typing import Any, Final, cast

from flwr.app import DEFAULT_TTL, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import (
    HEARTBEAT_INTERVAL_INF,
    HEARTBEAT_PATIENCE,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    ErrorCode,
)
from flwr.common.logger import log
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE, NodeStatus
from flwr.supercore.run import Run

from flower_gpu import trace
from flower_gpu.errors import ConfigError, NotDeterministicError
from flower_gpu.flower.averaging import BLOCK_NODES, SumItem, in_order_of_sending
from flower_gpu.flower.streaming import Buffered
from flower_gpu.simulation.boxes import BlockBox, Box, Job, PulledBox, SumBox
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.host import SumGroup
from flower_gpu.simulation.nodes import VirtualNodes, asked_round, wanted_nodes
from flower_gpu.trace import NO_REPLY
from flower_gpu.watch.waits import WorkerWaits

# A loop of the app's own that waits for nodes: after so many questions in so many seconds that is logged.
_MANY_QUESTIONS: Final = 5
_LONG_S: Final = 10.0
# Messages of a round are gathered for so long before workers may take the longest of them: thousands are sent
# in that time, and a generator that is slow keeps nobody waiting.
_GATHER_S: Final = 0.05
_TAKE_S: Final = 10.0  # between two times that sums are fetched: what is lost with a host is younger
_TAKE_SHARE: Final = 0.05  # of the time may be spent on that
_LOOK_S: Final = 0.25  # between two looks whether messages wait for what others have
# The ttl of messages whose app gives none. Flower's is 12 hours, and goes on while a run waits for leases.
_UNLIMITED_S: Final = 365 * 86400.0
_KEY_BYTES: Final = 32  # of a virtual node's public key, which nobody signs with
# Since flwr 1.43 a ServerApp may reply to a client's message. Before, Flower's grid refused such a message.
_CAN_SEND_REPLIES: Final = "reply_to_message_ids" in inspect.signature(Grid.pull_messages).parameters
_UNAVAILABLE: Final = {
    ErrorCode.MESSAGE_UNAVAILABLE: f"{NO_REPLY}: the message's ttl is over, its reply was pulled before, or "
    "it was never sent",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: f"{NO_REPLY}: it has expired",
}


class SimulationGrid(Grid):
    """Messages of a run and their replies, in boxes.

    ``run``: the run that messages are of.
    ``dispatcher``: hands messages to hosts.
    ``durations``: what messages are expected to take: those that are sent together are handled from the
    longest to the shortest. Without it in the order of sending.
    ``sums_in_order``: whether replies are always summed in the order of the nodes.
    ``is_strict``: whether messages that are not done in time end the run.
    """

    def __init__(
        self,
        run: Run,
        dispatcher: Dispatcher,
        *,
        durations: Durations | None = None,
        sums_in_order: bool = False,
        is_strict: bool = False,
    ) -> None:
        self._run = run
        self._dispatcher = dispatcher
        self._changed = dispatcher.changed
        self._nodes: VirtualNodes = dispatcher.nodes
        self._durations = durations
        #: Whether replies are always summed in an order that does not depend on who is done first.
        self.sums_in_order = sums_in_order
        self._is_strict = is_strict
        self._there: Sequence[int] = self._nodes.ids  # as it was told last
        self._sent = 0  # how often messages were sent
        #: The SuperLink's side, as Flower's grids have it.
        self.node = Node(node_id=SUPERLINK_NODE_ID)
        self._began_at = time.time()
        self._app_thread = threading.get_ident()
        #: Gets the events of a run that waits for what others have.
        self.tell: Callable[..., Any] = trace.make
        self._waits = WorkerWaits(lambda name, **fields: self.tell(name, **fields))
        self._asked = 0  # for the nodes, since the last message
        self._asked_at = 0.0
        self._has_warned = False
        self._numbers = itertools.count(1)
        self._group_numbers = itertools.count(1)
        self._boxes: dict[str, Box] = {}
        self._is_closed = False

    @property
    def run(self) -> Run:
        """The run."""
        return Run(**vars(self._run))

    def set_run(self, run: Run) -> None:
        """Take another description of the run."""
        if not isinstance(run, Run):
            raise TypeError(f"`run` must be an instance of Run, got {type(run).__name__}")
        self._run = run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return all nodes, with what Flower's Simulation Runtime tells of its own."""
        registered_at = datetime.fromtimestamp(self._began_at, UTC).isoformat()
        return [
            NodeInfo(
                node_id=node_id,
                owner_aid=NOOP_FLWR_AID,
                owner_name=NOOP_ACCOUNT_NAME,
                status=NodeStatus.ONLINE,
                registered_at=registered_at,
                last_activated_at=registered_at,
                online_until=self._began_at + HEARTBEAT_PATIENCE * HEARTBEAT_INTERVAL_INF,
                heartbeat_interval=HEARTBEAT_INTERVAL_INF,
                public_key=node_id.to_bytes(_KEY_BYTES, "big"),
            )
            for node_id in self.get_node_ids()
        ]

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are there in this round.

        Raises ConfigError if Flower asks for whoever waits for more nodes than there are: it would ask for
        ever.
        """
        count, wanted = len(self._nodes.ids), wanted_nodes()
        if wanted is not None and wanted > count:
            raise ConfigError(
                f"the ServerApp waits for {wanted} nodes, and there are {count}: raise the number of "
                "SuperNodes, or lower the strategy's min_available_nodes, min_train_nodes or concurrency"
            )
        is_app = threading.get_ident() == self._app_thread
        if self._nodes.come_and_go and is_app:
            number = asked_round()
            place = f"message set {self._sent + 1}" if number is None else f"round {number}"
            self._there = self._nodes.there(place, wanted)
        if is_app and not self._boxes:
            self._asked += 1
            if self._asked == 1:
                self._asked_at = time.monotonic()
            seconds = time.monotonic() - self._asked_at
            if self._asked >= _MANY_QUESTIONS and seconds > _LONG_S and not self._has_warned:
                self._has_warned = True
                log(
                    WARNING,
                    "The ServerApp has asked for the nodes %d times in %.0f s and has sent no message. "
                    "There are %d nodes, and there will be no more",
                    self._asked,
                    seconds,
                    len(self._there),
                )
        return list(self._there)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have messages handled; returns their ids, by which replies can be pulled."""
        box = PulledBox(self._changed) if isinstance(messages, Buffered) else Box(self._changed)
        return list(self._send(messages, box))

    def wait_for_replies(self, message_ids: Sequence[str], timeout_s: float) -> Sequence[str]:
        """Wait for a reply to messages of FedBuff; returns the ids of those that have one."""
        boxes = {message_id: cast(PulledBox, self._boxes[message_id]) for message_id in message_ids}
        for box in set(boxes.values()):
            self._expire(box)

        def here() -> list[str]:
            return [one for one, box in boxes.items() if box.has_reply(one)]

        with self._changed:
            return self._changed.wait_for(here, timeout_s)

    def cancel_messages(self, message_ids: Iterable[str]) -> None:
        """Cancel messages that were pushed, and end their handling; others that were sent with them go on."""
        ids_by_box: dict[Box, list[str]] = {}
        for message_id in message_ids:
            if (box := self._boxes.pop(message_id, None)) is not None:
                ids_by_box.setdefault(box, []).append(message_id)
        with self._changed:
            running = [job for box, ids in ids_by_box.items() for job in box.cancel(ids)]
        self._dispatcher.cancel(running)

    def slow_down_of(self, node_id: int) -> float:
        """Return by what factor a node is slower than this machine."""
        slow_down: float = self._nodes.own(node_id).get("slow_down", 1.0)
        return slow_down

    def pull_messages(  # type: ignore[override] # the parameter has this name since flwr 1.43
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the replies that have arrived, each once, and an error for a message that is not known.

        ``reply_to_message_ids``: ids of the messages, by default of all that are pending. This parameter is
        called ``message_ids`` up to flwr 1.42.
        """
        wanted = reply_to_message_ids if message_ids is None else message_ids
        if wanted is None:
            wanted = list(self._boxes)
        boxes = {message_id: self._boxes.get(message_id) for message_id in wanted}
        for each in set(boxes.values()) - {None}:
            self._expire(cast(Box, each))
        self.clock()
        found = []
        with self._changed:
            for message_id, box in boxes.items():
                if isinstance(box, PulledBox) and message_id in box.held:
                    self._dispatcher.count(*box.held.pop(message_id))
                reply = None if box is None else box.replies.pop(message_id, None)
                if box is None or message_id in box.expired:
                    reply = self._unavailable(message_id, ErrorCode.MESSAGE_UNAVAILABLE)
                elif reply is None:
                    continue
                elif reply.metadata.created_at + reply.metadata.ttl <= time.time():  # its own, from the app
                    reply = self._unavailable(message_id, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
                self._boxes.pop(message_id, None)
                found.append(reply)
        return found

    def _unavailable(self, message_id: str, code: int) -> Message:
        """Return Flower's error for a reply that has expired, was pulled before, or never was there."""
        metadata = Metadata(
            run_id=self._run.run_id,
            message_id=f"{message_id}-reply",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=SUPERLINK_NODE_ID,
            reply_to_message_id=message_id,
            group_id="",
            created_at=time.time(),
            ttl=0,
            message_type=SYSTEM_MESSAGE_TYPE,
        )
        return make_message(metadata=metadata, error=Error(code, _UNAVAILABLE[code]))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Have messages handled; returns the replies that came in time, in the order of sending."""
        return in_order_of_sending(self._handled(messages, timeout, Box(self._changed)))

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Generator[Message, None, None]:
        """Have messages handled, and yield each reply when it is there.

        Messages that are not done at the end of ``timeout`` seconds, or when nobody wants further replies,
        are given up.
        """
        return self._handled(messages, timeout, Box(self._changed, self._dispatcher.most_unread))

    def sums(
        self,
        messages: Iterable[Message],
        timeout: float | None,
        weighted_by_key: str,
        keeps_integers: bool,
        in_order: bool,
    ) -> Generator[SumItem, None, None]:
        """Have messages handled and their replies summed by hosts; yields sums, and replies without arrays.

        ``in_order`` has them handled and summed in the order of the nodes' partitions, a block of consecutive
        nodes at a time.
        """

        def new_group() -> SumGroup:
            return SumGroup(next(self._group_numbers), weighted_by_key, keeps_integers)

        if not (in_order or self.sums_in_order):
            return self._handled(messages, timeout, SumBox(self._changed, new_group))

        def place_of(message: Message) -> int:
            return self._nodes.place_of(message.metadata.dst_node_id)

        def block_of(message: Message) -> int:
            return place_of(message) // BLOCK_NODES

        box = BlockBox(self._changed, new_group, block_of, self._most_blocks)
        return self._handled(sorted(messages, key=place_of), timeout, box)

    def _most_blocks(self) -> int:
        """Return how many blocks may be under way, whatever memory they take."""
        hosts = self._dispatcher
        return 2 * (len(hosts.hosts) + hosts.concurrency // BLOCK_NODES + 1)

    def close(self) -> None:
        """Give up unfinished messages, and hand out no more."""
        if self._is_closed:
            return
        self._is_closed = True
        for box in set(self._boxes.values()):
            self._give_up(box)
        self._waits.look(None, time.monotonic(), ())
        self._dispatcher.close()

    def _handled(
        self, messages: Iterable[Message], timeout: float | None, box: Box
    ) -> Generator[Any, None, None]:
        """Have messages handled; yield what comes into their box."""
        deadline = math.inf if timeout is None else self.clock() + timeout
        ids: list[str] = []
        try:
            for message_id in self._send(messages, box):
                ids.append(message_id)
            with closing(self._coming(box, deadline)) as coming:
                yield from coming
            if box.left and self._is_strict:
                raise NotDeterministicError(_late_text(box.left, timeout))
        finally:
            for message_id in ids:
                self._boxes.pop(message_id, None)
            self._give_up(box)

    def _coming(self, box: Box, deadline: float) -> Generator[SumItem, None, None]:
        """Yield replies until all are there, or the deadline is over."""
        asked_at = time.monotonic()
        taking_s, is_late, is_over = 0.0, False, False
        while not is_over:
            self._expire(box)
            left_s = deadline - self.clock()
            with self._changed:
                if left_s <= 0 and not is_late:
                    is_late, deadline = True, math.inf
                    box.stop()
                now = time.monotonic()
                asked = box.to_ask(is_due=now >= asked_at + max(_TAKE_S, taking_s / _TAKE_SHARE))
                if not (asked or box.has_some or box.is_over):
                    self._changed.wait(max(0.0, min(box.expires_s - now, deadline - self.clock(), _LOOK_S)))
                is_over, error, items = box.is_over and not asked, box.error, box.take()
            for held in asked:
                asked_at = now
                held.host.ask_for_sum(held.group.number)
            if error is not None:
                raise error
            began = time.monotonic()
            while items:
                yield items.pop(0)  # kept nowhere: it must be gone before the next one is here
            taking_s = max(taking_s, time.monotonic() - began)

    def clock(self) -> float:
        """Return seconds for limits of replies; the clock stands still while no message can get a worker."""
        since = self._dispatcher.stuck_since()
        return time.monotonic() - self._waits.look(since, time.monotonic(), (os.getpid(),))

    def _expire(self, box: Box) -> None:
        """Answer messages whose ttl is over with an error, and end their handling."""
        with self._changed:
            count, running = box.expire()
        self._dispatcher.cancel(running)
        if count and self._is_strict:
            raise NotDeterministicError(
                f"{count} messages were not done within their ttl, which depends on this machine's load: "
                "give them a longer one"
            )

    def _send(self, messages: Iterable[Message], box: Box) -> Iterator[str]:
        """Put messages into a box, for the threads to take; yields their ids."""
        self._sent += 1
        durations = None if self._durations is None or self._durations.is_empty else self._durations
        gather_s = 0.0 if durations is None else _GATHER_S
        if isinstance(box, BlockBox):
            durations, gather_s = None, math.inf
        gathered: list[Message] = []
        since = time.monotonic()
        for message in messages:
            message = self._named(message, box)
            gathered.append(message)
            yield message.metadata.message_id
            del message
            if time.monotonic() - since >= gather_s:
                self._push(gathered, box, durations)
                since = time.monotonic()
        self._push(gathered, box, durations)

    def _named(self, message: Message, box: Box) -> Message:
        """Give a message its id, by which its box is found."""
        is_reply = bool(message.metadata.reply_to_message_id)
        if message.metadata.ttl <= 0 or (is_reply and not _CAN_SEND_REPLIES):
            raise ValueError(f"Invalid message: {message}")  # as Flower's own
        self._asked = 0
        if message.metadata.ttl == DEFAULT_TTL:
            message.metadata.ttl = _UNLIMITED_S
        if message.metadata.message_id in self._boxes:  # the same object once more
            metadata = copy(message.metadata)
            message = copy(message)
            message.__dict__["_metadata"] = metadata
        # An own number each: Flower's id is a hash of the content, which all messages of a round share.
        message_id = f"{self._run.run_id:x}-{next(self._numbers)}"
        message.metadata.__dict__["_message_id"] = message_id
        self._boxes[message_id] = box
        return message

    def _push(self, messages: list[Message], box: Box, durations: Durations | None) -> None:
        """Put messages into a box, and empty the list."""
        expected_s = [0.0] * len(messages)
        if durations is not None:
            partitions = (self._nodes.place_of(message.metadata.dst_node_id) for message in messages)
            kinds = (message.metadata.message_type for message in messages)
            expected_s = durations.expected_s(list(zip(kinds, partitions, strict=True)))
        with self._changed:
            for message, seconds in zip(messages, expected_s, strict=True):
                box.push(message, seconds)
            self._dispatcher.add(box)
        messages.clear()

    def _give_up(self, box: Box) -> None:
        with self._changed:
            running: list[Job] = box.close()
            groups = box.groups.values() if isinstance(box, SumBox) else ()
            self._dispatcher.remove(box)
        self._dispatcher.cancel(running)
        for held in groups:
            if not held.host.is_gone:
                held.host.forget([held.group.number])


def _late_text(count: int, timeout: float | None) -> str:
    """Return why a deterministic run ends in which so many messages are late."""
    return (
        f"{count} messages were not done within {timeout:g} s, which depends on this machine's load: "
        "give the strategy's start() a longer timeout"
    )
