"""Grids for tests of strategies. Their nodes train in this process, so no network is involved."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu.strategies.averaging import ReplySum, SumItem, in_order_of_sending, without_arrays
from flower_gpu.strategies.rounds import RoundState
from flower_gpu.strategies.streaming import ComingReplies, Configured


def reply_of(node: int, content: RecordDict | Error, number: int = 0) -> Message:
    """Return a reply of a node to a new message."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(RecordDict(), dst_node_id=node, message_type="train")
    message.metadata.__dict__["_message_id"] = f"message-{number}"
    return Message(content, reply_to=message)


def content_of(arrays: dict[str, Any], metrics: dict[str, Any]) -> RecordDict:
    record = ArrayRecord({key: Array(np.asarray(array)) for key, array in arrays.items()})
    return RecordDict({"arrays": record, "metrics": MetricRecord(metrics)})


def train(message: Message) -> RecordDict | Error:
    """Change each weight by a step that depends only on node and round. Node 13 fails."""
    node = message.metadata.dst_node_id
    if node == 13:
        return Error(code=1, reason="out of luck")
    server_round = message.content["config"]["server-round"]
    steps = np.random.default_rng([node, server_round])
    arrays = {
        key: np.asarray(array.numpy() + steps.normal(size=array.shape), dtype=array.dtype)
        for key, array in message.content["arrays"].items()
    }
    return content_of(arrays, {"num-examples": 10 + node, "loss": 1.0 / (node * server_round)})


class PlainTestGrid(Grid):
    """A grid that returns all replies in one list, as Flower's grids do. Its nodes train one by one.

    Parameters
    ----------
    nodes : iterable of int
        Ids of the nodes.
    order : callable, optional
        Returns the messages of a round in the order in which their replies arrive.
    ends_in : int, optional
        Round during which the run is interrupted.
    """

    run: Any = None

    def __init__(
        self,
        nodes: Iterable[int],
        *,
        order: Callable[[list[Message]], list[Message]] = list,
        ends_in: int | None = None,
    ) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self._nodes = list(nodes)
        self._order = order
        self._ends_in = ends_in
        self._sent = 0
        self.lists = 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: Any = None) -> list[Message]:
        replies = in_order_of_sending(self._replies(messages))
        self.lists += bool(replies)
        return replies

    def get_node_ids(self) -> list[int]:
        return self._nodes

    def _replies(self, messages: Iterable[Message]) -> Iterator[Message]:
        messages = list(messages)
        for message in messages:
            self._sent += 1
            message.metadata.__dict__["_message_id"] = f"message-{self._sent}"
        for index, message in enumerate(self._order(messages)):
            if index == 2 and self._ends_in == message.content["config"]["server-round"]:
                raise KeyboardInterrupt
            yield Message(train(message), reply_to=message)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


class StreamingTestGrid(PlainTestGrid):
    """A grid that yields each reply as it arrives, and whose runs can be resumed."""

    def __init__(self, nodes: Iterable[int], *, state: RoundState | None = None, **options: Any) -> None:
        super().__init__(nodes, **options)
        self._state = state
        self.finished: list[RoundState] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: Any = None) -> Any:
        """Return replies to come to messages with that mark, as the grid of a simulation does."""
        if not isinstance(messages, Configured):
            return super().send_and_receive(messages, timeout=timeout)
        return ComingReplies(self.stream(messages), partial(self.sums, messages, timeout))

    def stream(self, messages: Iterable[Message], *, in_order: bool = False) -> Iterator[Message]:
        replies = list(self._replies(messages))
        if in_order:
            replies.sort(key=lambda reply: reply.metadata.src_node_id)
        yield from replies

    def sums(
        self,
        messages: Iterable[Message],
        timeout: float | None,
        weighted_by_key: str,
        keeps_integers: bool,
        in_order: bool,
    ) -> Generator[SumItem, None, None]:
        """Sum replies as hosts do: in order of arrival, or in blocks of four nodes."""
        total: tuple[int, ReplySum] | None = None
        if in_order:
            messages = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        with closing(cast(Any, self.stream(messages, in_order=in_order))) as replies:
            for reply in replies:
                block = reply.metadata.src_node_id // 4 if in_order else 0
                if total is not None and total[0] != block:
                    yield f"block {total[0]}", total[1]
                    total = None
                total = total or (block, ReplySum(weighted_by_key, keeps_integers=keeps_integers))
                total[1].add(reply)
                yield without_arrays(reply)
                del reply
        if total is not None:
            yield f"block {total[0]}", total[1]

    def resumed(self) -> RoundState | None:
        return self._state

    def finished_round(self, state: RoundState) -> None:
        random_state = json.loads(json.dumps(state.random_state))  # as if read from a file
        metrics = {
            name: dict(getattr(state, name))
            for name in ("train_metrics", "evaluate_metrics", "client_metrics")
        }
        self.finished.append(replace(state, random_state=random_state, **metrics))


def shuffled(seed: int) -> Callable[[list[Message]], list[Message]]:
    """Return a random order for ``order``. It leaves the global random state alone."""
    order = random.Random(seed)
    return lambda messages: order.sample(messages, len(messages))
