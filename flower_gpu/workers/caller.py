"""The caller's side: start a worker, watch it, read its result, and leave no process of it behind.

:func:`run` does one call in a worker of its own. A :class:`Line` does several calls, one at a time, and keeps
its worker between them if the next call may use it.

The thread that calls :meth:`Line.run` does almost all of the work:

1. ``_sent`` sends the call to the waiting worker, or starts a new worker (``_started``). The fork server may
   end between being found and being used, so starting is tried up to ``_TRIES`` times.
2. :meth:`StartedWorker.watch` waits for the result, the exit of the worker, the time limit or a stop order.
3. A worker that stays waits for the next call. Any other worker is ended with its process group.
4. The result is read from the memory file that this process has made, once the worker cannot change it.

Other threads may do two things. :meth:`Line.cancel` kills the running worker; ``_lock`` protects
``_running``, so that it never kills a worker that is already reaped. A :class:`StopOrder` makes all watching
threads end their workers.

Who waits for whom:

- The caller waits for a worker's exit functions only for ``WAIT_FOR_EXIT_S``, unless the worker has a lease.
  After that a background thread ends the worker (``_leave_behind``), while the next call begins.
- SIGKILL does not end a worker that hangs in the kernel. The caller gives up after ``KILLED_S`` and reports
  it. A background thread keeps waiting, and keeps the lease locked until the worker is gone (``_end_later``).

Ctrl-C may arrive at any time in the main thread. Where it could lose a descriptor or a worker, it is deferred
to the end of the block (:func:`deferred_interrupts`). After any exception the worker is ended, because it
must not answer the next call with the result of this one.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flower_gpu import standard_streams
from flower_gpu.errors import (
    InvalidResultError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)
from flower_gpu.files import duplicated
from flower_gpu.unkillable import KILLED_S
from flower_gpu.workers import (
    call_end,
    call_watch,
    confined_replies,
    memory_files,
    oom_kills,
    own_process,
    threads,
    transport,
)
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call, load_task, run_preload_once, set_up
from flower_gpu.workers.call_end import Outcome
from flower_gpu.workers.call_watch import CallWatch
from flower_gpu.workers.events import Sink, send, sending_to
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.interrupts import deferred_interrupts
from flower_gpu.workers.life import StopOrder
from flower_gpu.workers.started_worker import StartedWorker

_TRIES = 3

_log = logging.getLogger("flwr.flower_gpu")


class SupportsClose(Protocol):
    """An object with a close method."""

    def close(self) -> None:
        """Close it."""


def run(call: Call, method: start.StartMethod | str, **options: Any) -> Any:
    """Return the value of a call that runs in a worker of its own. For the options, see :meth:`Line.run`.

    The worker is gone afterwards.
    """
    with closing(Line()) as line:
        return line.run(call, method, **options)


class Line:
    """A sequence of calls that run one at a time, in the same worker where possible.

    Its public attributes:

    - ``call_s``: seconds that the last call took, including the start of a new worker.
    - ``had_imports``: True if the last call imported libraries that later workers may be forked with.
    - ``peak_bytes``: highest memory use seen in any worker of this line.
    - ``is_cancelled``: True if the current call must end.
    """

    def __init__(self) -> None:
        self._worker: StartedWorker | None = None
        # The place at the fork server that forked the last worker.
        self._place: client.ServerPlace | None = None
        self._method = start.SPAWN
        self._likeness: Any = None  # properties that a call must share to use the worker
        self._calls = 0  # number of calls that the worker has done
        self._lock = threading.Lock()
        self._running: StartedWorker | None = None  # the worker that :meth:`cancel` kills
        self.is_cancelled = False
        self.peak_bytes = 0
        self.call_s = 0.0
        self.had_imports = False

    @property
    def has_worker(self) -> bool:
        """Return True if a worker waits for another call."""
        return self._worker is not None

    @property
    def idle_pid(self) -> int:
        """Return the pid of the waiting worker, or -1."""
        return -1 if self._worker is None else self._worker.pid

    @property
    def descriptor(self) -> int:
        """Return a descriptor that becomes readable when the waiting worker exits, or -1."""
        return -1 if self._worker is None else self._worker.descriptor

    def has_lost_worker(self) -> bool:
        """Return True if the waiting worker has exited."""
        return self._worker is not None and self._worker.has_exited()

    def begin(self) -> None:
        """Begin the next call, and forget that an earlier call was cancelled."""
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the current call. May be called from any thread."""
        with self._lock:
            self.is_cancelled = True
            if self._running is not None:
                self._running.kill()

    def run(self, call: Call, method: start.StartMethod | str, **options: Any) -> Any:
        """Run a call and return its task's value.

        ``method``: a start method from :func:`flower_gpu.workers.methods.choose`, or its name.
        ``options``: fields of :class:`_RunOptions`.

        Raises WorkerStartError if no worker could be started, or the task could not be passed to it.
        Raises WorkerDiedError if the worker exited without a result.
        Raises WorkerTimeoutError after ``timeout_s``.
        Raises WorkerStoppedError after the stop order ``stopped_by``.
        Raises the exception of the task, with the worker's traceback as its cause.
        """
        if isinstance(method, str):
            method = start.METHODS[method]
        run_options = _RunOptions(method, **options)
        if not method.is_own_process:
            if run_options.on_start is not None:
                run_options.on_start(os.getpid(), method.name)
            return _run_here(call, run_options.on_event)
        while True:
            seen, outcome = self._done(call, run_options)
            # The worker exited before it read the call, so another worker can do the call.
            if seen.has_ended and not seen.is_begun:
                continue
            if seen.set_too_late is None:
                break
            # The place is closed as well, because its server has read other variables.
            self.close()
            if call.confinement is not None:
                # An unconfined fork server must not get the variables of a confined app. A fresh interpreter
                # imports libraries after the app has set the variables.
                run_options.method = start.SPAWN
            else:
                start.remember_variables(call, seen.set_too_late, may_spawn=run_options.otherwise is not None)
        if outcome is not None:
            return call_end.unwrap(call, outcome)
        raise call_end.without_result(seen, run_options.timeout_s, self.call_s)

    def retire(self) -> None:
        """Tell the waiting worker to exit, and wait for it."""
        if self._worker is not None:
            self._worker.leave(time.monotonic() + call_watch.EXIT_GRACE_S)
            self._end_worker()

    def close(self) -> None:
        """End the worker, if any, and release the place at its fork server."""
        with deferred_interrupts():
            self._end_worker()
            place, self._place = self._place, None
            if place is not None:
                place.close()

    def _done(self, call: Call, run_options: _RunOptions) -> tuple[CallWatch, Outcome | None]:
        """Run a call, and return the facts about it and its outcome, or None without a result."""
        began, kills = time.monotonic(), oom_kills.count()
        files: dict[str, int] = {}
        try:
            worker, is_new = self._sent(call, run_options, files)
            seen = CallWatch(
                call, worker.pid, run_options.on_event, is_begun=is_new, on_look=run_options.on_look
            )
            with self._lock:
                if self.is_cancelled:
                    raise WorkerDiedError(f"{call.label} was cancelled before its worker had started")
                self._running = worker
            if run_options.on_start is not None:
                run_options.on_start(worker.pid, self._method.name)
            worker.watch(seen, run_options.deadline, run_options.stopped_by)
            if not seen.stays:
                order = run_options.stopped_by
                is_asked = not seen.is_stopped or order is None or order.asks_where
                if seen.hangs and is_asked and not seen.is_cancelled:
                    worker.ask_where_it_is()
                if seen.is_late_to_exit:
                    self._leave_behind(seen)
                else:
                    self._end_worker()
            else:
                self._calls += 1
            if seen.exitcode == -signal.SIGKILL and seen.has_ended and not self.is_cancelled:
                seen.is_out_of_memory = oom_kills.claim(kills)
            self.call_s, self.had_imports = time.monotonic() - began, bool(seen.imported)
            self.peak_bytes = max(self.peak_bytes, seen.peak_bytes)
            outcome = None
            if seen.has_result:
                outcome = _read_outcome(call, files["reply"], files.get("request", -1))
            return seen, outcome
        except BaseException:  # The worker must not answer the next call.
            self.close()
            raise
        finally:
            with deferred_interrupts():
                with self._lock:
                    self._running = None
                for descriptor in files.values():
                    os.close(descriptor)
            memory_files.sharing.release()

    def _sent(
        self, call: Call, run_options: _RunOptions, files: dict[str, int]
    ) -> tuple[StartedWorker, bool]:
        """Send a call to the waiting worker or a new worker. Return the worker, and True if it is new.

        ``files``: receives the call's memory files as soon as they are open.
        """
        standard_streams.fill()
        try:
            with deferred_interrupts():
                files["reply"] = memory_files.create("flower-gpu-reply")
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error
        # The number of threads may differ, because a worker sets it for each call.
        likeness = (
            run_options.method,
            *client.likeness(replace(call, env={**call.env, threads.VARIABLE: ""})),
        )
        if self._worker is not None and self._likeness != likeness:
            self.retire()
        if self._worker is not None and not self._worker.has_exited():
            with deferred_interrupts():
                start.write_request(call, files, preloaded=bool(call.preload), is_new=False)
            with suppress(start.Gone):  # the worker has just exited
                self._worker.take(call, files, stays=self._calls + 1 < run_options.calls)
                return self._worker, False
        self._end_worker()
        self._likeness = likeness
        return self._started(call, run_options, files), True

    def _started(self, call: Call, run_options: _RunOptions, files: dict[str, int]) -> StartedWorker:
        for _ in range(_TRIES):
            with deferred_interrupts():
                try:
                    self._method, self._place = start.prepare(
                        call,
                        run_options.method,
                        run_options.otherwise,
                        run_options.deadline,
                        self._place,
                        files,
                    )
                except TimeoutError as error:
                    raise WorkerTimeoutError(
                        f"{call.label}: no worker within timeout_s={run_options.timeout_s:g}, {error}. Raise "
                        "timeout_s if this was only slow"
                    ) from error
                with suppress(start.Gone):  # the fork server ended after it was found
                    stays = run_options.calls > 1
                    self._worker = StartedWorker(call, self._method, self._place, files, stays=stays)
                    return self._worker
        raise WorkerStartError(f"{call.label}: the fork server ended repeatedly")

    def _leave_behind(self, seen: CallWatch) -> None:
        """Let a worker that has done its call exit in the background, so that the next call can begin."""
        seen.on_event = None  # No events are sent after the end of the call.
        with deferred_interrupts():
            with self._lock:
                self._running = None
            worker, self._worker = self._worker, None
            assert worker is not None
            self._end_later(worker, call_watch.EXIT_GRACE_S - call_watch.WAIT_FOR_EXIT_S)

    def _end_worker(self) -> None:
        with deferred_interrupts():
            with self._lock:
                self._running = None
            worker, self._worker = self._worker, None
            self._calls = 0
            if worker is None:
                return
            is_ended = True
            try:
                is_ended = worker.end(KILLED_S)
            finally:
                if is_ended:
                    worker.close()
            if not is_ended:
                stuck_in = call_end.cannot_be_killed(worker.stuck_in)
                _log.warning("the worker (pid %d) %s", worker.pid, stuck_in)
                self._end_later(worker)

    def _end_later(self, worker: StartedWorker, leave_s: float = 0.0) -> None:
        """Start a thread that ends a worker which exits slowly, or which SIGKILL does not end.

        ``leave_s``: seconds until the worker is killed.

        The thread also gets the place at the fork server, because the server forks one worker at a time for
        a place. It keeps the ticket of the lease locked, because a confined worker does not hold that lock.
        """
        to_close: list[SupportsClose] = [worker]
        if self._place is not None:
            to_close.append(self._place)
            self._place = None
        if worker.lease_descriptor >= 0:
            to_close.append(duplicated(worker.lease_descriptor))

        def end(patience_s: float | None = None) -> None:
            with ExitStack() as stack:
                for resource in reversed(to_close):
                    stack.callback(resource.close)
                stack.callback(worker.end, patience_s)
                worker.leave(time.monotonic() + leave_s)

        try:
            threading.Thread(target=end, name="flower-gpu-leaving", daemon=True).start()
        except RuntimeError:  # The thread limit is reached. The call has its result, so it can wait here.
            end(KILLED_S)


