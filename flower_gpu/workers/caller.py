"""The caller's side: start a worker, watch it, take its results, make sure that nothing of it is left."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from flower_gpu.errors import WorkerDiedError, WorkerStartError, WorkerTimeoutError
from flower_gpu.workers import checked_events, memory_files, outcomes, own_calls, socket_folder
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call, load_task, run_preload_once, set_up
from flower_gpu.workers.events import Sink, note_imported, send, sending_to
from flower_gpu.workers.forkserver import client, sockets
from flower_gpu.workers.life import (
    LeftProcesses,
    StopOrder,
    deferred_interrupts,
    end_group,
    end_later,
)
from flower_gpu.workers.outcome import Outcome
from flower_gpu.workers.outcomes import Stream, Tail, output_of

_EXIT_GRACE_S = 10.0  # from the result to the exit: atexit functions, CUDA's own cleanup
_WAIT_FOR_EXIT_S = 1.0  # of that, before the next call may begin; all of it for a worker with a lease
_CHILDREN_GRACE_S = 0.5  # from its exit to the end of its group: resource trackers tidy up
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it
_POLL_S = 0.05  # only where the kernel has no pidfd
_SIGNAL_S = 0.5  # in the main thread, which a signal that another thread raises does not wake
_MAX_WAIT_S = 3600.0  # at once: the kernel takes at most 24 days
_MOST_LATE = 1000  # messages of a worker that is gone: a child of it may go on to write
_TRIES = 3

OnStart = Callable[[int, str], None]


def run(
    call: Call,
    method: start.StartMethod | str,
    timeout_s: float | None = None,
    on_event: Sink | None = None,
    on_start: OnStart | None = None,
    or_spawn: bool = False,
    or_copy: bool = False,
    stopped_by: StopOrder | None = None,
) -> Any:
    """Run ``call`` in a worker of its own, and return what its task returned, once the worker is gone.

    As of :meth:`Line.run`.
    """
    with closing(Line()) as line:
        return line.run(call, method, timeout_s, on_event, on_start, or_spawn, or_copy, stopped_by)


class Line:
    """Runs calls, one at a time, each in the worker of the one before where that may have another.

    Attributes: of the last call ``call_s``, how long it took from when it was sent, with the start of its
    worker if that was new, and ``had_imports``, whether it had to import libraries that later workers may be
    forked with; ``peak_bytes``, the most memory that a worker of this line was seen to take;
    ``is_cancelled``, whether the call that was begun is to be ended.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._place: client.ServerPlace | None = None  # at the fork server that has forked the last one
        self._method = start.SPAWN
        self._like: Any = None  # calls that the worker may have
        self._calls = 0  # that it has done
        self._lock = threading.Lock()
        self._running: _Worker | None = None  # what :meth:`cancel` ends
        self.is_cancelled = False
        self.peak_bytes = 0
        self.call_s = 0.0
        self.had_imports = False

    @property
    def has_worker(self) -> bool:
        """Whether a worker waits for another call."""
        return self._worker is not None

    @property
    def idle_pid(self) -> int:
        """The pid of that worker; -1: there is none."""
        return -1 if self._worker is None else self._worker.pid

    @property
    def descriptor(self) -> int:
        """What can be read when a worker that waits for a call is gone; -1: there is none."""
        return -1 if self._worker is None else self._worker.descriptor

    def has_lost_worker(self) -> bool:
        """Tell whether the worker that waited for a call is gone."""
        return self._worker is not None and self._worker.has_exited()

    def begin(self) -> None:
        """Take the next call, which was not cancelled yet."""
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the call that was begun, from another thread."""
        with self._lock:
            self.is_cancelled = True
            if self._running is not None:
                self._running.kill()

    def run(
        self,
        call: Call,
        method: start.StartMethod | str,
        timeout_s: float | None = None,
        on_event: Sink | None = None,
        on_start: OnStart | None = None,
        or_spawn: bool = False,
        or_copy: bool = False,
        stopped_by: StopOrder | None = None,
        calls: int = 1,
    ) -> Any:
        """Run a call and return what its task returned.

        ``method``: what :func:`flower_gpu.workers.methods.choose` returned, or its name.
        ``timeout_s``: seconds after which the worker and its children are ended. Not enforced where the call
        runs in this process.
        ``on_start``: receives the pid of the worker, and how it was started.
        ``or_spawn``: spawn the worker where there can be no fork server, instead of an error.
        ``or_copy``: raise CopyInsteadError there, and where the call cannot be passed to another process.
        ``stopped_by``: by which another thread can have the worker ended.
        ``calls``: how many calls a worker runs before it ends. One that has failed ends at once.
        Raises WorkerStartError: the worker could not be started.
        Raises WorkerDiedError: it ended without a result.
        Raises WorkerTimeoutError: it took longer than ``timeout_s``.
        Raises WorkerStoppedError: ``stopped_by`` said so.
        Raises Exception: what the task raised, with the worker's traceback as its cause.
        """
        if isinstance(method, str):
            method = start.named(method)
        if not method.is_own_process:
            if on_start is not None:
                on_start(os.getpid(), method.name)
            return _run_here(call, on_event)
        wanted = _Wanted(method, timeout_s, on_event, on_start, or_spawn, or_copy, stopped_by, calls)
        while True:
            seen, outcome = self._done(call, wanted)
            if seen.is_unread:
                continue
            if seen.set_too_late is None:
                break
            self.close()  # also its place: that server has read other variables
            if call.confinement is not None:
                # Its variables must not be those of a process that is not confined yet. A fresh interpreter
                # imports libraries after the app has set them.
                wanted.method = start.SPAWN
            else:
                start.remember_variables(call, seen.set_too_late, or_spawn=or_spawn)
        if outcome is not None:
            return outcomes.unwrap(call, outcome)
        if seen.is_stopped:
            raise outcomes.stopped(call, seen.pid, seen.tail)
        if seen.hangs:
            assert timeout_s is not None
            raise outcomes.timed_out(call, seen.pid, timeout_s, seen.import_s, seen.tail)
        raise outcomes.died(call, seen.pid, seen.exitcode, seen.sys_exit, self.call_s, seen.tail)

    def retire(self) -> None:
        """Let the worker that waits for another call end, and wait for that."""
        if self._worker is not None:
            self._worker.leave(time.monotonic() + _EXIT_GRACE_S)
            self._end_worker()

    def close(self) -> None:
        """End a worker that is there, and let go of its fork server."""
        with deferred_interrupts():
            self._end_worker()
            place, self._place = self._place, None
            if place is not None:
                place.close()

    def _done(self, call: Call, wanted: _Wanted) -> tuple[_CallWatch, Outcome | None]:
        """Have a call done; return what was seen of it, and its outcome where there is one."""
        began = time.monotonic()
        files: dict[str, int] = {}
        try:
            worker, is_new = self._sent(call, wanted, files)
            seen = _CallWatch(call, worker.pid, wanted.on_event, is_begun=is_new)
            with self._lock:
                if self.is_cancelled:
                    raise WorkerDiedError(f"{call.label} was cancelled before its worker was there")
                self._running = worker
            if wanted.on_start is not None:
                wanted.on_start(worker.pid, self._method.name)
            worker.watch(seen, wanted.deadline, wanted.stopped_by)
            if not seen.stays:
                order = wanted.stopped_by
                if seen.hangs and (not seen.is_stopped or order is None or order.asks_where):
                    worker.ask_where_it_is()
                if seen.is_late_to_exit:
                    self._leave_behind(seen)
                else:
                    self._end_worker()
            else:
                self._calls += 1
            self.call_s, self.had_imports = time.monotonic() - began, seen.had_imports
            self.peak_bytes = max(self.peak_bytes, seen.peak_bytes)
            outcome = None
            if seen.has_result:
                outcome = outcomes.read(call, files["reply"], files.get("request", -1))
            return seen, outcome
        except BaseException:  # its worker must not answer the next call
            self.close()
            raise
        finally:
            with deferred_interrupts():
                with self._lock:
                    self._running = None
                for descriptor in files.values():
                    os.close(descriptor)

    def _sent(self, call: Call, wanted: _Wanted, files: dict[str, int]) -> tuple[_Worker, bool]:
        """Send a call to the worker that is there, or to a new one; tell which, and whether it is new.

        ``files``: takes the memory files of the call, once they are open.
        """
        try:
            with deferred_interrupts():
                files["reply"] = memory_files.create("flower-gpu-reply")
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error
        like = (wanted.method, *client.likeness(call))
        if self._worker is not None and self._like != like:
            self.retire()
        if self._worker is not None and not self._worker.has_exited():
            with deferred_interrupts():
                files["request"] = start.write_request(call, preloaded=bool(call.preload))
            try:
                self._worker.take(call, files, stays=self._calls + 1 < wanted.calls)
                return self._worker, False
            except start.Gone:  # it ends just now
                os.close(files.pop("request"))
        self._end_worker()
        self._like = like
        return self._started(call, wanted, files), True

    def _started(self, call: Call, wanted: _Wanted, files: dict[str, int]) -> _Worker:
        for tries_left in reversed(range(_TRIES)):
            with deferred_interrupts():
                place, self._place = self._place, None
                prepared = wanted.prepared(call, place)
                try:
                    self._worker = _Worker(call, prepared, files["reply"], stays=wanted.calls > 1)
                except BaseException as error:
                    prepared.close()
                    if not isinstance(error, start.Gone):
                        raise
                    if not tries_left:  # each time between finding the fork server and using it
                        text = f"{call.label}: the fork server ended again and again"
                        raise WorkerStartError(text) from error
                    continue
                self._method, self._place = prepared.method, prepared.place
                if prepared.request >= 0:
                    files["request"] = prepared.request
                return self._worker
        raise AssertionError

    def _leave_behind(self, seen: _CallWatch) -> None:
        """Let a worker that has done its call take its time to exit, while the next one begins."""
        seen.on_event = None  # the call is over
        with deferred_interrupts():
            with self._lock:
                self._running = None
            worker, place, self._worker, self._place = self._worker, self._place, None, None
            assert worker is not None

            def end() -> None:
                with closing(worker):
                    worker.leave(time.monotonic() + _EXIT_GRACE_S - _WAIT_FOR_EXIT_S)
                    worker.end()
                if place is not None:
                    place.close()

            threading.Thread(target=end, name="flower-gpu-leaving", daemon=True).start()

    def _end_worker(self) -> None:
        with deferred_interrupts():
            with self._lock:
                self._running = None
            worker, self._worker = self._worker, None
            self._calls = 0
            if worker is not None:
                try:
                    worker.end()
                finally:
                    worker.close()


@dataclass
class _Wanted:
    """How a call is to be done; see :meth:`Line.run`."""

    method: start.StartMethod
    timeout_s: float | None
    on_event: Sink | None
    on_start: OnStart | None
    or_spawn: bool
    or_copy: bool
    stopped_by: StopOrder | None
    calls: int
    deadline: float | None = None  # on the clock of ``time.monotonic``

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            self.deadline = time.monotonic() + self.timeout_s

    def prepared(self, call: Call, place: client.ServerPlace | None) -> start.Prepared:
        """Do what comes before the start of its worker; see :func:`flower_gpu.workers.methods.prepare`."""
        try:
            return start.prepare(
                call,
                self.method,
                or_spawn=self.or_spawn,
                or_copy=self.or_copy,
                deadline=self.deadline,
                place=place,
            )
        except TimeoutError as error:
            raise WorkerTimeoutError(
                f"{call.label}: no worker within timeout_s={self.timeout_s:g}, {error}. Raise timeout_s if "
                "this was only slow"
            ) from error


@dataclass
class _CallWatch:
    """What is known of one call that a worker does."""

    call: Call
    pid: int
    on_event: Sink | None
    #: Whether the worker has read it; of a new one that need not be told.
    is_begun: bool
    tail: Tail = field(default_factory=Tail)
    has_result: bool = False
    #: Whether the worker waits for another call.
    stays: bool = False
    #: Whether it is gone, and how it ended as far as that is known (``-n``: by signal ``n``).
    has_ended: bool = False
    exitcode: int | None = None
    #: Whether it was to be ended because its caller was told to.
    is_stopped: bool = False
    #: Variables that the task's module set after the fork server's libraries had read them.
    set_too_late: dict[str, str | None] | None = None
    #: Where its task has called sys.exit.
    sys_exit: str = ""
    #: Seconds that it has been importing, at least.
    import_s: float = 0.0
    #: Whether these were libraries that its fork server did not have.
    had_imports: bool = False
    peak_bytes: int = 0

    @property
    def hangs(self) -> bool:
        """Whether the worker has to be ended while it does the call."""
        return not self.has_ended and not self.has_result

    @property
    def exit_s(self) -> float:
        """How long to wait for the worker's exit after the result."""
        may_be_late = self.call.held < 0 and self.call.confinement is None
        return min(_EXIT_GRACE_S, _WAIT_FOR_EXIT_S) if may_be_late else _EXIT_GRACE_S

    @property
    def is_late_to_exit(self) -> bool:
        """Whether the worker has not exited by then, and nobody has to wait for that."""
        return self.has_result and not self.has_ended and self.exit_s < _EXIT_GRACE_S

    @property
    def is_unread(self) -> bool:
        """Whether the worker ended before it has read the call: then another one can do it."""
        return self.has_ended and not self.is_begun

    def take(self, told: dict[str, Any]) -> None:
        """Take what the worker tells."""
        event = told if self.call.confinement is None else checked_events.checked(told)
        if event is None:
            return
        kind = event.get("event")
        if kind == "result":
            self.has_result, self.stays = True, bool(event.get("stays"))
            self.peak_bytes = event.get("peak_bytes") or 0
            if self.on_event is not None:
                self.on_event({**event, "event": "worker_result"})
        elif kind == "begun":
            self.is_begun = True
        elif kind == "importing":
            self.import_s = float(event["seconds"])
        elif kind == "sys_exit":
            self.sys_exit = str(event["where"])
        elif kind == "imported":
            self.had_imports = bool(event["names"])
            note_imported(event["names"])
        elif kind == "set_too_late":
            self.set_too_late = event["variables"]
        elif self.on_event is not None:
            self.on_event(event)


