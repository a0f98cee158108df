"""A message handler that runs ``recycled_app``, with the state of each node and a list of finished calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import recycled_app
from flwr.app import Message

from flower_gpu.calls.settings import call_settings
from flower_gpu.simulation.clients import Clients
from flower_gpu.simulation.dispatcher import Seeds
from flower_gpu.simulation.host import MANY, AssignedMessage, MessageOutcome, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.leased_worker import Request
from flower_gpu.simulation.messages import MessageHandler
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.pool import WorkerPool
from flower_gpu.simulation.run import _identity

RUN_ID = 11


class Handler:
    """Handles messages as a simulation does."""

    def __init__(
        self,
        calls_per_worker: int = MANY,
        seed: int = 3,
        *,
        is_strict: bool = False,
        tries: int = 1,
        clients: Clients | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        app = AppReference(Path(__file__).parent, "recycled_app:app")
        settings = call_settings(options or {})
        self.nodes = VirtualNodes(8, 1, RUN_ID, {}, clients or Clients())
        work = Work("recycled", app, settings, self.nodes, None, calls_per_worker, is_strict, is_strict)
        self.states = [b""] * 8
        self.learned: list[int] = []
        self.pool = WorkerPool(without=frozenset({"torch"}))
        self.handler = MessageHandler(work, settings, self.pool, tries=tries)
        self._seeds = Seeds(seed)
        self._numbers = iter(range(1000))

    def visit(
        self, node: int, task: str = "answer", group: str = "1", kind: str = "train", **content: Any
    ) -> AssignedMessage:
        message = Message(recycled_app.content(task, **content), self.nodes.ids[node], kind, group_id=group)
        message.metadata.__dict__["_message_id"] = f"message {next(self._numbers)}"
        return AssignedMessage(message, self._seeds(message), self.states[node])

    def __call__(self, node: int, task: str = "answer", group: str = "1", **content: Any) -> dict[str, Any]:
        """Handle a message, and return the facts that the app reports."""
        reply = self.handled(self.visit(node, task, group, **content)).reply
        assert reply is not None
        return dict(reply.content["facts"])

    def handled(self, visit: AssignedMessage) -> MessageOutcome:
        """Handle a message, and keep the new state of its node."""
        (answer,) = self.handler(visit)
        node = self.nodes.partition_of(visit.message.metadata.dst_node_id)
        if answer.state is not None:
            self.states[node] = answer.state
        if answer.call_s is not None:
            assert answer.call_s > 0
            self.learned.append(node)
        return answer

    def together(self, *tasks: str) -> list[Any]:
        """Handle messages of nodes 0, 1, ... together.

        Returns the facts that the app reports for each message, or the reason of its error.
        """
        visits = [self.visit(node, task, kind="train.many") for node, task in enumerate(tasks)]
        answers = self.handler(*visits)
        assert [answer.message_id for answer in answers] == [visit.message_id for visit in visits]
        results: list[Any] = []
        for node, answer in enumerate(answers):
            assert answer.reply is not None
            if answer.reply.has_error():
                results.append(answer.reply.error.reason)
            else:
                self.states[node] = answer.state or b""
                results.append(dict(answer.reply.content["facts"]))
        return results

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Have another message in flight in the block."""
        request = Request("another message", lambda: None)
        worker = self.pool.take(request)
        yield
        self.pool.put_back(request, worker)

    def error(self, node: int, task: str) -> str:
        """Return the reason why a message has failed."""
        answer = self.handled(self.visit(node, task))
        assert answer.reply is not None and answer.state is None
        return str(answer.reply.error.reason)

    def times(self, node: int) -> int:
        """Return the number of calls that a node's state has counted."""
        state = self.nodes.context_of(self.nodes.ids[node], self.states[node]).state
        return int(state["seen"]["times"]) if "seen" in state else 0


@contextlib.contextmanager
def handlers() -> Iterator[Callable[..., Handler]]:
    """Yield a factory of handlers. The handlers are closed at the end of the block."""
    created: list[Handler] = []

    def new(*args: Any, **kwargs: Any) -> Handler:
        created.append(Handler(*args, **kwargs))
        return created[-1]

    with _identity(RUN_ID):
        yield new
        for handler in created:
            handler.pool.close()


def has_failed(answer: MessageOutcome) -> bool:
    return answer.reply is not None and answer.reply.has_error() and answer.state is None
