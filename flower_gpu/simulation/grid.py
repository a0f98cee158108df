"""Flower's ``Grid`` without a network of SuperNodes: replies come as they are."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from copy import copy
from datetime import UTC, datetime
from logging import WARNING
from typing import Any, Final, cast

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.clientapp.client_app import LoadClientAppError
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
from flower_gpu.errors import (
    ConfigError,
    FlowerGPUError,
    NotDeterministicError,
    RunEndedError,
    WorkerDiedError,
    shortened,
)
from flower_gpu.flower.averaging import BLOCK_NODES, in_order_of_sending
from flower_gpu.flower.rounds import RoundState
from flower_gpu.simulation.boxes import Box, OrderedBox
from flower_gpu.simulation.checkpoint import Checkpoints
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.nodes import VirtualNodes, wanted_nodes
from flower_gpu.trace import NO_REPLY
from flower_gpu.watch.waits import WorkerWaits
from flower_gpu.workers.call_end import traceback_of

# A loop of the app's own that waits for nodes: after so many questions in so many seconds that is logged.
_MANY_QUESTIONS: Final = 5
_LONG_S: Final = 10.0
#: Of such messages the handing over of others takes a part that counts.
SHORT_S: Final = 0.1
# Messages of a round are gathered for so long before workers may take the longest of them: thousands are sent
# in that time, and a generator that is slow keeps nobody waiting.
_GATHER_S: Final = 0.05
WAIT_S: Final = 3600.0  # a condition cannot wait for ever so long
_LOOK_S: Final = 0.25  # between two looks whether messages wait for what others have
_KEY_BYTES: Final = 32  # of a virtual node's public key, which nobody signs with
_UNAVAILABLE: Final = {
    ErrorCode.MESSAGE_UNAVAILABLE: f"{NO_REPLY}: the message's ttl is over, its reply was pulled before, or "
    "it was never sent",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: f"{NO_REPLY}: it has expired",
}


class CallError(Error):
    """An error in the place of a reply's content, with the traceback of the call that failed.

    ``code``, ``reason``: as for Flower's ``Error``.
    ``traceback``: the worker's; empty where there is none.
    ``ends_run``: what the run is to be ended with.
    """

    def __init__(self, code: int, reason: str, traceback: str, ends_run: RunEndedError | None = None) -> None:
        super().__init__(code, reason)
        self.traceback = traceback
        self.ends_run = ends_run


class NoSuchNodeError(FlowerGPUError):
    """A message is to a node that does not exist."""


class SimulationGrid(Grid):
    """Messages of a run and their replies, in boxes. Who handles them is a subclass's matter.

    ``run``: the run that messages are of.
    ``nodes``: who can be sent something.
    ``checkpoints``: where finished rounds are kept.
    ``resumed``: where the run goes on.
    ``sums_in_order``: whether replies that are to be summed come in the order of the nodes.
    ``durations``: what messages are expected to take: those that are sent together are handled from the
    longest to the shortest. Without it in the order of sending.
    ``is_strict``: whether messages that are not done in time end the run.
    """

    def __init__(
        self,
        run: Run,
        nodes: VirtualNodes,
        *,
        checkpoints: Checkpoints | None = None,
        resumed: RoundState | None = None,
        sums_in_order: bool = False,
        durations: Durations | None = None,
        is_strict: bool = False,
    ) -> None:
        self._is_strict = is_strict
        self.sums_in_order = sums_in_order
        self._run = run
        self._nodes = nodes
        self._durations = durations
        self._checkpoints = checkpoints
        self._resumed = resumed
        #: The SuperLink's side, as Flower's grids have it.
        self.node = Node(node_id=SUPERLINK_NODE_ID)
        self._began_at = time.time()
        self._starts = 0
        self._app_thread = threading.get_ident()
        #: Gets the events of a run that waits for what others have.
        self.tell: Callable[..., Any] = trace.make
        self._waits = WorkerWaits(lambda name, **fields: self.tell(name, **fields))
        self._asked = 0  # for the nodes, since the last message
        self._asked_at = 0.0
        self._has_warned = False
        self._changed = threading.Condition()
        self._waiting: list[Box] = []  # with messages that nobody has taken, in the order of their sending
        self._numbers = itertools.count(1)
        self._boxes: dict[str, Box] = {}
        self._is_closed = False
        # In a stream so many replies may be there that nobody has taken: else workers that are faster than
        # the aggregation would fill the memory.
        self._most_unread = 0
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def cancel(self, message: Message) -> None:
        """End the handling of a message, whose reply nobody wants."""

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so, or not known."""
        return None

    def _start_threads(self, threads: Iterable[threading.Thread]) -> None:
        """Start threads that end when this is closed."""
        for thread in threads:
            self._threads.append(thread)
            thread.start()

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
        """Return the ids of all nodes.

        Raises ConfigError if Flower asks for whoever waits for more nodes than there are: it would ask for
        ever.
        """
        count, wanted = len(self._nodes.ids), wanted_nodes()
        if wanted is not None and wanted > count:
            raise ConfigError(
                f"the ServerApp waits for {wanted} nodes, and there are {count}: raise the number of "
                "SuperNodes, or lower what the strategy asks for (min_available_nodes, min_train_nodes)"
            )
        if threading.get_ident() == self._app_thread and not self._boxes:
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
                    count,
                )
        return list(self._nodes.ids)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have messages handled; returns their ids, by which replies can be pulled."""
        box = Box(self._changed)
        return list(self._send(messages, box))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, once; for a message that nobody knows (any more), an error."""
        boxes = {message_id: self._boxes.get(message_id) for message_id in message_ids}
        for each in set(boxes.values()) - {None}:
            self._expire(cast(Box, each))
        self._clock()
        found = []
        with self._changed:
            for message_id, box in boxes.items():
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
        """Return Flower's answer to who pulls what has expired, or was pulled before, or never was."""
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
        return in_order_of_sending(self._stream(messages, timeout, Box(self._changed)))

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None, in_order: bool = False
    ) -> Generator[Message, None, None]:
        """Have messages handled, and yield each reply when it is there.

        ``in_order`` handles messages and yields replies in the order of the nodes' partitions. Messages that
        are not done at the end of ``timeout`` seconds, or when nobody wants further replies, are given up.
        """
        if in_order:
            messages = sorted(
                messages, key=lambda message: self._nodes.place_of(message.metadata.dst_node_id)
            )
        box = (OrderedBox if in_order else Box)(self._changed, self._most_unread)
        return self._stream(messages, timeout, box)

    def block_of(self, node_id: int) -> int:
        """Return the block of consecutive nodes whose replies are summed together."""
        return self._nodes.place_of(node_id) // BLOCK_NODES

    def resumed(self) -> RoundState | None:
        """Return where the run goes on; None: at its start.

        An app that has its strategy start once more begins anew there, and has no checkpoints of that.
        """
        self._starts += 1
        return self._resumed if self._starts == 1 else None

    def finished_round(self, state: RoundState) -> None:
        """Keep what a run is after a round."""
        if self._checkpoints is not None and self._starts <= 1 and state.strategy_state is not None:
            self._checkpoints.write(state)

    def close(self) -> None:
        """Give up what is not done, and end the threads."""
        if self._is_closed:
            return
        self._is_closed = True
        for box in set(self._boxes.values()):
            self._give_up(box)
        self._waits.look(None, time.monotonic(), ())
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _stream(
        self, messages: Iterable[Message], timeout: float | None, box: Box
    ) -> Generator[Message, None, None]:
        deadline = math.inf if timeout is None else self._clock() + timeout
        ids = set()
        try:
            for message_id in self._send(messages, box):
                ids.add(message_id)
            while ids:
                reply = self._next(box, deadline)
                if reply is None and self._is_strict:
                    raise NotDeterministicError(late_text(len(ids), timeout))
                if reply is None:
                    return
                ids.discard(reply.metadata.reply_to_message_id)
                self._boxes.pop(reply.metadata.reply_to_message_id, None)
                yield reply
                del reply  # or it would stay until the next one is there
        finally:
            for message_id in ids:
                self._boxes.pop(message_id, None)
            if ids:
                self._give_up(box)

    def _next(self, box: Box, deadline: float) -> Message | None:
        """Wait for the next reply; None where there is none at the deadline."""
        while True:
            self._expire(box)
            left_s = deadline - self._clock()
            with self._changed:
                if left_s <= 0:
                    box.leave_out_late()
                    return box.next(0)
                reply = box.next(min(box.expires_s - time.monotonic(), left_s, _LOOK_S))
            if reply is not None:
                return reply

    def _clock(self) -> float:
        """Return the time that counts for limits of replies: it stands while no message can get a worker."""
        waited_s = self._waits.look(self.stuck_since(), time.monotonic(), (os.getpid(),))
        return time.monotonic() - waited_s

    def _expire(self, box: Box) -> None:
        """Answer messages whose ttl is over with an error, and end their handling."""
        with self._changed:
            over, running = box.expire()
            if box in self._waiting and not box.has_waiting:
                self._waiting.remove(box)
            for message in over:
                box.end(message, expired(message))
        for message in running:
            self.cancel(message)
        if self._is_strict and (over or running):
            raise NotDeterministicError(
                f"{len({*over, *running})} messages were not done within their ttl, which depends on this "
                "machine's load: give them a longer one"
            )

    def _send(self, messages: Iterable[Message], box: Box) -> Iterator[str]:
        """Put messages into a box, for the threads to take; yields their ids."""
        durations = self._durations
        if durations is None or durations.is_empty or not box.has_any_order:
            durations = None
        gathered: list[Message] = []
        since = time.monotonic()
        for message in messages:
            message = self._named(message, box)
            gathered.append(message)
            yield message.metadata.message_id
            del message
            if durations is None or time.monotonic() - since > _GATHER_S:
                self._push(gathered, box, durations)
                since = time.monotonic()
        self._push(gathered, box, durations)

    def _named(self, message: Message, box: Box) -> Message:
        """Give a message its id, by which its box is found."""
        if message.metadata.ttl <= 0 or message.metadata.reply_to_message_id:
            raise ValueError(f"Invalid message: {message}")  # as Flower's own
        self._asked = 0
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
            partitions = (self._nodes.find(message.metadata.dst_node_id) for message in messages)
            kinds = (message.metadata.message_type for message in messages)
            expected_s = durations.expected_s(list(zip(kinds, partitions, strict=True)))
        with self._changed:
            if messages and not box.has_waiting:
                self._waiting.append(box)
            for message, seconds in zip(messages, expected_s, strict=True):
                box.push(message, seconds)
                box.limit(message)
            self._changed.notify_all()
        messages.clear()

    def _give_up(self, box: Box) -> None:
        with self._changed:
            running = box.close()
            if box in self._waiting:
                self._waiting.remove(box)
            self._changed.notify_all()
        for message in running:
            self.cancel(message)

    def check_node(self, message: Message) -> None:
        """Check that a message is to one of the nodes.

        Raises NoSuchNodeError if it is not.
        """
        node_id = message.metadata.dst_node_id
        if node_id not in self._nodes:
            raise NoSuchNodeError(f"there is no node {node_id}")


