"""Flower's ``Grid`` without a network: messages are handled on this machine, and replies come as they are."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flower_gpu.errors import FlowerGPUError
from flower_gpu.simulation.nodes import VirtualNodes

#: Handles one message; what it raises becomes the reply.
Handle = Callable[[Message], Message]


class LocalGrid(Grid):
    """Hands messages to threads that have them handled, each in a worker.

    Parameters
    ----------
    run : Run
        The run that messages are of.
    nodes : VirtualNodes
        Who can be sent something.
    handle : callable
        Handles a message.
    threads : int
        How many messages are handled at a time, at most.
    """

    def __init__(self, run: Run, nodes: VirtualNodes, handle: Handle, threads: int) -> None:
        self._run = run
        self._nodes = nodes
        self._handle = handle
        self._waiting: queue.SimpleQueue[tuple[Message, _Box] | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._boxes: dict[str, _Box] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"flower-gpu-simulation-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def run(self) -> Run:
        """The run."""
        return Run(**vars(self._run))

    def set_run(self, run: Run) -> None:
        """Take another description of the run."""
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

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._nodes.ids)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have messages handled; returns their ids, by which replies can be pulled."""
        box = _Box()
        return [self._push(message, box) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, once."""
        found = []
        for message_id in message_ids:
            box = self._boxes.get(message_id)
            reply = box.take(message_id) if box is not None else None
            if reply is not None:
                del self._boxes[message_id]
                found.append(reply)
        return found

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Have messages handled; returns the replies that came in time."""
        return list(self.stream(messages, timeout=timeout))

    def stream(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Have messages handled, and yield each reply when it is there."""
        deadline = None if timeout is None else time.monotonic() + timeout
        box = _Box()
        ids = {self._push(message, box) for message in messages}
        while ids:
            left_s = None if deadline is None else deadline - time.monotonic()
            reply = box.next(left_s)
            if reply is None:
                return
            ids.discard(reply.metadata.reply_to_message_id)
            self._boxes.pop(reply.metadata.reply_to_message_id, None)
            yield reply

    def close(self) -> None:
        """End the threads, once they have nothing more to do."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _push(self, message: Message, box: _Box) -> str:
        # An own number each: Flower's id is a hash of the content, which all messages of a round share.
        message_id = f"{self._run.run_id:x}-{next(self._numbers)}"
        message.metadata.__dict__["_message_id"] = message_id
        self._boxes[message_id] = box
        self._waiting.put((message, box))
        return message_id

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            message, box = job
            try:
                reply = self._handle(message)
            except Exception as error:
                reply = Message(Error(_code(error), str(error)), reply_to=message)
            reply.metadata.__dict__["_message_id"] = f"{message.metadata.message_id}-reply"
            box.put(reply)
            del job, message, box, reply


class _Box:
    """The replies to messages that were sent together."""

    def __init__(self) -> None:
        self._replies: dict[str, Message] = {}
        self._changed = threading.Condition()

    def put(self, reply: Message) -> None:
        with self._changed:
            self._replies[reply.metadata.reply_to_message_id] = reply
            self._changed.notify()

    def take(self, message_id: str) -> Message | None:
        with self._changed:
            return self._replies.pop(message_id, None)

    def next(self, timeout_s: float | None) -> Message | None:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._replies), timeout_s):
                return None
            return self._replies.pop(next(iter(self._replies)))


def _code(error: Exception) -> int:
    return ErrorCode.CLIENT_APP_RAISED_EXCEPTION if isinstance(error, FlowerGPUError) else ErrorCode.UNKNOWN
