"""Flower's ``Grid`` without a network of SuperNodes. Messages are in sets, and hosts handle them.

The ServerApp's thread calls the methods. Other threads may ask for the nodes, and get the latest answer
again. The dispatcher's threads change the sets meanwhile, so methods of sets are called with ``_changed``
held, the dispatcher's condition. :meth:`SimulationGrid._arriving` waits on it for replies.
``pending_messages`` explains the states of a message, ``dispatcher`` the threads.
"""

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
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.host import SumGroup
from flower_gpu.simulation.nodes import VirtualNodes, asked_round, wanted_nodes
from flower_gpu.simulation.pending_messages import Job, NodeBlocks, PendingMessages
from flower_gpu.strategies.averaging import BLOCK_NODES, SumItem, in_order_of_sending
from flower_gpu.strategies.streaming import Buffered
from flower_gpu.trace import NO_REPLY
from flower_gpu.watch.waits import WorkerWaits

# An app may have its own loop that waits for more nodes, which would be endless. A warning is logged after
# this many calls in this many seconds.
_MANY_QUESTIONS: Final = 5
_LONG_S: Final = 10.0
# Seconds in which messages of a round are gathered before workers may begin the longest of them. Thousands of
# messages are sent in that time, and a slow generator does not keep workers waiting.
_GATHER_S: Final = 0.05
# Seconds between two fetches of sums. The replies that are lost with a host are younger than this.
_TAKE_S: Final = 10.0
# Maximum share of the time for fetching sums.
_TAKE_SHARE: Final = 0.05
# Seconds between two checks of whether messages wait for resources that other programs have.
_LOOK_S: Final = 0.25
# Default ttl of messages. Flower's default is 12 hours, and runs while a run waits for
# leases.
_UNLIMITED_S: Final = 365 * 86400.0
# Size of a virtual node's public key. It is never used for signatures.
_KEY_BYTES: Final = 32
# Since flwr 1.43, a ServerApp may reply to a client's message. Before, Flower's grid refused such a message.
_CAN_SEND_REPLIES: Final = "reply_to_message_ids" in inspect.signature(Grid.pull_messages).parameters
_UNAVAILABLE: Final = {
    ErrorCode.MESSAGE_UNAVAILABLE: f"{NO_REPLY}: the message's ttl is over, its reply was pulled before, or "
    "it was never sent",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: f"{NO_REPLY}: it has expired",
}


