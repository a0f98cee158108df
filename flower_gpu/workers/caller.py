"""The caller's side: start a worker, watch it, take its results, make sure that nothing of it is left."""

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
    confined_replies,
    memory_files,
    oom_kills,
    own_process,
    started_worker,
    threads,
    transport,
)
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call, load_task, run_preload_once, set_up
from flower_gpu.workers.call_end import Outcome
from flower_gpu.workers.events import Sink, send, sending_to
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.interrupts import deferred_interrupts
from flower_gpu.workers.life import StopOrder
from flower_gpu.workers.started_worker import CallWatch, StartedWorker

_TRIES = 3

_log = logging.getLogger("flwr.flower_gpu")


class SupportsClose(Protocol):
    """An object that has to be closed."""

    def close(self) -> None:
        """Close it."""


def run(call: Call, method: start.StartMethod | str, **options: Any) -> Any:
    """Run a call in a worker of its own, which is gone afterwards; the rest as of :meth:`Line.run`."""
    with closing(Line()) as line:
        return line.run(call, method, **options)


class Line:
    """Runs calls, one at a time, each in the worker of the one before where that may have another.

    Attributes: of the last call ``call_s``, how long it took from when it was sent, with the start of its
    worker if that was new, and ``had_imports``, whether it had to import libraries that later workers may be
    forked with; ``peak_bytes``, the most memory that a worker of this line was seen to take;
    ``is_cancelled``, whether the call that was begun is to be ended.
    """

    def __init__(self) -> None:
        self._worker: StartedWorker | None = None
        self._place: client.ServerPlace | None = None  # at the fork server that has forked the last one
        self._method = start.SPAWN
        self._like: Any = None  # calls that the worker may have
        self._calls = 0  # that it has done
        self._lock = threading.Lock()
        self._running: StartedWorker | None = None  # what :meth:`cancel` ends
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

    def run(self, call: Call, method: start.StartMethod | str, **options: Any) -> Any:
        """Run a call and return its task's value.

        ``method``: what :func:`flower_gpu.workers.methods.choose` returned, or its name. ``options``: as in
        :class:`_How`.

        Raises WorkerStartError, WorkerDiedError, WorkerTimeoutError: as they say.
        Raises WorkerStoppedError: ``stopped_by`` said so.
        Raises Exception: what the task raised, with the worker's traceback as its cause.
        """
        if isinstance(method, str):
            method = start.METHODS[method]
        how = _How(method, **options)
        if not method.is_own_process:
            if how.on_start is not None:
                how.on_start(os.getpid(), method.name)
            return _run_here(call, how.on_event)
        while True:
            seen, outcome = self._done(call, how)
            if seen.has_ended and not seen.is_begun:  # before it has read the call: another one can do it
                continue
            if seen.set_too_late is None:
                break
            self.close()  # also its place: that server has read other variables
            if call.confinement is not None:
                # Its variables must not be those of a process that is not confined yet. A fresh interpreter
                # imports libraries after the app has set them.
                how.method = start.SPAWN
            else:
                start.remember_variables(call, seen.set_too_late, may_spawn=how.otherwise is not None)
        if outcome is not None:
            return call_end.unwrap(call, outcome)
        raise call_end.without_result(seen, how.timeout_s, self.call_s)

    def retire(self) -> None:
        """Let the worker that waits for another call end, and wait for that."""
        if self._worker is not None:
            self._worker.leave(time.monotonic() + started_worker.EXIT_GRACE_S)
            self._end_worker()

    def close(self) -> None:
        """End a worker that is there, and let go of its fork server."""
        with deferred_interrupts():
            self._end_worker()
            place, self._place = self._place, None
            if place is not None:
                place.close()

    def _done(self, call: Call, how: _How) -> tuple[CallWatch, Outcome | None]:
        """Run a call; return the facts about it, and its outcome if there is one."""
        began, kills = time.monotonic(), oom_kills.count()
        files: dict[str, int] = {}
        try:
            worker, is_new = self._sent(call, how, files)
            seen = CallWatch(call, worker.pid, how.on_event, is_begun=is_new, on_look=how.on_look)
            with self._lock:
                if self.is_cancelled:
                    raise WorkerDiedError(f"{call.label} was cancelled before its worker was there")
                self._running = worker
            if how.on_start is not None:
                how.on_start(worker.pid, self._method.name)
            worker.watch(seen, how.deadline, how.stopped_by)
            if not seen.stays:
                order = how.stopped_by
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
        except BaseException:  # its worker must not answer the next call
            self.close()
            raise
        finally:
            with deferred_interrupts():
                with self._lock:
                    self._running = None
                for descriptor in files.values():
                    os.close(descriptor)
            memory_files.sharing.let_go()

    def _sent(self, call: Call, how: _How, files: dict[str, int]) -> tuple[StartedWorker, bool]:
        """Send a call to the worker that is there, or to a new one; tell which, and whether it is new.

        ``files`` takes the memory files of the call, once they are open.
        """
        standard_streams.fill()
        try:
            with deferred_interrupts():
                files["reply"] = memory_files.create("flower-gpu-reply")
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error
        # What a worker has of threads it changes for each call.
        like = (how.method, *client.likeness(replace(call, env={**call.env, threads.VARIABLE: ""})))
        if self._worker is not None and self._like != like:
            self.retire()
        if self._worker is not None and not self._worker.has_exited():
            with deferred_interrupts():
                start.write_request(call, files, preloaded=bool(call.preload), is_new=False)
            with suppress(start.Gone):  # it ends just now
                self._worker.take(call, files, stays=self._calls + 1 < how.calls)
                return self._worker, False
        self._end_worker()
        self._like = like
        return self._started(call, how, files), True

    def _started(self, call: Call, how: _How, files: dict[str, int]) -> StartedWorker:
        for _ in range(_TRIES):
            with deferred_interrupts():
                try:
                    self._method, self._place = start.prepare(
                        call, how.method, how.otherwise, how.deadline, self._place, files
                    )
                except TimeoutError as error:
                    raise WorkerTimeoutError(
                        f"{call.label}: no worker within timeout_s={how.timeout_s:g}, {error}. Raise "
                        "timeout_s if this was only slow"
                    ) from error
                with suppress(start.Gone):  # between finding the fork server and using it
                    stays = how.calls > 1
                    self._worker = StartedWorker(call, self._method, self._place, files, stays=stays)
                    return self._worker
        raise WorkerStartError(f"{call.label}: the fork server ended again and again")

    def _leave_behind(self, seen: CallWatch) -> None:
        """Let a worker that has done its call take its time to exit, while the next one begins."""
        seen.on_event = None  # the call is over
        with deferred_interrupts():
            with self._lock:
                self._running = None
            worker, self._worker = self._worker, None
            assert worker is not None
            self._end_later(worker, started_worker.EXIT_GRACE_S - started_worker.WAIT_FOR_EXIT_S)

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
        """Have a thread end a worker: one that takes its time to exit, or that SIGKILL does not end.

        ``leave_s``: seconds until the worker is killed.
        Its fork server goes with it, as that forks one worker at a time for a place. Its lease's ticket stays
        locked here as well, since a confined worker does not have the lock.
        """
        last: list[SupportsClose] = [worker]
        if self._place is not None:
            last.append(self._place)
            self._place = None
        if worker.held >= 0:
            last.append(duplicated(worker.held))

        def end(patience_s: float | None = None) -> None:
            with ExitStack() as stack:
                for each in reversed(last):
                    stack.callback(each.close)
                stack.callback(worker.end, patience_s)
                worker.leave(time.monotonic() + leave_s)

        try:
            threading.Thread(target=end, name="flower-gpu-leaving", daemon=True).start()
        except RuntimeError:  # no more threads: the call has its result, and waits for the worker here
            end(KILLED_S)


@dataclass
class _How:
    """How a call is done."""

    method: start.StartMethod
    #: Seconds after which the worker and its children are ended. Not where the call runs in this process.
    timeout_s: float | None = None
    on_event: Sink | None = None
    #: Is called now and then with the pid of the worker, to look at its memory.
    on_look: Callable[[int], None] | None = None
    #: Receives the pid of the worker, and how it was started.
    on_start: Callable[[int, str], None] | None = None
    #: How it starts where there can be no fork server; None: that is an error. FORK: raise ForkInsteadError
    #: there, and where the call cannot be passed to another process.
    otherwise: start.StartMethod | None = None
    #: By which another thread can have the worker ended.
    stopped_by: StopOrder | None = None
    #: How many calls a worker runs before it ends. One that has failed ends at once.
    calls: int = 1
    deadline: float | None = None  # on the clock of ``time.monotonic``

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
    """Read the worker's outcome of a call; raises WorkerError or InvalidResultError.

    ``request`` is -1 if the worker had it by itself.
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