@dataclass
class _RunOptions:
    """The options of a call."""

    method: start.StartMethod
    #: Seconds until the worker and its children are killed. Ignored if the call runs in this process.
    timeout_s: float | None = None
    on_event: Sink | None = None
    #: Callback for looks at the worker's memory, called at intervals with the pid of the worker.
    on_look: Callable[[int], None] | None = None
    #: Callback for the start, called with the pid of the worker and the name of the start method.
    on_start: Callable[[int, str], None] | None = None
    #: Start method if no fork server can be used; None raises an error. With FORK, ForkInsteadError is raised
    #: then, and also if the call cannot be passed to another process.
    otherwise: start.StartMethod | None = None
    #: Order with which another thread can end the worker.
    stopped_by: StopOrder | None = None
    #: Number of calls that a worker runs before it exits. It exits at once after a call that failed.
    calls: int = 1
    #: Time limit on the clock of ``time.monotonic``.
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            self.deadline = time.monotonic() + self.timeout_s


def _run_here(call: Call, on_event: Sink | None) -> Any:
    with own_process.inside(), own_process.restored_environment(call.env):
        os.environ.update(call.env)
        with sending_to(on_event), set_up(call.setup):
            run_preload_once(call.preload)
            task = load_task(call.task)
            send("task_started")
            value = task(*call.args, **call.kwargs)
            send("worker_result")
            return value


def _read_outcome(call: Call, reply: int, request: int) -> Outcome:
    """Return the outcome that the worker wrote.

    Raises WorkerError or InvalidResultError if it cannot be read.

    ``request``: descriptor of the request, -1 if the worker inherited its request by fork.
    """
    if call.confinement is not None:
        return confined_replies.read_reply(reply)
    try:
        outcome: Outcome = transport.read_reply(reply, request)
    except WorkerError:
        raise
    except Exception as error:
        raise InvalidResultError(
            f"{call.label} returned something that this process cannot rebuild "
            f"({type(error).__name__}: {error}). Return numpy arrays, numbers, strings, and lists or "
            "dicts of them"
        ) from error
    return outcome