class SimulationGrid(Grid):
    """The grid of a simulated run. It keeps messages and replies in sets.

    ``run``: the run that sends the messages.
    ``dispatcher``: assigns messages to hosts.
    ``durations``: estimates of the durations of calls. Messages that are sent together are handled from the
    longest to the shortest. Without it, they are handled in the order of sending.
    ``sums_in_order``: True if replies are always summed in the order of the nodes.
    ``is_strict``: True if late messages end the run.
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
        #: True if the order of summation never depends on which client finishes first.
        self.sums_in_order = sums_in_order
        self._is_strict = is_strict
        self._available_nodes: Sequence[int] = self._nodes.ids  # the latest answer to the app
        self._sent = 0  # number of message sets sent
        #: The SuperLink as a node, as in Flower's grids.
        self.node = Node(node_id=SUPERLINK_NODE_ID)
        self._began_at = time.time()
        self._app_thread = threading.get_ident()
        #: Receives the events of a run that waits for resources that other programs have.
        self.tell: Callable[..., Any] = trace.make
        self._waits = WorkerWaits(lambda name, **fields: self.tell(name, **fields))
        # Number of times that the app asked for the nodes since the last message, and the time of the first
        self._node_queries = 0
        self._first_query_at = 0.0
        self._has_warned = False
        self._numbers = itertools.count(1)
        self._group_numbers = itertools.count(1)
        self._sets: dict[str, PendingMessages] = {}
        self._is_closed = False

    @property
    def run(self) -> Run:
        """A copy of the run's description."""
        return Run(**vars(self._run))

    def set_run(self, run: Run) -> None:
        """Replace the description of the run."""
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
        """Return a new message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the available nodes, with the same fields as in Flower's Simulation Runtime."""
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
        """Return the ids of the nodes available in this round.

        Raises ConfigError if the caller waits for more nodes than the run has, because it would wait for
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
            self._available_nodes = self._nodes.available(place, wanted)
        if is_app and not self._sets:
            self._node_queries += 1
            if self._node_queries == 1:
                self._first_query_at = time.monotonic()
            seconds = time.monotonic() - self._first_query_at
            if self._node_queries >= _MANY_QUESTIONS and seconds > _LONG_S and not self._has_warned:
                self._has_warned = True
                log(
                    WARNING,
                    "The ServerApp has asked for the nodes %d times in %.0f s and has sent no message. "
                    "There are %d nodes, and no more will come",
                    self._node_queries,
                    seconds,
                    len(self._available_nodes),
                )
        return list(self._available_nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids for :meth:`pull_messages`."""
        pending = PendingMessages(counts_when_pulled=isinstance(messages, Buffered))
        return list(self._send(messages, pending))

    def wait_for_replies(self, message_ids: Sequence[str], timeout_s: float) -> Sequence[str]:
        """Wait for a reply to any of FedBuff's messages. Returns the ids of messages with a reply.

        ``timeout_s``: seconds to wait. The result is empty after that.
        """
        sets = {message_id: self._sets[message_id] for message_id in message_ids}
        for pending in set(sets.values()):
            self._expire(pending)

        def ids_with_reply() -> list[str]:
            return [message_id for message_id, pending in sets.items() if pending.has_reply(message_id)]

        with self._changed:
            return self._changed.wait_for(ids_with_reply, timeout_s)

    def cancel_messages(self, message_ids: Iterable[str]) -> None:
        """Cancel pushed messages and stop their handling. Other messages of the same set go on."""
        ids_by_set: dict[PendingMessages, list[str]] = {}
        for message_id in message_ids:
            if (pending := self._sets.pop(message_id, None)) is not None:
                ids_by_set.setdefault(pending, []).append(message_id)
        with self._changed:
            running = [job for pending, ids in ids_by_set.items() for job in pending.cancel(ids)]
        self._dispatcher.cancel(running)

    def slow_down_of(self, node_id: int) -> float:
        """Return the factor by which calls of a node take longer than on this machine."""
        slow_down: float = self._nodes.overrides_of(node_id).get("slow_down", 1.0)
        return slow_down

    def pull_messages(  # type: ignore[override] # the parameter has this name since flwr 1.43
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the arrived replies, each once, and an error for each unknown message.

        ``reply_to_message_ids``: ids of the messages; by default, all pending messages. Up to flwr 1.42, this
        parameter is called ``message_ids``.
        """
        wanted = reply_to_message_ids if message_ids is None else message_ids
        if wanted is None:
            wanted = list(self._sets)
        sets = {message_id: self._sets.get(message_id) for message_id in wanted}
        for known in set(sets.values()) - {None}:
            self._expire(cast(PendingMessages, known))
        self.clock()
        replies = []
        with self._changed:
            for message_id, pending in sets.items():
                if pending is not None and (arrived := pending.outcome_to_count(message_id)):
                    self._dispatcher.count(*arrived)
                reply = None if pending is None else pending.pull(message_id)
                if pending is None or message_id in pending.expired:
                    reply = self._unavailable(message_id, ErrorCode.MESSAGE_UNAVAILABLE)
                elif reply is None:
                    continue
                # The ClientApp may give its reply a ttl of its own.
                elif reply.metadata.created_at + reply.metadata.ttl <= time.time():
                    reply = self._unavailable(message_id, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
                self._sets.pop(message_id, None)
                replies.append(reply)
        return replies

    def _unavailable(self, message_id: str, code: int) -> Message:
        """Return Flower's error for a reply that has expired, was pulled before, or never existed."""
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
        """Send messages, and return the replies that arrived in time, in the order of sending.

        ``timeout``: seconds until unfinished messages are cancelled; None for no limit.
        """
        return in_order_of_sending(self._handled(messages, timeout, PendingMessages()))

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Generator[Message, None, None]:
        """Send messages, and yield each reply when it arrives.

        Unfinished messages are cancelled after ``timeout`` seconds, or when the caller closes the generator.
        """
        return self._handled(messages, timeout, PendingMessages(max_unread=self._dispatcher.max_unread))

    def sums(
        self,
        messages: Iterable[Message],
        timeout: float | None,
        weighted_by_key: str,
        keeps_integers: bool,
        in_order: bool,
    ) -> Generator[SumItem, None, None]:
        """Send messages, and let hosts sum the replies. Yields sums, and replies without arrays.

        ``timeout``: seconds until unfinished messages are cancelled; None for no limit.
        ``weighted_by_key``, ``keeps_integers``: as for :class:`flower_gpu.strategies.averaging.ReplySum`.
        ``in_order``: True handles and sums messages in the order of the nodes' partitions, in blocks of
        consecutive nodes.
        """

        def new_group() -> SumGroup:
            return SumGroup(next(self._group_numbers), weighted_by_key, keeps_integers)

        if not (in_order or self.sums_in_order):
            return self._handled(messages, timeout, PendingMessages(new_group=new_group))

        def place_of(message: Message) -> int:
            return self._nodes.place_of(message.metadata.dst_node_id)

        def block_of(message: Message) -> int:
            return place_of(message) // BLOCK_NODES

        pending = PendingMessages(NodeBlocks(block_of, self._max_blocks), new_group=new_group)
        return self._handled(sorted(messages, key=place_of), timeout, pending)

    def _max_blocks(self) -> int:
        """Return the number of blocks that may be in flight, whatever memory they take."""
        dispatcher = self._dispatcher
        return 2 * (len(dispatcher.hosts) + dispatcher.concurrency // BLOCK_NODES + 1)

    def close(self) -> None:
        """Cancel unfinished messages, and stop handing out messages. Calling it again has no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        for pending in set(self._sets.values()):
            self._cancel_all(pending)
        self._waits.look(None, time.monotonic(), ())
        self._dispatcher.close()

    def _handled(
        self, messages: Iterable[Message], timeout: float | None, pending: PendingMessages
    ) -> Generator[Any, None, None]:
        """Send messages, and yield the items that come into their set. At the end, close the set."""
        deadline = math.inf if timeout is None else self.clock() + timeout
        ids: list[str] = []
        try:
            for message_id in self._send(messages, pending):
                ids.append(message_id)
            with closing(self._arriving(pending, deadline)) as coming:
                yield from coming
            if pending.remaining and self._is_strict:
                raise NotDeterministicError(_late_text(pending.remaining, timeout))
        finally:
            for message_id in ids:
                self._sets.pop(message_id, None)
            self._cancel_all(pending)

    def _arriving(self, pending: PendingMessages, deadline: float) -> Generator[SumItem, None, None]:
        """Yield items of a set until all have arrived or the deadline has passed.

        After the deadline, hosts are still asked for the last sums.

        ``deadline``: time as in :meth:`clock`.
        """
        asked_at = time.monotonic()
        # taking_s: longest time that the caller needed for the items of one turn
        taking_s, is_late, is_done = 0.0, False, False
        while not is_done:
            self._expire(pending)
            remaining_s = deadline - self.clock()
            with self._changed:
                if remaining_s <= 0 and not is_late:
                    is_late, deadline = True, math.inf
                    pending.stop()
                now = time.monotonic()
                asked = pending.sums_to_fetch(is_due=now >= asked_at + max(_TAKE_S, taking_s / _TAKE_SHARE))
                if not (asked or pending.can_collect or pending.is_done):
                    self._changed.wait(
                        max(0.0, min(pending.expires_s - now, deadline - self.clock(), _LOOK_S))
                    )
                is_done, error, items = pending.is_done and not asked, pending.error, pending.collect()
                if items:  # a host may have room for another message now
                    self._changed.notify_all()
            for partial_sum in asked:
                asked_at = now
                partial_sum.host.ask_for_sum(partial_sum.group.number)
            if error is not None:
                raise error
            began = time.monotonic()
            while items:
                # No variable may keep the item, so that it can be freed before the next item arrives.
                yield items.pop(0)
            taking_s = max(taking_s, time.monotonic() - began)

    def clock(self) -> float:
        """Return the time for timeouts in seconds. The clock stops while no message can get a worker."""
        since = self._dispatcher.stuck_since()
        return time.monotonic() - self._waits.look(since, time.monotonic(), (os.getpid(),))

    def _expire(self, pending: PendingMessages) -> None:
        """Reply to the expired messages of a set with errors, and stop their handling."""
        with self._changed:
            count, running = pending.expire()
        self._dispatcher.cancel(running)
        if count and self._is_strict:
            raise NotDeterministicError(
                f"{count} messages were not done within their ttl, which depends on this machine's load: "
                "give them a longer one"
            )

    def _send(self, messages: Iterable[Message], pending: PendingMessages) -> Iterator[str]:
        """Put messages into a set for the dispatcher's threads. Yields the message ids."""
        self._sent += 1
        is_sorted = self._durations is not None and not self._durations.is_empty
        gather_s = math.inf if pending.is_in_order else _GATHER_S if is_sorted else 0.0
        gathered: list[Message] = []
        since = time.monotonic()
        for message in messages:
            message = self._named(message, pending)
            gathered.append(message)
            yield message.metadata.message_id
            del message
            if time.monotonic() - since >= gather_s:
                self._push(gathered, pending)
                since = time.monotonic()
        self._push(gathered, pending)

    def _named(self, message: Message, pending: PendingMessages) -> Message:
        """Return the message with a new id, and record its set. A message that is pending is copied first.

        Raises ValueError if the message is invalid, like Flower's own grid.
        """
        is_reply = bool(message.metadata.reply_to_message_id)
        if message.metadata.ttl <= 0 or (is_reply and not _CAN_SEND_REPLIES):
            raise ValueError(f"Invalid message: {message}")
        self._node_queries = 0
        if message.metadata.ttl == DEFAULT_TTL:
            message.metadata.ttl = _UNLIMITED_S
        # The app has sent the same object before.
        if message.metadata.message_id in self._sets:
            metadata = copy(message.metadata)
            message = copy(message)
            message.__dict__["_metadata"] = metadata
        # Each message gets a number. Flower's id is a hash of the content, which all messages of a round
        # share.
        message_id = f"{self._run.run_id:x}-{next(self._numbers)}"
        message.metadata.__dict__["_message_id"] = message_id
        self._sets[message_id] = pending
        return message

    def _push(self, messages: list[Message], pending: PendingMessages) -> None:
        """Put messages into a set, tell the dispatcher, and clear the list."""
        expected_s = [0.0] * len(messages)
        if self._durations is not None and not pending.is_in_order:
            each = (message.metadata for message in messages)
            calls = [(metadata.message_type, self._nodes.place_of(metadata.dst_node_id)) for metadata in each]
            expected_s = self._durations.expected_s(calls)
        with self._changed:
            for message, seconds in zip(messages, expected_s, strict=True):
                pending.push(message, seconds)
            self._dispatcher.add(pending)
        messages.clear()

    def _cancel_all(self, pending: PendingMessages) -> None:
        """Close a set, cancel its running messages, and drop its sums on hosts."""
        with self._changed:
            running: list[Job] = pending.close()
            self._dispatcher.remove(pending)
        self._dispatcher.cancel(running)
        for partial_sum in pending.groups.values():
            if not partial_sum.host.is_gone:
                partial_sum.host.forget(partial_sum.group.number)


def _late_text(count: int, timeout: float | None) -> str:
    """Return the error text of a deterministic run with late messages."""
    return (
        f"{count} messages were not done within {timeout:g} s, which depends on this machine's load: "
        "give the strategy's start() a longer timeout"
    )
