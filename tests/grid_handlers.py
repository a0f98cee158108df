"""A grid with a host in threads of this process. Each message's group says how its handler behaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.run import Run

from flower_gpu.errors import WorkerDiedError
from flower_gpu.simulation.batch_size import Batches
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import AssignedMessage, HostInfo, MessageOutcome, failed
from flower_gpu.simulation.local_host import QueueHost
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.strategies.averaging import ReplySum
from flower_gpu.strategies.resuming.states import StateStore

RUN_ID = 5


class NoWorkers:
    """The workers' methods of a handler that has no workers."""

    # No call is batched.
    batches = Batches(1)

    def stuck_since(self) -> float | None: ...

    def cancel(self, message_id: str) -> None: ...

    def cancel_all(self) -> None: ...


class Handling(NoWorkers):
    """Replies, waits, fails or is cancelled, as a message's group says, and records the calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up: dict[str, threading.Event] = {}
        self.running = self.most = 0
        self.begun: list[str] = []
        self.done: list[str] = []
        self.cancelled: list[str] = []
        #: Opened by a test for messages of group "gate".
        self.gate = threading.Event()
        # Time since which the grid sees the handler as stuck.
        self.stuck: float | None = None
        self.on_reply: Callable[[Message], object] = lambda reply: None

    def stuck_since(self) -> float | None:
        return self.stuck

    def __call__(self, visit: AssignedMessage) -> list[MessageOutcome]:
        is_cancelled = threading.Event()
        with self._lock:
            self._given_up[visit.message_id] = is_cancelled
            self.begun.append(visit.message_id)
            self.running += 1
            self.most = max(self.most, self.running)
        began = time.monotonic()
        try:
            reply = self._reply(visit.message, is_cancelled)
        except Exception as error:
            reply = failed(visit.message, error)
        with self._lock:
            self.running -= 1
            self.done.append(visit.message_id)
        return [MessageOutcome(visit.message_id, reply, b"", time.monotonic() - began)]

    def _reply(self, message: Message, is_cancelled: threading.Event) -> Message:
        group = message.metadata.group_id
        if group == "wait" and is_cancelled.wait(60):
            raise WorkerDiedError("given up")
        if group == "gate":
            self.gate.wait(60)
        if group == "error":
            raise ValueError("of the app")
        if group == "died":
            raise WorkerDiedError("killed")
        content = RecordDict({"arrays": ArrayRecord([np.ones(2)]), "m": MetricRecord({"num-examples": 1})})
        reply = Message(content, reply_to=message, ttl=60 if group == "short" else None)
        self.on_reply(reply)
        return reply

    def cancel(self, message_id: str) -> None:
        with self._lock:
            self.cancelled.append(message_id)
            if message_id in self._given_up:
                self._given_up[message_id].set()

    def cancel_all(self) -> None:
        for is_cancelled in self._given_up.values():
            is_cancelled.set()


class SafeHost(QueueHost):
    """A host that cannot be lost, like this machine."""

    can_be_lost = False


class GridUnderTest:
    def __init__(
        self,
        threads: int,
        nodes: int = 4,
        durations: Durations | None = None,
        *,
        has_spare: bool = False,
        handling: Handling | None = None,
        **options: Any,
    ) -> None:
        self.nodes = VirtualNodes(nodes, 1, RUN_ID, {})
        self.handling: Any = handling or Handling()
        self.dispatcher = Dispatcher(self.nodes, StateStore(), 3, Durations())
        self.grid = SimulationGrid(Run.create_empty(RUN_ID), self.dispatcher, durations=durations, **options)
        self.host = SafeHost(HostInfo("here", threads, 1, {}, threads, []))
        self.host.start(self.handling, threads + has_spare)
        self.dispatcher.joined(self.host)

    def messages(self, count: int, group: str = "answer") -> list[Message]:
        ids = self.nodes.ids
        return [
            Message(RecordDict(), ids[number % len(ids)], "train", group_id=group) for number in range(count)
        ]

    def sums(
        self, messages: list[Message], *, in_order: bool = True, timeout: float | None = None
    ) -> tuple[list[Message], float]:
        """Return the messages that are not part of a sum, and the weight of the sum."""
        total, rest = ReplySum("num-examples"), []
        for item in self.grid.sums(messages, timeout, "num-examples", True, in_order):
            if isinstance(item, Message):
                rest.append(item)
            else:
                total.merge(item[1], item[0])
        return rest, total.mean.total_weight

    def close(self) -> None:
        self.handling.gate.set()
        self.grid.close()
        self.host.close()
        self.dispatcher.wait()
