"""One call that a worker of a zygote does, as its caller sees it."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from flower_gpu.isolation.events import Sink
from flower_gpu.isolation.forkserver import sockets
from flower_gpu.isolation.streams import Stream, Tail
from flower_gpu.isolation.zygote import wire
from flower_gpu.isolation.zygote.process import Process

#: How a worker of a zygote was started, for the trace.
START_METHOD = "zygote"

_LOOK_S = 1.0  # between two looks at a zygote that is waited for
_MAX_WAIT_S = 3600.0  # at once: the kernel takes at most 24 days
_END_S = 10.0
_EXIT_GRACE_S = 10.0  # from the result to the exit: atexit functions, CUDA's own cleanup
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it


class Watch:
    """One call that a worker does: what it says, until it is done."""

    def __init__(
        self,
        connection: socket.socket,
        process: Process,
        idle_pid: int,
        on_event: Sink | None,
        on_start: Callable[[int, str], None] | None,
    ) -> None:
        self.tail = Tail()
        self._idle_pid = idle_pid
        self.pid = -1
        self.status = 0
        self.lost = ""
        self.has_result = self.stays = self.is_late = False
        self.no_worker = ""
        self.imported: list[str] = []
        self.import_s = 0.0
        self.peak_bytes = 0
        self._deadline: float | None = None
        self._connection = connection
        self._process = process
        self._on_event = on_event
        self._on_start = on_start
        self._is_over = False
        self._is_cancelled = False

    def until(self, deadline: float | None, streams: Sequence[Stream]) -> None:
        """Wait for the worker's end, or for its result if it stays."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if self._process.has_ended():
            raise sockets.Gone("the process that forks workers has ended")
        poll.register(self._process.connection, 0)  # its end, however that came
        of_descriptor = {stream.descriptor: stream for stream in streams}
        for descriptor in of_descriptor:
            poll.register(descriptor, select.POLLIN)
        self._deadline = deadline
        while not self._is_over:
            left_s = None if self._deadline is None else self._deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                self._be_late()
                continue
            wait_s = _LOOK_S if self._waits_for_zygote() else _MAX_WAIT_S
            wait_s = wait_s if left_s is None else min(left_s, wait_s)
            ready = {number for number, _ in poll.poll(wait_s * 1000)}
            for descriptor in ready & of_descriptor.keys():
                of_descriptor[descriptor].read()
            if not ready and self._waits_for_zygote() and self._process.hangs(max(self.pid, self._idle_pid)):
                self._process.kill()
                raise sockets.Gone("the process that forks workers was stopped, or hung, and was ended")
            if self._connection.fileno() in ready:  # first: it may have said how it ended
                self._on_message(*wire.receive(self._connection))
            elif self._process.connection.fileno() in ready:
                raise sockets.Gone("the process that forks workers has ended")

    def _waits_for_zygote(self) -> bool:
        """Whether the next word is the zygote's: of a worker that is to start, or has to end."""
        return self.pid < 0 or self.has_result or self.is_late

    def _be_late(self) -> None:
        now = time.monotonic()
        if self.pid < 0 and not self.is_late:  # it has only just been asked for
            self.is_late = True
            self._deadline = now + _END_S
        elif self.pid < 0 and self._idle_pid >= 0:  # the worker that was there hangs, and not the zygote
            self._process.signal(self._idle_pid, signal.SIGKILL)
            self._idle_pid = -1
            self._deadline = now + _END_S
        elif self.pid < 0:
            threading.Thread(target=self._process.close, daemon=True).start()
            raise sockets.Gone("the process that forks workers does not answer")
        elif not self.is_late and not self.has_result:
            self.is_late = True
            self._process.signal(self.pid, signal.SIGQUIT)
            self._deadline = now + _STACK_DUMP_S
        else:
            self._process.signal(self.pid, signal.SIGKILL)
            self._deadline = None

    def cancel(self) -> None:
        """End the worker, from another thread."""
        self._is_cancelled = True
        if self.pid >= 0:
            self._process.signal(self.pid, signal.SIGKILL)

    def _on_message(self, message: dict[str, Any], descriptors: list[int]) -> None:
        event = message.get("event")
        for descriptor in descriptors:
            os.close(descriptor)
        if event == "started":
            self.pid = message["pid"]
            if self._is_cancelled:
                self.cancel()
            if self._on_start is not None:
                self._on_start(self.pid, START_METHOD)
        elif event == "result":
            self.has_result, self.stays = True, message["stays"]
            self._deadline = time.monotonic() + _EXIT_GRACE_S
            self.peak_bytes = message["peak_bytes"]
            self._is_over = self.stays
            if self._on_event is not None:
                self._on_event({"event": "worker_result", "task_at": message["task_at"]})
        elif event == "exited":
            # Of the worker before, that ended after its result: nobody has waited for it.
            if self.pid in (-1, message["pid"]):
                self.status, self.peak_bytes = message["status"], message["peak_bytes"]
                self._is_over = self.pid >= 0
        elif event == "importing":
            self.import_s = float(message["seconds"])
        elif event == "imported":
            self.imported = message["names"]
        elif event == "no_worker":
            self.no_worker = message["error"]
            self._is_over = True
        elif self._on_event is not None:
            self._on_event(message)
