"""The caller's side of a zygote: it is started, and calls are run on lines to its workers."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.errors import WorkerStartError
from flower_gpu.isolation import outcomes, start, transport
from flower_gpu.isolation import worker as one_call
from flower_gpu.isolation.call import Call
from flower_gpu.isolation.events import Sink
from flower_gpu.isolation.forkserver import sockets
from flower_gpu.isolation.streams import Stream, Tail, echo

#: How a worker of a zygote was started, for the trace.
START_METHOD = "zygote"

_PROGRAM = "flower_gpu.isolation.zygote.program:serve"
_START_S = 300.0  # imports on a busy machine take their time
_POLL_S = 0.05
_END_S = 10.0
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it
_TRIES = 3


@dataclass(frozen=True)
class ZygoteSettings:
    """What a zygote is started with.

    Parameters
    ----------
    name : str
        What its calls are of.
    start_method : str
        ``"forkserver"`` or ``"spawn"``.
    env : mapping of str to str
        Environment variables that all its workers have.
    setup : str, optional
        As of a :class:`~flower_gpu.isolation.call.Call`.
    modules : sequence of str
        Libraries that it imports before the first fork.
    rehearsal : str, optional
        As for :func:`flower_gpu.isolation.zygote.program.serve`.
    without : frozenset of str
        Top-level names of libraries that its workers have no use for, which makes forks of it cheaper.
    preload : sequence
        As of a call.
    """

    name: str
    start_method: str = "forkserver"
    env: Mapping[str, str] = field(default_factory=dict)
    setup: str | None = None
    modules: Sequence[str] = ()
    rehearsal: str | None = None
    without: frozenset[str] = frozenset()
    preload: Sequence[tuple[str, Mapping[str, Any]]] = ()


class Zygote:
    """A running zygote; another one takes its place when it has ended.

    Parameters
    ----------
    settings : ZygoteSettings
        What it is started with.
    """

    def __init__(self, settings: ZygoteSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.generation = 0
        self.pid = -1

    def start(self) -> int:
        """Start it where it is not running; return which one it is."""
        with self._lock:
            if self._is_closed:
                raise WorkerStartError("the simulation has ended")
            if self._connection is not None and sockets.is_closed(self._connection):
                self._let_go()
            if self._connection is None:
                self._start()
                self.generation += 1
            return self.generation

    def open_line(self, descriptors: Sequence[int]) -> None:
        """Give it the workers' ends of a line."""
        self._send({"line": True}, descriptors)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker, and with SIGKILL to all of its group; nothing happens if it is gone."""
        with suppress(sockets.Gone):
            self._send({"pid": pid, "signal": int(number)})

    def close(self) -> None:
        """End it and all its workers."""
        with self._lock:
            self._is_closed = True
            self._let_go()

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            if self._connection is None:
                raise sockets.Gone("it has ended")
            sockets.send(self._connection, message, descriptors)

    def _start(self) -> None:
        settings = self._settings
        address = f"flower-gpu-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
            listener.bind(f"\0{address}")
            listener.listen(1)
            listener.settimeout(_POLL_S)
            call = Call(
                _PROGRAM,
                (settings.name,),
                {"address": address, "modules": list(settings.modules), "rehearsal": settings.rehearsal},
                env=settings.env,
                setup=settings.setup,
                label=f"workers of {settings.name}",
                preload=settings.preload,
                without=settings.without,
            )
            failed: list[BaseException] = []
            self._thread = threading.Thread(target=_run, args=(call, settings.start_method, failed))
            self._thread.daemon = True
            self._thread.start()
            deadline = time.monotonic() + _START_S
            while self._connection is None:
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    if sockets.peer(connection)[1] == os.getuid():
                        self._connection = connection
                    else:
                        connection.close()
                if self._connection is None and not self._thread.is_alive():
                    raise failed[0] if failed else WorkerStartError("the zygote has ended")
                if time.monotonic() > deadline:
                    raise WorkerStartError(f"no zygote after {_START_S:g} s")
        self._connection.settimeout(_START_S)
        try:
            self.pid = sockets.receive(self._connection)[0]["ready"]
        except sockets.Gone as error:
            self._let_go()
            raise failed[0] if failed else WorkerStartError(f"the zygote has ended: {error}") from error

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._thread is not None:
            self._thread.join(_END_S)
            self._thread = None


def _run(call: Call, start_method: str, failed: list[BaseException]) -> None:
    try:
        one_call.run(call, start_method, or_spawn=True)
    except BaseException as error:
        failed.append(error)


class Line:
    """Runs calls, one at a time, in workers of a zygote.

    Parameters
    ----------
    zygote : Zygote
        It forks them.
    """

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._generation = -1
        self._connection: socket.socket | None = None
        self._life = self._stdout = self._stderr = -1
        self._calls = 0  # of the worker that is there
        self._env: Mapping[str, str] = {}
        self._watch: _Watch | None = None
        #: The most memory that a worker of this line was seen to take.
        self.peak_bytes = 0

    @property
    def has_worker(self) -> bool:
        """Whether a worker waits for another call."""
        return self._calls > 0

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
            reply = transport.create("flower-gpu-reply")
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
            raise outcomes.timed_out(call, watch.pid, timeout_s, watch.tail)
        raise outcomes.died(call, watch.pid, watch.status, time.monotonic() - began, watch.tail)

    def retire(self) -> None:
        """Let the worker that waits for another call end, and wait for that."""
        if self._calls == 0 or self._connection is None:
            return
        self._calls = 0
        with suppress(sockets.Gone):
            sockets.send(self._connection, {"leave": True})
            while sockets.receive(self._connection)[0].get("event") != "exited":
                pass

    def cancel(self) -> None:
        """End the call that runs, from another thread."""
        if self._watch is not None and self._watch.pid >= 0:
            self._zygote.signal(self._watch.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the line; a worker on it is ended."""
        if self._connection is not None:
            self._connection.close()
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
    ) -> _Watch:
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
            self._open()
            assert self._connection is not None
            watch = self._watch = _Watch(self._connection, self._zygote, on_event, on_start)
            streams = [
                Stream(self._stdout, echo(sys.stdout, watch.tail)),
                Stream(self._stderr, echo(sys.stderr, watch.tail)),
            ]
            try:
                sockets.send(self._connection, message, descriptors)
                watch.until(None if timeout_s is None else time.monotonic() + timeout_s, streams)
                break
            except sockets.Gone as error:  # the zygote has ended, and its workers with it
                self.close()
                self._calls = 0
                if watch.pid >= 0 or last:
                    if watch.pid < 0:
                        raise WorkerStartError(f"{call.label}: no worker: {error}") from error
                    watch.status = None
                    return watch
        self._calls = self._calls + 1 if watch.stays else 0
        self.peak_bytes = max(self.peak_bytes, watch.peak_bytes)
        self._env = call.env
        for stream in streams:
            stream.drain()
        if watch.no_worker:
            raise WorkerStartError(f"cannot start a worker: {watch.no_worker}")
        return watch

    def _open(self) -> None:
        generation = self._zygote.start()
        if self._connection is not None and generation == self._generation:
            return
        self.close()
        self._calls = 0
        with start.start_lock:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            life, self._life = start.life_pipe()
            self._stdout, stdout = os.pipe()
            self._stderr, stderr = os.pipe()
            self._connection = ours
            try:
                self._zygote.open_line([theirs.fileno(), stdout, stderr, life])
            finally:
                theirs.close()
                for descriptor in (stdout, stderr, life):
                    os.close(descriptor)
        self._generation = generation


