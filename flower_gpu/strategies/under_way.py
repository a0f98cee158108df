"""FedBuff's messages: they stay in flight from one round to the next, and are in checkpoints.

Each message has a time limit, measured by the grid's clock, or by the monotonic clock if the grid has none.
The clock of a simulation stops while no worker can have a lease. The ``ttl`` of Flower's messages cannot be
that limit, for two reasons. It is a time of day, so it runs on while a simulation waits. It would also
discard replies that arrived in time but wait for the ServerApp, which may be evaluating or writing a
checkpoint.

So :meth:`UnderWay._look` first collects the replies that have arrived. Only a message without a reply can be
late. Then an error takes the place of its reply. A message that the grid refuses gets an error in the same
way. From there on both are handled like any other failure: logged, recorded and counted.

Two threads use :class:`UnderWay`, but never at the same time. The ServerApp's thread runs the rounds. While
it evaluates a new version of the model, a second thread sends messages for slots that become free
(:meth:`UnderWay.filled`). The ServerApp's thread waits for the end of that thread before it goes on.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import INFO
from statistics import fmean
from typing import Any, Final, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from flower_gpu.errors import ClientsFailedError
from flower_gpu.flower.records import NUMBERED, reason_of
from flower_gpu.strategies.averaging import weight_of
from flower_gpu.strategies.rounds import ResumableGrid, RoundState
from flower_gpu.strategies.streaming import Buffered
from flower_gpu.trace import NO_REPLY

_WAIT_S: Final = 0.25  # longest wait until the grid is polled for replies again
_FILL_S: Final = 0.1  # interval between checks for free slots while the server evaluates
_TEXT: Final = "under way"  # name of the record in a checkpoint that describes the other records
# Fields of a message that are written with its content. Its limit begins anew when it is sent again.
_SAVED: Final = ("node_id", "server_round", "number", "back_at")
_NEWEST: Final = "newest"  # name in that record for the newest model, which the checkpoint has already
# A SuperLink keeps messages and replies this long beyond their limit, because the ServerApp may be busy.
_KEPT_S: Final = 3600.0
_REFUSED: Final = "the message could not be sent"


@dataclass(frozen=True, eq=False)
class SentModel:
    """A message in flight, with the model that was sent.

    ``server_round``: round in which it was sent.
    ``number``: number of messages sent before it.
    ``back_at``: time on the virtual clock at which its reply is consumed.
    ``ends_at``: time on the grid's clock from which it counts as failed.
    """

    node_id: int
    content: RecordDict
    server_round: int
    number: int
    back_at: float
    ends_at: float = math.inf


class BufferingStrategy(Protocol):
    """The part of :class:`.FedBuff` that decides about messages in flight."""

    buffer_size: int
    concurrency: int
    min_available_nodes: int
    weighted_by_key: str
    exact_order: bool

    @property
    def checkpoint_kind(self) -> str:
        """Name of the strategies that can resume from a checkpoint of this strategy."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Return a message for each free slot."""