def expired(message: Message) -> Message:
    """Return the answer to a message whose ttl is over."""
    return Message(expired_error(), reply_to=message)


def expired_error() -> CallError:
    """Return what stands in the place of a reply that did not come within the message's ttl."""
    return CallError(ErrorCode.MESSAGE_UNAVAILABLE, f"{NO_REPLY} within the message's ttl", "")


def late_text(count: int, timeout: float | None) -> str:
    """Return why a deterministic run ends in which so many messages are late."""
    return (
        f"{count} messages were not done within {timeout:g} s, which depends on this machine's load: "
        "give the strategy's start() a longer timeout"
    )


def reply_of(handle: Callable[[Message], Message], message: Message) -> Message:
    """Return the reply to a message; what is raised becomes an error in its place."""
    try:
        return handle(message)
    except BaseException as error:  # a SystemExit is the client's, not this thread's
        text = str(error) or type(error).__name__
        ends_run = error if isinstance(error, RunEndedError) else None
        return Message(
            CallError(_code(error), shortened(text), traceback_of(error), ends_run), reply_to=message
        )


def _code(error: BaseException) -> int:
    if isinstance(error, NoSuchNodeError):
        return ErrorCode.NODE_UNAVAILABLE
    if isinstance(error, LoadClientAppError):
        return ErrorCode.LOAD_CLIENT_APP_EXCEPTION
    if isinstance(error, WorkerDiedError):
        return ErrorCode.CLIENT_APP_CRASHED
    return ErrorCode.CLIENT_APP_RAISED_EXCEPTION