class _Watch:
    """One call that a worker does: what it says, until it is done."""

    def __init__(
        self,
        connection: socket.socket,
        zygote: Zygote,
        on_event: Sink | None,
        on_start: Callable[[int, str], None] | None,
    ) -> None:
        self.tail = Tail()
        self.pid = -1
        self.status: int | None = 0
        self.has_result = self.stays = self.is_late = False
        self.no_worker = ""
        self.peak_bytes = 0
        self._connection = connection
        self._zygote = zygote
        self._on_event = on_event
        self._on_start = on_start
        self._is_over = False

    def until(self, deadline: float | None, streams: Sequence[Stream]) -> None:
        """Wait for the worker's end, or for its result if it stays."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        of_descriptor = {stream.descriptor: stream for stream in streams}
        for descriptor in of_descriptor:
            poll.register(descriptor, select.POLLIN)
        asked = False
        while not self._is_over:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                if self.pid < 0:  # it has only just been asked for
                    deadline = time.monotonic() + _POLL_S
                elif not asked and not self.has_result:
                    asked = self.is_late = True
                    self._zygote.signal(self.pid, signal.SIGQUIT)
                    deadline = time.monotonic() + _STACK_DUMP_S
                else:
                    self._zygote.signal(self.pid, signal.SIGKILL)
                    deadline = None
                continue
            for descriptor, _ in poll.poll(None if left_s is None else left_s * 1000):
                if descriptor in of_descriptor:
                    of_descriptor[descriptor].read()
                else:
                    self._on_message(sockets.receive(self._connection)[0])

    def _on_message(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event == "started":
            self.pid = message["pid"]
            if self._on_start is not None:
                self._on_start(self.pid, START_METHOD)
        elif event == "result":
            self.has_result, self.stays = True, message["stays"]
            self.peak_bytes = message["peak_bytes"]
            self._is_over = self.stays
        elif event == "exited":
            # Of the worker before, that ended after its result: nobody has waited for it.
            if self.pid in (-1, message["pid"]):
                self.status, self.peak_bytes = message["status"], message["peak_bytes"]
                self._is_over = self.pid >= 0
        elif event == "no_worker":
            self.no_worker = message["error"]
            self._is_over = True
        elif self._on_event is not None:
            self._on_event(message)
