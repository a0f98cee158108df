"""Runs calls on a line to the workers of a zygote."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from flower_gpu.errors import WorkerDiedError, WorkerStartError
from flower_gpu.isolation import outcomes, start, transport
from flower_gpu.isolation.call import Call
from flower_gpu.isolation.events import Sink
from flower_gpu.isolation.forkserver import sockets
from flower_gpu.isolation.streams import Stream, echo
from flower_gpu.isolation.zygote import wire
from flower_gpu.isolation.zygote.process import Process, close_socket
from flower_gpu.isolation.zygote.watch import Watch
from flower_gpu.isolation.zygote.zygote import Zygote

_EXIT_GRACE_S = 10.0  # of a worker that is to leave


class Line:
    """Runs calls, one at a time, in workers of a zygote.

    Parameters
    ----------
    zygote : Zygote
        It forks them.
    """

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._process: Process | None = None
        self._connection: socket.socket | None = None
        self._life = self._stdout = self._stderr = -1
        self._calls = 0  # of the worker that is there
        self._idle_pid = -1  # the same
        self._env: Mapping[str, str] = {}
        self._watch: Watch | None = None
        self._is_cancelled = False
        #: The most memory that a worker of this line was seen to take.
        self.peak_bytes = 0

    @property
    def has_worker(self) -> bool:
        """Whether a worker waits for another call."""
        return self._calls > 0

    @property
    def is_cancelled(self) -> bool:
        """Whether the call that was begun is to be ended."""
        return self._is_cancelled

    def run(
        self,
        call: Call,
        timeout_s: float | None = None,
        on_event: Sink | None = None,
        on_start: Callable[[int, str], None] | None = None,
        calls: int = 1,
    ) -> Any:
        """Run a call and return what its task returned.

        Parameters
        ----------
        call, timeout_s, on_event, on_start
            As for :func:`flower_gpu.isolation.worker.run`, and so are the errors.
        calls : int
            How many calls a worker runs before it ends. One that has failed ends at once.
        """
        began = time.monotonic()
        request = start.write_request(call, preloaded=bool(call.preload))
        try:
            try:
                reply = transport.create("flower-gpu-reply")
            except OSError as error:
                raise WorkerStartError(f"cannot start a worker: {error}") from error
            try:
                watch = self._watched(call, request, reply, timeout_s, on_event, on_start, calls)
                if watch.has_result:
                    outcome = outcomes.read(call.label, reply, request)
            finally:
                os.close(reply)
        finally:
            os.close(request)
        if watch.has_result:
            return outcomes.unwrap(call, outcome)
        if watch.is_late and timeout_s is not None:
            raise outcomes.timed_out(call, watch.pid, timeout_s, watch.import_s, watch.tail)
        if watch.lost:
            raise WorkerDiedError(f"{call.label}: the worker (pid {watch.pid}) is gone: {watch.lost}")
        raise outcomes.died(call, watch.pid, watch.status, time.monotonic() - began, watch.tail)

    def retire(self) -> None:
        """Let the worker that waits for another call end, and wait for that."""
        if self._calls == 0 or self._connection is None:
            return
        self._calls = 0
        self._connection.settimeout(_EXIT_GRACE_S)
        try:
            wire.send(self._connection, {"leave": True})
            while (message := wire.receive(self._connection)[0]).get("event") != "exited":
                pass
        except sockets.Gone:  # or it takes too long to leave
            self.close()
            return
        self._connection.settimeout(None)
        if message["status"] != 0:  # it was killed before, and what was sent is still there
            self.close()

    def cancel(self) -> None:
        """End the call that was begun, from another thread."""
        self._is_cancelled = True
        if self._watch is not None:
            self._watch.cancel()

    def begin(self) -> None:
        """Take the next call, which was not cancelled yet."""
        self._is_cancelled, self._watch = False, None

    def close(self) -> None:
        """Let go of the line; a worker on it is ended."""
        self._calls, self._idle_pid = 0, -1
        if self._connection is not None:
            close_socket(self._connection)
            self._connection = None
            start.close_life_end(self._life)
            for descriptor in (self._stdout, self._stderr):
                os.close(descriptor)

    def _watched(
        self,
        call: Call,
        request: int,
        reply: int,
        timeout_s: float | None,
        on_event: Sink | None,
        on_start: Callable[[int, str], None] | None,
        calls: int,
    ) -> Watch:
        if self._calls and self._env != call.env:
            self.retire()
        message = {
            "label": call.label,
            "env": dict(call.env),
            "setup": call.setup,
            "stays": self._calls + 1 < calls,
        }
        descriptors = [request, reply, *([call.held] if call.held >= 0 else [])]
        for last in (False, False, True):
            watch: Watch | None = None
            try:
                process = self._open()
                assert self._connection is not None
                watch = self._watch = Watch(self._connection, process, self._idle_pid, on_event, on_start)
                if self._is_cancelled:
                    raise WorkerDiedError(f"{call.label} was cancelled before its worker was there")
                streams = [
                    Stream(self._stdout, echo(sys.stdout, watch.tail)),
                    Stream(self._stderr, echo(sys.stderr, watch.tail)),
                ]
                wire.send(self._connection, message, descriptors)
                watch.until(None if timeout_s is None else time.monotonic() + timeout_s, streams)
                break
            except sockets.Gone as error:  # the zygote has ended, and its workers with it
                self.close()
                if watch is not None and (watch.pid >= 0 or watch.is_late):
                    watch.lost = str(error)
                    return watch
                if last:
                    raise WorkerStartError(f"{call.label}: no worker: {error}") from error
            except BaseException:  # its worker must not answer the next call
                self.close()
                raise
        assert watch is not None
        if watch.imported:
            self._zygote.imported(watch.imported, at_once=watch.is_late)
        self._calls = self._calls + 1 if watch.stays else 0
        self._idle_pid = watch.pid if watch.stays else -1
        self.peak_bytes = max(self.peak_bytes, watch.peak_bytes)
        self._env = call.env
        for stream in streams:
            stream.drain()
        if not watch.has_result:
            self.close()  # the call may still be there, unread
        if watch.no_worker:
            raise WorkerStartError(f"cannot start a worker: {watch.no_worker}")
        return watch

    def _open(self) -> Process:
        if self._process is not None and self.has_worker and not self._process.has_ended():
            return self._process
        process = self._zygote.process()
        if self._connection is not None and process is self._process:
            return process
        self.close()
        with start.start_lock, ExitStack() as kept, ExitStack() as theirs:

            def pipe() -> tuple[int, int]:
                read, write = os.pipe()
                kept.callback(os.close, read)
                theirs.callback(os.close, write)
                return read, write

            try:
                ours, workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                kept.callback(ours.close)
                theirs.callback(workers_end.close)
                life, life_end = start.life_pipe()
                kept.callback(start.close_life_end, life_end)
                theirs.callback(os.close, life)
                (stdout, stdout_end), (stderr, stderr_end) = pipe(), pipe()
            except OSError as error:
                raise WorkerStartError(f"cannot start a worker: {error}") from error
            process.open_line([workers_end.fileno(), stdout_end, stderr_end, life])
            kept.pop_all()
        self._connection, self._process = ours, process
        self._life, self._stdout, self._stderr = life_end, stdout, stderr
        return process