class UnderWay:
    """The messages of a run: the grid of its rounds, and the state of the strategy in checkpoints.

    ``strategy``: makes the messages, and says how many updates end a round.
    ``grid``, ``arrays``, ``num_rounds``, ``timeout``, ``config``: as ``start`` has them.
    """

    def __init__(
        self,
        strategy: BufferingStrategy,
        grid: Any,
        arrays: ArrayRecord,
        num_rounds: int,
        timeout: float | None,
        config: ConfigRecord | None,
    ) -> None:
        self._strategy = strategy
        self._grid = grid
        self._num_rounds = num_rounds
        self._config = config or ConfigRecord()
        self._is_ours = hasattr(grid, "sums")
        self._in_order = strategy.exact_order or (self._is_ours and grid.sums_in_order)
        self._timeout_s = math.inf if self._in_order or timeout is None else timeout
        is_unlimited = self._is_ours or math.isinf(self._timeout_s)
        self._ttl = None if is_unlimited else self._timeout_s + _KEPT_S
        self._clock: Callable[[], float] = getattr(grid, "clock", time.monotonic)
        self._wait = getattr(grid, "wait_for_replies", _wait)
        self._taken = getattr(grid, "taken", lambda reply, node_id: None)  # for recorded grids
        #: Returns how errors name a node.
        self.name_of: Callable[[int], str] = getattr(grid, "name_of", "node {}".format)
        self.kind = strategy.checkpoint_kind
        #: The newest version of the model, and the round in which it is trained.
        self.arrays, self._round = arrays, 1
        self._is_trained = False  # whether this round has its updates
        self._failed: set[int] = set()  # nodes, in this round
        self._sent: dict[str, SentModel] = {}  # by message id
        #: Of replies that are here.
        self.to_sum: dict[str, SentModel] = {}
        # Replies that have arrived, by message id. None stands for a reply that our own grid keeps until it
        # is consumed, so that an earlier checkpoint has the client's state from before the reply.
        self._arrived: dict[str, Message | None] = {}
        self._refused: set[str] = set()  # messages that the grid did not take
        self._has_update = False  # whether any client has ever sent one
        self._last_error = ""
        self._number = 0  # of the next message
        self._now = 0.0  # on the virtual clock
        self._examples: dict[int, float] = {}  # of each node's last reply, for that clock

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._grid, name)

    # The grid of the rounds

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        """On the first call in a round, let clients train and return an iterator over their replies."""
        if self._is_trained:
            return self._grid.send_and_receive(messages, timeout=timeout)
        self._is_trained = True
        return self._replies(messages)

    def _replies(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield replies until there are enough updates, or only failures. Each reply frees a slot.

        Raises ClientsFailedError if no client could be sent a message.
        """
        self._send(messages)
        enough, most_failed = self._strategy.buffer_size, self._strategy.concurrency
        updates = failed = refused = 0
        while self._sent and updates < enough and (updates or failed < max(enough, most_failed)):
            message_id, reply = self._next_reply()
            sent = self._sent.pop(message_id)
            self._now = max(self._now, sent.back_at)
            if reply.has_error():
                failed += 1
                refused += message_id in self._refused
                self._refused.discard(message_id)
                self._failed.add(sent.node_id)
                self._last_error = f"{self.name_of(sent.node_id)}: {reason_of(reply)}"
            else:
                updates += 1
                self._has_update = True
                self.to_sum[message_id] = sent
                self._learn(sent.node_id, reply)
            if updates < enough:
                self._fill()  # before the reply is summed, so that workers have work in that time
            yield reply
            del reply, sent  # frees their memory before the wait for the next reply
        if not updates and failed == refused:
            why = (
                f"the grid took none of its {refused} messages; the log says why"
                if refused
                else "none was sent"
            )
            raise ClientsFailedError(f"FedBuff: no client was sent the model of round {self._round}: {why}")

    def resumed(self) -> RoundState | None:
        """Return the round after which the run continues, or None to begin it."""
        state = self._grid.resumed() if isinstance(self._grid, ResumableGrid) else None
        if state is not None:
            self.arrays, self._round = state.arrays, state.server_round + 1
            self._has_update = bool(state.train_metrics)
        return state

    def finished_round(self, state: RoundState) -> None:
        """Pass on a finished round."""
        self._is_trained = False
        if isinstance(self._grid, ResumableGrid):
            self._grid.finished_round(state)

    # For the strategy

    def next_nodes(self) -> list[int]:
        """Return nodes for the free slots, drawn from the nodes without a message."""
        from flwr.serverapp.strategy.strategy_utils import sample_nodes

        if self._sent:
            nodes = self._grid.get_node_ids()
        else:
            _, nodes = sample_nodes(self._grid, self._strategy.min_available_nodes, 0)  # waits for them
        busy = {sent.node_id for sent in self._sent.values()} | self._failed
        idle = sorted(set(nodes) - busy)
        # A slot becomes free when its reply arrives, or, on the virtual clock, when the reply is consumed.
        # While the server evaluates, only the replies for one version may wait: more would fill the memory.
        training = len(self._sent)
        if not self._in_order:
            training -= min(len(self._arrived), self._strategy.buffer_size)
        return random.sample(idle, max(0, min(self._strategy.concurrency - training, len(idle))))

    def go_on_with(self, arrays: ArrayRecord, server_round: int) -> None:
        """Send a new version of the model to clients for all free slots."""
        self.arrays, self._round = arrays, server_round
        self._failed.clear()
        self._fill()

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Within the context, a thread sends messages for slots that become free."""
        is_over = threading.Event()

        def fill() -> None:
            while not is_over.wait(_FILL_S):
                self._look(0.0)
                self._fill()

        with ThreadPoolExecutor(1, "flower-gpu-fedbuff") as thread:
            filling = thread.submit(fill) if self._sent and not self._in_order else None
            try:
                yield
            finally:
                is_over.set()
            if filling is not None:
                filling.result()

    def check_updated(self) -> None:
        """Raise ClientsFailedError if no client has sent an update, so that the model is the initial one."""
        if self._num_rounds and not self._has_update:
            raise ClientsFailedError(
                f"FedBuff: no client has sent an update in {self._num_rounds} rounds, so the model is the "
                f"initial one. The last failure is that of {self._last_error}"
            )

    def cancel_all(self) -> None:
        """Cancel the messages in flight."""
        if self._sent:
            log(INFO, "%d updates are still in flight and will not be used", len(self._sent))
            if self._is_ours:
                self._grid.cancel_messages(list(self._sent))

    # The state in a checkpoint

    def changed(self) -> RecordDict:
        """Return the messages in flight, with each of their records once.

        The models are the same objects that were sent, so a checkpoint recognizes models of earlier rounds.
        """
        records: list[Any] = []
        names = {id(self.arrays): _NEWEST}

        def name_of(record: Any) -> str:
            if id(record) not in names:
                names[id(record)] = str(len(records))
                records.append(record)
            return names[id(record)]

        sent = [
            {
                **{name: getattr(message, name) for name in _SAVED},
                "content": {key: name_of(record) for key, record in message.content.items()},
            }
            for message in self._sent.values()
        ]
        text = json.dumps([self._number, self._now, list(self._examples.items()), sent])
        numbered = {str(number): record for number, record in enumerate(records)}
        return RecordDict({_TEXT: ConfigRecord({_TEXT: text}), **numbered})

    def restore(self, state: RecordDict) -> None:
        """Send the messages of a checkpoint again that were in flight."""
        records: dict[str, Any] = {**state, _NEWEST: self.arrays}
        self._number, self._now, examples, sent = json.loads(records.pop(_TEXT)[_TEXT])
        self._examples = dict(examples)
        for message in sent:
            message["content"] = RecordDict({key: records[name] for key, name in message["content"].items()})
        # A SuperNode that was restarted is a new node, so messages to the old node are dropped.
        nodes = {message["node_id"] for message in sent} if self._is_ours else set(self._grid.get_node_ids())
        self._push([SentModel(**message) for message in sent if message["node_id"] in nodes])

    # Messages

    def _fill(self) -> None:
        if self._round <= self._num_rounds:
            # Called by the class, because a call by the object would be recorded as the start of a round.
            configure = type(self._strategy).configure_train
            self._send(configure(self._strategy, self._round, self.arrays, self._config, self))

    def _send(self, messages: Iterable[Message]) -> None:
        sent = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            back_at = self._now + self._duration(node_id)
            sent.append(SentModel(node_id, message.content, self._round, self._number, back_at))
            self._number += 1
        self._push(sent)

    def _push(self, sent: Sequence[SentModel]) -> None:
        """Send messages to clients. A message that the grid refuses gets an error as its reply."""
        messages = Buffered(self._message(message) for message in sent)
        ids = list(self._grid.push_messages(messages))
        if len(ids) != len(sent):  # Flower's grids leave out refused messages, or all of them together
            accepted = set(ids)
            own_ids = [message.metadata.message_id for message in messages]
            ids = [message_id if message_id in accepted else None for message_id in own_ids]
        ends_at = self._clock() + self._timeout_s
        for message_id, message in zip(ids, sent, strict=True):
            key = f"refused {message.number}" if message_id is None else message_id
            self._sent[key] = replace(message, ends_at=ends_at)
            if message_id is None:
                self._refused.add(key)
                self._arrived[key] = self._error(key, ErrorCode.NODE_UNAVAILABLE, _REFUSED)

    def _message(self, sent: SentModel) -> Message:
        group = f"{NUMBERED}{sent.number}"
        return Message(sent.content, sent.node_id, MessageType.TRAIN, ttl=self._ttl, group_id=group)

    def _error(self, message_id: str, code: int, reason: str) -> Message:
        """Return an error that takes the place of the reply to a message."""
        message = self._message(self._sent[message_id])
        message.metadata.__dict__["_message_id"] = message_id
        return Message(Error(code, reason), reply_to=message)

    def _next_reply(self) -> tuple[str, Message]:
        """Wait for a reply; return the id of its message, and the reply."""
        timeout_s = 0.0
        while (message_id := self._next_here()) is None:
            self._look(timeout_s)
            timeout_s = _WAIT_S  # the first look does not wait, because replies may have arrived already
        reply = self._arrived.pop(message_id) or next(iter(self._grid.pull_messages([message_id])))
        self._taken(reply, self._sent[message_id].node_id)
        return message_id, reply

    def _next_here(self) -> str | None:
        """Return the id of the message with the reply to consume next, or None until that has arrived."""
        if not self._in_order:
            return next(iter(self._arrived), None)
        first = min(self._sent, key=lambda id_: (self._sent[id_].back_at, self._sent[id_].node_id))
        return first if first in self._arrived else None

    def _look(self, timeout_s: float) -> None:
        """Collect replies, waiting up to ``timeout_s`` for the first. Cancel late messages."""
        ids = self._wait(
            [message_id for message_id in self._sent if message_id not in self._arrived], timeout_s
        )
        if self._is_ours:
            self._arrived |= dict.fromkeys(ids)
        else:
            replies = self._grid.pull_messages(ids)
            self._arrived |= {reply.metadata.reply_to_message_id: reply for reply in replies}
        now = self._clock()
        late = [id_ for id_, sent in self._sent.items() if sent.ends_at <= now and id_ not in self._arrived]
        for message_id in late:
            reason = f"{NO_REPLY} within {self._timeout_s:g} s"
            self._arrived[message_id] = self._error(message_id, ErrorCode.MESSAGE_UNAVAILABLE, reason)
        if late and self._is_ours:
            self._grid.cancel_messages(late)

    # The virtual clock

    def _learn(self, node_id: int, reply: Message) -> None:
        examples = weight_of(reply.content, self._strategy.weighted_by_key)
        if self._in_order and examples and examples > 0:
            self._examples[node_id] = examples

    def _duration(self, node_id: int) -> float:
        """Return the duration of a client's training, in units of the clients' mean without slow-downs."""
        mean = fmean(self._examples.values()) if self._examples else 1.0
        slow_down: float = self._grid.slow_down_of(node_id) if self._is_ours else 1.0
        return slow_down * self._examples.get(node_id, mean) / mean


def _wait(message_ids: Sequence[str], timeout_s: float) -> Sequence[str]:
    time.sleep(timeout_s)
    return message_ids
