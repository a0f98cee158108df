"""The caller's side: start a worker, watch it, take its result, make sure that nothing of it is left."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flower_gpu.errors import WorkerStartError, WorkerTimeoutError
from flower_gpu.workers import checked_events, outcomes, own_calls, socket_folder
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call, load_task, run_preload_once, set_up
from flower_gpu.workers.events import Sink, note_imported, send, sending_to
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.life import (
    LeftProcesses,
    Process,
    StopOrder,
    deferred_interrupts,
    end_group,
    end_later,
)
from flower_gpu.workers.outcomes import Lines, Stream, Tail, output_of
from flower_gpu.workers.worker import Outcome

_EXIT_GRACE_S = 10.0  # from the result to the exit: atexit functions, CUDA's own cleanup
_CHILDREN_GRACE_S = 0.5  # from its exit to the end of its group: resource trackers tidy up
_STACK_DUMP_S = 0.5  # from asking a hung worker where it is to ending it
_MOST_OF_EVENT = 1 << 20  # characters, from a confined worker
_POLL_S = 0.05  # only where the kernel has no pidfd
_SIGNAL_S = 0.5  # in the main thread, which a signal that another thread raises does not wake
_MAX_WAIT_S = 3600.0  # at once: the kernel takes at most 24 days


def run(
    call: Call,
    method: start.StartMethod | str,
    timeout_s: float | None = None,
    on_event: Sink | None = None,
    on_start: Callable[[int, str], None] | None = None,
    or_spawn: bool = False,
    or_copy: bool = False,
    stopped_by: StopOrder | None = None,
) -> Any:
    """Run ``call`` and return what its task returned, once the worker is gone.

    ``method``: what :func:`flower_gpu.workers.methods.choose` returned, or its name.
    ``timeout_s``: seconds after which the worker and its children are ended. Not enforced where the call runs
    in this process.
    ``on_start``: receives the pid of the worker, and how it was started.
    ``or_spawn``: spawn the worker where there can be no fork server, instead of an error.
    ``or_copy``: raise CopyInsteadError there, and where the call cannot be passed to another process.
    ``stopped_by``: by which another thread can have the worker ended.
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
    began = time.monotonic()
    deadline = None if timeout_s is None else began + timeout_s

    def prepare() -> start.Prepared:
        try:
            return start.prepare(call, method, or_spawn=or_spawn, or_copy=or_copy, deadline=deadline)
        except TimeoutError as error:
            raise WorkerTimeoutError(
                f"{call.label}: no worker within timeout_s={timeout_s:g}, {error}. Raise timeout_s if this "
                "was only slow"
            ) from error

    with _started(call, prepare, on_event) as worker:
        if on_start is not None:
            on_start(worker.pid, worker.start_method)
        finished = worker.watch_until(deadline, stopped_by)
        if not finished and (stopped_by is None or not worker.is_stopped or stopped_by.asks_where):
            worker.ask_where_it_is()
        with deferred_interrupts():
            exitcode = worker.end()
        outcome = worker.outcome(call)
    if worker.set_too_late is not None and call.confinement is not None:
        # Its variables must not be those of a process that is not confined yet. A fresh interpreter imports
        # libraries after the app has set them.
        left_s = None if deadline is None else max(0.001, deadline - time.monotonic())
        return run(call, start.SPAWN, left_s, on_event, on_start, or_spawn, stopped_by=stopped_by)
    if worker.set_too_late is not None:
        start.remember_variables(call, worker.set_too_late, or_spawn=or_spawn)
        left_s = None if deadline is None else max(0.001, deadline - time.monotonic())
        return run(call, method, left_s, on_event, on_start, or_spawn, stopped_by=stopped_by)
    if outcome is not None:
        return outcomes.unwrap(call, outcome)
    if worker.is_stopped:
        raise outcomes.stopped(call, worker.pid, worker.tail)
    if not finished:
        assert timeout_s is not None
        raise outcomes.timed_out(call, worker.pid, timeout_s, worker.import_s, worker.tail)
    after_s = time.monotonic() - began
    raise outcomes.died(call, worker.pid, exitcode, worker.sys_exit, after_s, worker.tail)


