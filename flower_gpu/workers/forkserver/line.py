"""Runs calls on a line to the workers of a run's own fork server."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from flower_gpu.errors import WorkerDiedError, WorkerStartError
from flower_gpu.workers import methods as start
from flower_gpu.workers import outcomes, transport
from flower_gpu.workers.call import Call
from flower_gpu.workers.events import Sink
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.forkserver.run_server import RunServer, ServerProcess, close_socket
from flower_gpu.workers.life import close_life_end, life_pipe
from flower_gpu.workers.methods import OF_RUN
from flower_gpu.workers.outcomes import Stream, Tail, output_of

_LOOK_S = 1.0  # between two looks at a run's fork server that is waited for
_MAX_WAIT_S = 3600.0  # at once: the kernel takes at most 24 days
_END_S = 10.0
_EXIT_GRACE_S = 10.0  # from the result to the exit: atexit functions, CUDA's own cleanup
_KILLED_S = 2.0  # from its SIGKILL to the end of its group
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it


class Watch:
    """One call that a worker does: what it says, until it is done."""

    def __init__(
        self,
        connection: socket.socket,
        process: ServerProcess,
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
        self.no_worker = self.sys_exit = ""
        self.imported: list[str] = []
        self.import_s = 0.0
        self.peak_bytes = 0
        self._deadline: float | None = None
        self._connection = connection
        self._process = process
        self._on_event = on_event
        self._on_start = on_start
        self.has_ended = False
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
            wait_s = _LOOK_S if self._waits_for_server() else _MAX_WAIT_S
            wait_s = wait_s if left_s is None else min(left_s, wait_s)
            ready = {number for number, _ in poll.poll(wait_s * 1000)}
            for descriptor in ready & of_descriptor.keys():
                of_descriptor[descriptor].read()
            if not ready and self._waits_for_server() and self._process.hangs(max(self.pid, self._idle_pid)):
                self._process.kill()
                raise sockets.Gone("the process that forks workers was stopped, or hung, and was ended")
            if self._connection.fileno() in ready:  # first: it may have said how it ended
                self._on_message(*sockets.receive(self._connection))
            elif self._process.connection.fileno() in ready:
                raise sockets.Gone("the process that forks workers has ended")

    def _waits_for_server(self) -> bool:
        """Whether the next word is the run's fork server's: of a worker that is to start, or has to end."""
        return self.pid < 0 or self.has_result or self.is_late

    def _be_late(self) -> None:
        now = time.monotonic()
        if self.pid < 0 and not self.is_late:  # it has only just been asked for
            self.is_late = True
            self._deadline = now + _END_S
        elif self.pid < 0 and self._idle_pid >= 0:  # the worker hangs that was there, not its server
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
                self._on_start(self.pid, OF_RUN.name)
        elif event == "result":
            self.has_result, self.stays = True, message["stays"]
            self._deadline = time.monotonic() + _EXIT_GRACE_S
            self.peak_bytes = message["peak_bytes"]
            self._is_over = self.stays
            if self._on_event is not None:
                told = {name: message[name] for name in ("task_at", "cpu_s", "stays")}
                self._on_event({"event": "worker_result", **told})
        elif event == "exited":
            # Of the worker before, that ended after its result: nobody has waited for it.
            if self.pid in (-1, message["pid"]):
                self.has_ended = self.pid >= 0
                self.status, self.peak_bytes = message["status"], message["peak_bytes"]
                self._is_over = self.pid >= 0
        elif event == "importing":
            self.import_s = float(message["seconds"])
        elif event == "sys_exit":
            self.sys_exit = message["where"]
        elif event == "imported":
            self.imported = message["names"]
        elif event == "no_worker":
            self.no_worker = message["error"]
            self._is_over = True
        elif self._on_event is not None:
            self._on_event(message)


def _wait_for_end(connection: socket.socket, pid: int) -> None:
    """Wait until a worker that was killed is gone, with its group; not for ever."""
    deadline = time.monotonic() + _KILLED_S
    with suppress(sockets.Gone):
        while (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            message, descriptors = sockets.receive(connection)
            for descriptor in descriptors:
                os.close(descriptor)
            if message.get("event") == "exited" and message["pid"] == pid:
                return


class Line:
    """Runs calls, one at a time, in workers of a run's fork server."""

    def __init__(self, server: RunServer) -> None:
        self._server = server
        self._process: ServerProcess | None = None
        self._connection: socket.socket | None = None
        self._ends = ExitStack()  # of connection, life pipe and outputs
        self._stdout = self._stderr = -1
        self._calls = 0  # of the worker that is there
        self._idle_pid = -1  # the same
        self._env: Mapping[str, str] = {}
        self._watch: Watch | None = None
        self._is_cancelled = False
        #: The most memory that a worker of this line was seen to take.
        self.peak_bytes = 0
        #: How long the last call took, from when it was sent; and what of it were imports, at least (None:
        #: its worker had nothing to import).
        self.call_s = 0.0
        self.import_s: float | None = None

    @property
    def descriptor(self) -> int:
        """What can be read when a worker that waits for a call is gone; -1: there is no line yet."""
        return -1 if self._connection is None else self._connection.fileno()

    def has_lost_worker(self) -> bool:
        """Tell whether the worker that waited for a call is gone."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def has_worker(self) -> bool:
        """Whether a worker waits for another call."""
        return self._calls > 0

    @property
    def idle_pid(self) -> int:
        """The pid of that worker; -1: there is none."""
        return self._idle_pid if self._calls else -1

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

        ``calls``: how many calls a worker runs before it ends. One that has failed ends at once.
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
                    outcome = outcomes.read(call, reply, request)
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
        after_s = time.monotonic() - began
        raise outcomes.died(call, watch.pid, watch.status, watch.sys_exit, after_s, watch.tail)

    def retire(self) -> None:
        """Let the worker that waits for another call end, and wait for that."""
        if self._calls == 0 or self._connection is None:
            return
        self._calls = 0
        self._connection.settimeout(_EXIT_GRACE_S)
        try:
            sockets.send(self._connection, {"leave": True})
            while (message := sockets.receive(self._connection)[0]).get("event") != "exited":
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
        pid = self._idle_pid
        if pid < 0 and self._watch is not None and not self._watch.has_ended:
            pid = self._watch.pid
        connection, self._connection = self._connection, None
        self._calls, self._idle_pid, self._watch = 0, -1, None
        with self._ends:
            if connection is not None and self._process is not None and pid >= 0:
                # Before the life pipe is closed: that would kill its resource tracker as well, which has
                # files to remove.
                self._process.signal(pid, signal.SIGKILL)
                _wait_for_end(connection, pid)

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
        more = {"held": call.held, "shared": transport.shared_by(request)}
        more = {name: descriptor for name, descriptor in more.items() if descriptor >= 0}
        message = {
            "label": call.label,
            "env": dict(call.env),
            "setup": call.setup,
            "stays": self._calls + 1 < calls,
            "more": list(more),
        }
        descriptors = [request, reply, *more.values()]
        for last in (False, False, True):
            watch: Watch | None = None
            try:
                process = self._open()
                assert self._connection is not None
                watch = self._watch = Watch(self._connection, process, self._idle_pid, on_event, on_start)
                if self._is_cancelled:
                    raise WorkerDiedError(f"{call.label} was cancelled before its worker was there")
                streams = [
                    Stream(self._stdout, output_of(call, sys.stdout, watch.tail)),
                    Stream(self._stderr, output_of(call, sys.stderr, watch.tail)),
                ]
                sent = time.monotonic()
                sockets.send(self._connection, message, descriptors)
                watch.until(None if timeout_s is None else time.monotonic() + timeout_s, streams)
                break
            except sockets.Gone as error:  # the run's fork server has ended, and its workers with it
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
        self.call_s = time.monotonic() - sent
        self.import_s = watch.import_s if watch.imported else None
        if watch.imported:
            self._server.imported(watch.imported, at_once=watch.is_late)
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

    def _open(self) -> ServerProcess:
        if self._process is not None and self.has_worker and not self._process.has_ended():
            return self._process
        process = self._server.process()
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
                kept.callback(close_socket, ours)
                theirs.callback(workers_end.close)
                life, life_end = life_pipe()
                kept.callback(close_life_end, life_end)
                theirs.callback(os.close, life)
                (stdout, stdout_end), (stderr, stderr_end) = pipe(), pipe()
            except OSError as error:
                raise WorkerStartError(f"cannot start a worker: {error}") from error
            process.open_line([workers_end.fileno(), stdout_end, stderr_end, life])
            self._ends = kept.pop_all()
        self._connection, self._process = ours, process
        self._stdout, self._stderr = stdout, stderr
        return process
