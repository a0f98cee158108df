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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from flower_gpu.errors import FlowerGPUError, WorkerDiedError, WorkerStartError
from flower_gpu.isolation import outcomes, start, transport
from flower_gpu.isolation import worker as one_call
from flower_gpu.isolation.call import Call
from flower_gpu.isolation.events import Sink
from flower_gpu.isolation.forkserver import client, sockets
from flower_gpu.isolation.streams import Stream, Tail, echo
from flower_gpu.isolation.zygote import wire

#: How a worker of a zygote was started, for the trace.
START_METHOD = "zygote"

_PROGRAM = "flower_gpu.isolation.zygote.program:serve"
_START_S = 300.0  # imports on a busy machine take their time
_POLL_S = 0.05
_END_S = 10.0
_EXIT_GRACE_S = 10.0  # from the result to the exit: atexit functions, CUDA's own cleanup
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it
_MAX_RENEWALS = 5


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
    seeds : bool
        As there.
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
    seeds: bool = True
    without: frozenset[str] = frozenset()
    preload: Sequence[tuple[str, Mapping[str, Any]]] = ()


class Zygote:
    """What forks the workers of one caller: one process after another, each with what the last one lacked.

    Parameters
    ----------
    settings : ZygoteSettings
        What the first one is started with.
    """

    def __init__(self, settings: ZygoteSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._current: Process | None = None
        self._earlier: list[Process] = []
        self._is_closed = False
        self._known = set(settings.modules)
        self._unfit: set[str] = set()
        self._renewals = 0
        self._renewing: threading.Thread | None = None

    def process(self) -> Process:
        """Return the process that forks new workers; start it where there is none.

        Raises
        ------
        WorkerStartError
            If it cannot be started.
        """
        with self._lock:
            if self._is_closed:
                raise WorkerStartError("this caller wants no more workers")
            if self._current is not None and self._current.has_ended():
                self._current.close()
                self._current = None
            if self._current is None:
                self._current = self._start()
            return self._current

    def imported(self, names: Sequence[str]) -> None:
        """Take note of libraries that a worker had to import: soon there is a process that has them."""
        with self._lock:
            new = [name for name in names if name not in self._known]
            if (
                not new
                or self._is_closed
                or self._renewals >= _MAX_RENEWALS
                or (self._renewing is not None and self._renewing.is_alive())
            ):
                return
            self._known.update(new)
            self._renewals += 1
            self._renewing = threading.Thread(target=self._renew, args=(new,), daemon=True)
            self._renewing.start()

    def close(self) -> None:
        """End it and all its workers."""
        with self._lock:
            self._is_closed = True
            processes = [*self._earlier, *([self._current] if self._current is not None else [])]
        for process in processes:
            process.close()

    def _renew(self, names: list[str]) -> None:
        settings = replace(self._settings, modules=(*self._settings.modules, *names))
        try:
            if settings.start_method == "forkserver":
                client.learn(names, settings.without)  # it tries whether they survive a fork
            new = self._started(settings)
        except (FlowerGPUError, OSError):  # one of them ends a process: the one that is there goes on without
            return
        with self._lock:
            self._settings = settings
            old, self._current = self._current, new
            if old is not None:
                self._earlier.append(old)
        if old is not None:
            old.drain()
        if self._is_closed:
            new.close()

    def _start(self) -> Process:
        try:
            return self._started(self._settings)
        except WorkerDiedError:
            if not self._settings.modules:
                raise
        self._settings = replace(self._settings, modules=(), rehearsal=None)
        return self._started(self._settings)

    def _started(self, settings: ZygoteSettings) -> Process:
        while True:
            modules = [name for name in settings.modules if name.partition(".")[0] not in self._unfit]
            try:
                return Process(replace(settings, modules=modules))
            except _UnfitError as error:
                if not error.libraries - self._unfit:
                    raise WorkerStartError(f"the zygote cannot do without {error}") from error
                self._unfit |= error.libraries


class _UnfitError(Exception):
    def __init__(self, libraries: set[str]) -> None:
        super().__init__(", ".join(sorted(libraries)))
        self.libraries = libraries


class Process:
    """One running zygote.

    Parameters
    ----------
    settings : ZygoteSettings
        What it is started with.

    Raises
    ------
    WorkerStartError
        If it cannot be started.
    """

    def __init__(self, settings: ZygoteSettings) -> None:
        self.pid = -1
        self._lock = threading.Lock()
        self._failed: list[BaseException] = []
        address = f"flower-gpu-{secrets.token_hex(16)}"
        call = Call(
            _PROGRAM,
            (settings.name,),
            {
                "address": address,
                "modules": list(settings.modules),
                "rehearsal": settings.rehearsal,
                "seeds": settings.seeds,
            },
            env=settings.env,
            setup=settings.setup,
            label=f"workers of {settings.name}",
            preload=settings.preload,
            without=settings.without,
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
            listener.bind(f"\0{address}")
            listener.listen(1)
            self._thread = threading.Thread(
                target=_run, args=(call, settings.start_method, self._failed), daemon=True
            )
            self._thread.start()
            self.connection = self._accepted(listener)
        try:
            self.connection.settimeout(_START_S)
            said, _ = wire.receive(self.connection)
        except sockets.Gone as error:
            self.close()
            raise self._error(str(error)) from error
        if "unfit" in said:
            self.close()
            raise _UnfitError(set(said["unfit"]))
        self.pid = said["ready"]

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.connection.fileno() < 0 or sockets.is_closed(self.connection)

    def open_line(self, descriptors: Sequence[int]) -> None:
        """Give it the workers' ends of a line."""
        self._send({"line": True}, descriptors)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker, and with SIGKILL to all of its group; nothing happens if it is gone."""
        with suppress(sockets.Gone):
            self._send({"pid": pid, "signal": int(number)})

    def drain(self) -> None:
        """Let it end when its last line is closed."""
        with suppress(sockets.Gone):
            self._send({"drain": True})

    def close(self) -> None:
        """End it and all its workers."""
        _close(self.connection)
        self._thread.join(_END_S)
        if self._thread.is_alive() and self.pid >= 0:  # stopped, or it waits for memory
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._thread.join(_END_S)

    def _accepted(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(_POLL_S)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                if sockets.peer(connection)[1] == os.getuid():
                    return connection
                connection.close()
            if not self._thread.is_alive():
                raise self._error("it ended at once")
        raise WorkerStartError(f"no zygote after {_START_S:g} s")

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            wire.send(self.connection, message, descriptors)

    def _error(self, text: str) -> BaseException:
        self._thread.join(_END_S)
        return self._failed[0] if self._failed else WorkerStartError(f"the zygote has ended: {text}")


def _close(connection: socket.socket) -> None:
    """Close a socket for the other end to see, even where a fork of this process has it, too."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


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
        self._process: Process | None = None
        self._connection: socket.socket | None = None
        self._life = self._stdout = self._stderr = -1
        self._calls = 0  # of the worker that is there
        self._idle_pid = -1  # the same
        self._env: Mapping[str, str] = {}
        self._watch: _Watch | None = None
        self._is_cancelled = False
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
            raise outcomes.timed_out(call, watch.pid, timeout_s, watch.tail)
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
            _close(self._connection)
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
            watch: _Watch | None = None
            try:
                process = self._open()
                assert self._connection is not None
                watch = self._watch = _Watch(self._connection, process, self._idle_pid, on_event, on_start)
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
            self._zygote.imported(watch.imported)
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


class _Watch:
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
            ready = {number for number, _ in poll.poll(None if left_s is None else left_s * 1000)}
            for descriptor in ready & of_descriptor.keys():
                of_descriptor[descriptor].read()
            if self._connection.fileno() in ready:  # first: it may have said how it ended
                self._on_message(*wire.receive(self._connection))
            elif self._process.connection.fileno() in ready:
                raise sockets.Gone("the process that forks workers has ended")

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
        elif event == "exited":
            # Of the worker before, that ended after its result: nobody has waited for it.
            if self.pid in (-1, message["pid"]):
                self.status, self.peak_bytes = message["status"], message["peak_bytes"]
                self._is_over = self.pid >= 0
        elif event == "imported":
            self.imported = message["names"]
        elif event == "no_worker":
            self.no_worker = message["error"]
            self._is_over = True
        elif self._on_event is not None:
            self._on_event(message)