class _Worker:
    """One started worker with the caller's ends of its lines."""

    def __init__(self) -> None:
        self.tail = Tail()
        #: Variables that the task's module set after the fork server's libraries had read them.
        self.set_too_late: dict[str, str | None] | None = None
        #: Where its task has called sys.exit.
        self.sys_exit = ""
        #: Seconds that it has been importing, at least.
        self.import_s = 0.0
        #: Whether it was ended because its caller was told to.
        self.is_stopped = False
        self._order = -1
        self._process: Process | None = None
        self._lines: start.Lines | None = None
        self._prepared: start.Prepared | None = None
        self._streams: list[Stream] = []
        self._has_result = False
        self._ended = False
        self._exitcode: int | None = None
        self._pidfd = -1
        self._is_confined = False
        self._left: LeftProcesses | None = None
        try:
            self._selector = selectors.DefaultSelector()
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    @property
    def start_method(self) -> str:
        return self._prepared.method.name if self._prepared is not None else ""

    def launch(self, call: Call, prepared: start.Prepared, on_event: Callable[[str], None]) -> None:
        self._is_confined = call.confinement is not None
        if self._is_confined and not prepared.method.from_server:
            self._left = self._left or LeftProcesses()  # a fork server does that itself
        self._process, self._lines = start.launch(call, prepared)
        self._prepared = prepared
        self._pidfd = _open_pidfd(self.pid)
        if self._pidfd >= 0:
            self._selector.register(self._pidfd, selectors.EVENT_READ)
        for descriptor, on_data in (
            (self._lines.events, Lines(on_event, None if call.confinement is None else _MOST_OF_EVENT)),
            (self._lines.stdout, output_of(call, sys.stdout, self.tail)),
            (self._lines.stderr, output_of(call, sys.stderr, self.tail)),
        ):
            stream = Stream(descriptor, on_data)
            self._streams.append(stream)
            self._selector.register(descriptor, selectors.EVENT_READ, stream)

    def on_result(self) -> None:
        self._has_result = True

    def watch_until(self, deadline: float | None, stopped_by: StopOrder | None = None) -> bool:
        """Wait for the worker's exit on its pipes, its process, the deadline and an order to stop together.

        Returns whether it exited, or has delivered its result and only its exit takes too long.
        """
        exit_deadline: float | None = None
        if stopped_by is not None:
            self._order = stopped_by.descriptor
            self._selector.register(self._order, selectors.EVENT_READ)
        while True:
            if self._has_result and exit_deadline is None:
                exit_deadline = deadline = time.monotonic() + _EXIT_GRACE_S
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return self._has_result
            if self._wait_once(remaining):
                return True
            if self.is_stopped:
                return False

    def ask_where_it_is(self) -> None:
        """Have a hung worker write the stacks of its threads into its output."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)
        deadline = time.monotonic() + _STACK_DUMP_S
        while (remaining := deadline - time.monotonic()) > 0 and not self._wait_once(remaining):
            pass

    def end(self) -> int | None:
        """End the worker and its process group, however far it is; return its exit status if it is known."""
        if self._process is not None and not self._ended:
            if not self._process.has_exited():
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self._wait_for_exit(self._process)
            try:
                self._let_its_children_tidy_up()
            finally:
                self._end_group()  # before its pid is free for others
                socket_folder.remove(self.pid)
                self._exitcode = self._process.reap()
                self._ended = True
            for stream in self._streams:
                stream.drain()
        if self._left is not None:  # also where it could not be started
            self._left.end(sockets.is_server)
            self._left = None
        return self._exitcode

    def _end_group(self) -> None:
        # A confined app's processes may call themselves as they like.
        if self._selector.get_map() and not self._is_confined and sys.platform == "linux":
            trackers, _ = end_group(self.pid)
            if trackers and self._prepared is not None and not self._prepared.method.from_server:
                end_later(trackers)  # a fork server does that itself
            return
        with suppress(ProcessLookupError, PermissionError):  # the leader alone, a zombie (macOS)
            os.killpg(self.pid, signal.SIGKILL)

    def outcome(self, call: Call) -> Outcome | None:
        """Read the result, or return None when the worker left none."""
        if not self._has_result or self._lines is None or self._prepared is None:
            return None
        return outcomes.read(call, self._lines.reply, self._prepared.request)

    def close(self) -> None:
        """Let go of every descriptor."""
        self._selector.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self._prepared is not None:
            self._prepared.close()
        if self._lines is not None:
            self._lines.close()

    def _wait_once(self, timeout_s: float | None) -> bool:
        longest = _POLL_S
        if self._pidfd >= 0:
            longest = _MAX_WAIT_S if threading.current_thread() is not threading.main_thread() else _SIGNAL_S
        self._read_once(longest if timeout_s is None else min(timeout_s, longest))
        return self._process is None or self._process.has_exited()

    def _read_once(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._order:
                self.is_stopped = not self._has_result
            if key.fd == self._order or (key.data is not None and not key.data.read()):
                self._selector.unregister(key.fd)

    def _wait_for_exit(self, process: Process) -> None:
        # Without reading: that may raise, and a worker that is being killed waits for no reader.
        poll = select.poll()
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        while not process.has_exited():
            poll.poll(_POLL_S * 1000)

    def _let_its_children_tidy_up(self) -> None:
        """Wait a moment for processes that still have the output of the worker, which is gone."""
        if self._pidfd >= 0:  # it would end every wait at once
            self._selector.unregister(self._pidfd)
        if self._order >= 0 and self._order in self._selector.get_map():  # nor is that its output
            self._selector.unregister(self._order)
        deadline = time.monotonic() + _CHILDREN_GRACE_S
        while self._selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            self._read_once(remaining)


@contextmanager
def _started(call: Call, prepare: Callable[[], start.Prepared], on_event: Sink | None) -> Iterator[_Worker]:
    """Start a worker; whatever happens in the block, afterwards nothing of it is left."""
    worker = _Worker()
    handle = _event_handler(worker, on_event, is_checked=call.confinement is not None)
    try:
        for last in (False, False, True):
            with deferred_interrupts():
                prepared = prepare()
                try:
                    worker.launch(call, prepared, handle)
                    break
                except BaseException as error:
                    prepared.close()
                    if not isinstance(error, start.Gone):
                        raise
                    if last:  # each time between finding the fork server and using it
                        text = f"{call.label}: the fork server ended again and again"
                        raise WorkerStartError(text) from error
        yield worker
    finally:
        with deferred_interrupts():
            try:
                worker.end()
            finally:
                worker.close()


def _event_handler(worker: _Worker, on_event: Sink | None, is_checked: bool) -> Callable[[str], None]:
    def handle(line: str) -> None:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # torn by a kill, or no event
            return
        if isinstance(event, dict) and is_checked:
            event = checked_events.checked(event)
        if not isinstance(event, dict):
            return
        if event.get("event") == "result":
            worker.on_result()
            if on_event is not None:
                on_event({**event, "event": "worker_result"})
        elif event.get("event") == "importing":
            worker.import_s = float(event["seconds"])
        elif event.get("event") == "sys_exit":
            worker.sys_exit = str(event["where"])
        elif event.get("event") == "imported":
            note_imported(event["names"])
        elif event.get("event") == "set_too_late":
            worker.set_too_late = event["variables"]
        elif on_event is not None:
            on_event(event)

    return handle


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