class _Worker:
    """One worker with the caller's ends of its lines: started, watched through its calls, ended.

    Raises WorkerStartError or Gone as :func:`flower_gpu.workers.methods.launch` does.
    """

    def __init__(self, call: Call, prepared: start.Prepared, reply: int, *, stays: bool) -> None:
        self._is_confined = call.confinement is not None
        self._is_from_server = prepared.method.from_server
        self._left: LeftProcesses | None = None
        if self._is_confined and not self._is_from_server:  # a fork server does that itself
            self._left = LeftProcesses()
        try:
            self._process, self._lines = start.launch(call, prepared, reply, stays=stays)
        except BaseException:
            self._end_left()
            raise
        self._seen: _CallWatch | None = None
        self._streams: dict[int, Stream] = {}
        self._calls = self._lines.calls.fileno()
        self._pidfd = _open_pidfd(self.pid)
        #: What is still open at the other end.
        self._open = {self._calls, self._lines.stdout, self._lines.stderr}
        self._poll = select.poll()
        for descriptor in self._open | {self._pidfd} - {-1}:
            self._poll.register(descriptor, select.POLLIN)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def descriptor(self) -> int:
        """What can be read once it is gone."""
        return self._pidfd if self._pidfd >= 0 else self._calls

    def has_exited(self) -> bool:
        """Whether it is gone; its pid is still its own."""
        return self._process.has_exited()

    def take(self, call: Call, files: dict[str, int], *, stays: bool) -> None:
        """Send it another call.

        Raises Gone if that is too late.
        """
        start.send_call(call, self._lines.calls, files["request"], files["reply"], stays=stays)

    def kill(self) -> None:
        """Kill it, also from another thread."""
        with suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def watch(self, seen: _CallWatch, deadline: float | None, stopped_by: StopOrder | None = None) -> None:
        """Wait for the end of a call, on the worker's lines, the deadline and an order to stop together.

        It ends with the worker, or, if that stays, with the result.
        """
        self._seen = seen
        for descriptor, target in ((self._lines.stdout, sys.stdout), (self._lines.stderr, sys.stderr)):
            self._streams[descriptor] = Stream(descriptor, output_of(seen.call, target, seen.tail))
        order = -1 if stopped_by is None else stopped_by.descriptor
        if order >= 0:
            self._poll.register(order, select.POLLIN)
        try:
            is_leaving = False
            while not seen.stays and not seen.is_stopped:
                if seen.has_result and not is_leaving:
                    is_leaving, deadline = True, time.monotonic() + seen.exit_s
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return
                if self._wait_once(left_s, order):
                    seen.has_ended = True
                    return
        finally:
            with suppress(KeyError, ValueError):  # it was given, or there is none
                self._poll.unregister(order)
        for stream in self._streams.values():
            stream.drain()

    def leave(self, deadline: float) -> None:
        """Let it end, as there are no more calls; wait for that."""
        with suppress(OSError):  # it has ended
            self._lines.calls.shutdown(socket.SHUT_WR)
        self._wait(deadline)

    def ask_where_it_is(self) -> None:
        """Have a hung worker write the stacks of its threads into its output."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)
        self._wait(time.monotonic() + _STACK_DUMP_S)

    def end(self) -> None:
        """End it and its process group, however far it is."""
        if not self._process.has_exited():
            self.kill()
            self._wait_for_exit()
        try:
            self._let_its_children_tidy_up()
        finally:
            self._end_group()  # before its pid is free for others
            socket_folder.remove(self.pid)
            exitcode = self._process.reap()
        if self._seen is not None:
            self._seen.exitcode = exitcode
            self._seen.peak_bytes = max(self._seen.peak_bytes, self._process.peak_bytes)
        for stream in self._streams.values():
            stream.drain()

    def close(self) -> None:
        """Let go of every descriptor, and end what it has put into sessions of its own."""
        self._end_left()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._lines.close()

    def _end_left(self) -> None:
        if self._left is not None:
            self._left.end(sockets.is_server)
            self._left = None

    def _end_group(self) -> None:
        # A confined app's processes may call themselves as they like.
        if self._open and not self._is_confined and sys.platform == "linux":
            trackers, _ = end_group(self.pid)
            if trackers and not self._is_from_server:
                end_later(trackers)  # a fork server does that itself
            return
        with suppress(ProcessLookupError, PermissionError):  # the leader alone, a zombie (macOS)
            os.killpg(self.pid, signal.SIGKILL)

    def _wait(self, deadline: float) -> None:
        while (left_s := deadline - time.monotonic()) > 0 and not self._wait_once(left_s):
            pass

    def _wait_once(self, timeout_s: float | None, order: int = -1) -> bool:
        """Read what there is, or wait for it; tell whether the worker is gone, and all of that is read."""
        longest = _POLL_S
        if self._pidfd >= 0:
            longest = _MAX_WAIT_S if threading.current_thread() is not threading.main_thread() else _SIGNAL_S
        self._read_once(longest if timeout_s is None else min(timeout_s, longest), order)
        if not self._process.has_exited():
            return False
        for _ in range(_MOST_LATE):
            if self._calls not in self._open or not sockets.can_be_read(self._calls, 0):
                break
            self._receive()
        return True

    def _read_once(self, timeout_s: float, order: int = -1) -> None:
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            if descriptor == self._calls:
                self._receive()
            elif descriptor in self._streams:
                if not self._streams[descriptor].read():
                    self._forget(descriptor)
            elif descriptor == order and self._seen is not None:
                self._poll.unregister(order)
                self._seen.is_stopped = not self._seen.has_result

    def _receive(self) -> None:
        try:
            told, files = sockets.receive(self._lines.calls)
        except sockets.NotAMessage:
            return
        except sockets.Gone:
            self._forget(self._calls)
            return
        for descriptor in files:
            os.close(descriptor)
        if self._seen is not None:
            self._seen.take(told)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._open.discard(descriptor)

    def _wait_for_exit(self) -> None:
        # Without reading: that may raise, and a worker that is being killed waits for no reader.
        poll = select.poll()
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        while not self._process.has_exited():
            poll.poll(_POLL_S * 1000)

    def _let_its_children_tidy_up(self) -> None:
        """Wait a moment for processes that still have the output of the worker, which is gone."""
        if self._pidfd >= 0:  # it would end every wait at once
            self._poll.unregister(self._pidfd)
        deadline = time.monotonic() + _CHILDREN_GRACE_S
        while self._open and (left_s := deadline - time.monotonic()) > 0:
            self._read_once(left_s)


def _run_here(call: Call, on_event: Sink | None) -> Any:
    with own_calls.inside(), own_calls.borrowed(call.env):
        os.environ.update(call.env)
        with sending_to(on_event), set_up(call.setup):
            run_preload_once(call.preload)
            task = load_task(call.task)
            send("task_started")
            value = task(*call.args, **call.kwargs)
            send("worker_result")
            return value


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
        return -1
