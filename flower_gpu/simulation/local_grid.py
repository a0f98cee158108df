"""Handles the messages of a run on this machine: threads have them handled, each in a worker."""

from __future__ import annotations

import math
import threading
import time
from typing import Any, Protocol

from flwr.app import Message
from flwr.supercore.run import Run

from flower_gpu.simulation.boxes import Box
from flower_gpu.simulation.grid import SHORT_S, SimulationGrid, reply_of
from flower_gpu.simulation.nodes import VirtualNodes


class Handler(Protocol):
    """Handles messages, one at a time in each thread; may keep a worker from one message to the next."""

    def __call__(self, message: Message) -> Message:
        """Handle a message; what is raised becomes the reply."""

    def idle(self) -> None:
        """Let others have what this thread's worker holds, if they need it: no message waits."""

    def leave(self) -> None:
        """Let go of this thread's worker: there will be no message."""

    def cancel(self, message: Message) -> None:
        """End the handling of a message, in whatever thread that is."""

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so."""


class LocalGrid(SimulationGrid):
    """Hands messages to threads that have them handled, each in a worker.

    ``run``, ``nodes``, ``options``: as for :class:`flower_gpu.simulation.grid.SimulationGrid`.
    ``handle``: handles a message.
    ``threads``: how many messages are handled at a time, at most.
    ``has_spare``: whether there is one more while messages are short and many wait: it is written, or its
    reply read, while the others are computed.
    """

    def __init__(
        self,
        run: Run,
        nodes: VirtualNodes,
        handle: Handler,
        threads: int,
        *,
        has_spare: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(run, nodes, **options)
        self._handle = handle
        self._most_unread = 2 * (threads + has_spare)
        self._most = threads
        self._call_s = math.inf  # that messages take, a mean of the last ones
        self._start_threads(
            threading.Thread(
                target=self._work,
                args=(number >= threads,),
                name=f"flower-gpu-simulation-{number}",
                daemon=True,
            )
            for number in range(threads + has_spare)
        )

    def cancel(self, message: Message) -> None:
        """End the handling of a message, whose reply nobody wants."""
        self._handle.cancel(message)

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker."""
        return self._handle.stuck_since()

    def _take(self, is_spare: bool) -> tuple[Message, Box] | None:
        """Return a message whose reply there is room for, if there is any at this moment."""
        if is_spare and self._call_s > SHORT_S:
            return None  # it would only take the cores from the others
        for box in self._waiting:
            if box.has_room() and (not is_spare or len(box.waiting) > self._most):
                message = box.begin()
                if not box.has_waiting:
                    self._waiting.remove(box)
                return message, box
        return None

    def _work(self, is_spare: bool) -> None:
        while not self._is_closed:
            with self._changed:
                job = self._take(is_spare)
            if job is None:
                self._handle.idle()
                with self._changed:
                    while job is None and not self._is_closed:
                        job = self._take(is_spare)
                        if job is None:
                            self._changed.wait()
            if job is not None:
                self._do(*job)
            del job
        self._handle.leave()

    def _do(self, message: Message, box: Box) -> None:
        reply = None
        began = time.monotonic()
        try:
            reply = reply_of(self._handled, message)
            if not reply.has_error():
                seconds = time.monotonic() - began
                self._call_s = seconds if math.isinf(self._call_s) else (3 * self._call_s + seconds) / 4
        finally:
            with self._changed:
                box.end(message, reply)

    def _handled(self, message: Message) -> Message:
        self.check_node(message)
        return self._handle(message)
