"""Handlers for a grid under test: they answer, wait, fail, or are given up, as a message's group says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.supercore.run import Run

from flower_gpu.errors import WorkerDiedError
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.local_grid import LocalGrid
from flower_gpu.simulation.nodes import VirtualNodes

RUN_ID = 5


class Handling:
    """What threads of a grid did with messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up: dict[str, threading.Event] = {}
        self.running = self.most = self.idles = self.left = 0
        self.begun: list[str] = []
        self.done: list[str] = []
        self.cancelled: list[str] = []
        #: Opened by a test for messages of group "gate".
        self.gate = threading.Event()
        self.stuck: float | None = None  # since when, as the grid is told
        self.on_reply: Callable[[Message], object] = lambda reply: None

    def stuck_since(self) -> float | None:
        return self.stuck

    def __call__(self, message: Message) -> Message:
        message_id, group = message.metadata.message_id, message.metadata.group_id
        given_up = threading.Event()
        with self._lock:
            self._given_up[message_id] = given_up
            self.begun.append(message_id)
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            if group == "wait" and given_up.wait(60):
                raise WorkerDiedError("given up")
            if group == "gate":
                self.gate.wait(60)
            if group == "error":
                raise ValueError("of the app")
            if group == "died":
                raise WorkerDiedError("killed")
            if group == "exit":
                raise SystemExit(3)
            arrays = [np.zeros(4096, np.uint8)] if group == "large" else []
            ttl = 60 if group == "short" else None
            reply = Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message, ttl=ttl)
            self.on_reply(reply)
            return reply
        finally:
            with self._lock:
                self.running -= 1
                self.done.append(message_id)

    def idle(self) -> None:
        with self._lock:
            self.idles += 1

    def leave(self) -> None:
        with self._lock:
            self.left += 1

    def cancel(self, message: Message) -> None:
        with self._lock:
            self.cancelled.append(message.metadata.message_id)
            self._given_up[message.metadata.message_id].set()


class GridUnderTest:
    def __init__(
        self,
        threads: int,
        nodes: int = 4,
        durations: Durations | None = None,
        **options: bool,
    ) -> None:
        self.nodes = VirtualNodes(nodes, 1, RUN_ID, {})
        self.handling = Handling()
        run = Run.create_empty(RUN_ID)
        self.grid = LocalGrid(run, self.nodes, self.handling, threads, durations=durations, **options)

    def messages(self, count: int, group: str = "answer") -> list[Message]:
        ids = self.nodes.ids
        return [
            Message(RecordDict(), ids[number % len(ids)], "train", group_id=group) for number in range(count)
        ]

    @staticmethod
    def blocks(nodes: int) -> list[int]:
        """Return the block of each of so many nodes."""
        one = GridUnderTest(1, nodes)
        one.close()
        return [one.grid.block_of(node) for node in one.nodes.ids]

    def close(self) -> None:
        self.handling.gate.set()
        self.grid.close()


def until(condition: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
