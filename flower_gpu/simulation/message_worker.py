"""The worker of one assignment.

It is taken from the run's pool for each try of the call, and put back after the try.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flower_gpu.calls.leasing import Leasing
from flower_gpu.calls.tries import Workers
from flower_gpu.errors import WorkerDiedError
from flower_gpu.leases.lease import Lease, LeaseRequest
from flower_gpu.leases.tickets import Ticket
from flower_gpu.simulation.in_worker import READY, TAKES_MANY
from flower_gpu.simulation.leased_worker import LeasedWorker, Request
from flower_gpu.simulation.pool import WorkerPool
from flower_gpu.workers.call import Call
from flower_gpu.workers.methods import StartMethod


class MessageWorker(Workers):
    """Runs the call of one assignment, in workers of a pool.

    Any thread may call :meth:`cancel`. ``_lock`` protects the current worker. Otherwise ``cancel`` could end
    the call of the next assignment of that worker.

    ``max_calls``: maximum number of calls per worker.
    ``is_used_again``: True if the worker of the call had run earlier calls.
    ``is_cancelled``: True if the assignment was cancelled.
    ``max_messages``: number of messages that the app handles at once, as the worker reported.
    ``ready_s``: seconds from the start of the call until the app's function began (False), and until the
    first optimizer step (True). Empty for workers that may handle several messages, because these start only
    once.
    ``workers_started``: number of workers that were started for the assignment.
    ``call_s``: seconds of the call.
    ``had_imports``: True if the call imported libraries that later workers may be forked with.
    ``waits_since``: start of the wait for a worker, on the clock of ``time.monotonic``, or None.
    """

    #: The progress of clients goes to the trace only, because the run has its own display.
    shows_progress = False
    #: The pool measures the host's memory itself.
    learns_memory = False
    #: Settings that the ServerApp changes in the process of the run do not apply to clients.
    takes_over = False
    second_try = "It is handled again while no other message is"

    def __init__(self, pool: WorkerPool, max_calls: int) -> None:
        self._pool = pool
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._worker: LeasedWorker | None = None
        self.is_used_again = False
        self.workers_started = 0
        self.max_messages = 1
        self.ready_s: dict[bool, float] = {}
        self.call_s = 0.0
        self.had_imports = False
        self.waits_since: float | None = time.monotonic()

    def cancel(self) -> None:
        """Make the call fail, even if it still waits for a worker."""
        with self._lock:
            self.is_cancelled = True
            if self._worker is not None:
                self._worker.line.cancel()
        self._pool.wake()

    def choose(self, start_method: str, *, server_first: bool = False) -> StartMethod:
        """Return the start method of workers, as the pool has chosen it for all calls."""
        return self._pool.choose(start_method, server_first=server_first)

    @contextmanager
    def hold(self, leasing: Leasing, request: LeaseRequest) -> Iterator[tuple[Lease, Ticket]]:
        """Hold a worker and its lease on a GPU for one try, within the block."""
        with self._held(self._request(leasing.label, leasing, request)) as worker:
            assert worker.lease is not None and worker.ticket is not None
            yield worker.lease, worker.ticket

    @contextmanager
    def hold_cores(self, leasing: Leasing) -> Iterator[None]:
        """Hold a worker and cores for one try on the CPU, within the block.

        This process holds the lease, not the worker.
        """
        with self._held(self._request(leasing.label, leasing)):
            yield

    def end_idle(self) -> None:
        """End all workers of the run that wait for a message."""
        self._pool.end_parked()

    def run(self, call: Call, method: StartMethod, **options: Any) -> Any:
        """Run a call in the worker of the block, and return its result."""
        if self._worker is None:
            # This process is itself a worker. Its own workers share its lease.
            with self._held(self._request(call.label)):
                return self.run(call, method, **options)
        worker = self._worker
        line, pool = worker.line, self._pool
        self.waits_since = None
        idle_pid, on_start, on_event = line.idle_pid, options.pop("on_start"), options.pop("on_event")
        asked_s = time.monotonic()

        def on_worker(pid: int, used: str) -> None:
            self.is_used_again = pid == idle_pid
            self.workers_started += not self.is_used_again
            on_start(pid, used)

        def on_worker_event(event: dict[str, Any]) -> None:
            if event.get("event") == TAKES_MANY:
                self.max_messages = event["max_messages"]
            elif event.get("event") == READY:
                self.ready_s[event["is_step"]] = time.monotonic() - asked_s
            else:
                on_event(event)

        try:
            return line.run(
                replace(call, admit_lines=pool.admit_lines, without=pool.without),
                method,
                calls=1 if worker.is_for_one_call else self._max_calls,
                on_start=on_worker,
                on_event=on_worker_event,
                **options,
            )
        finally:
            self.call_s, self.had_imports = line.call_s, line.had_imports

    def _request(
        self, label: str, leasing: Leasing | None = None, gpu: LeaseRequest | None = None
    ) -> Request:
        def check() -> None:
            if self.is_cancelled:
                raise WorkerDiedError(f"{label} was cancelled before it had a worker")

        return Request(label, check, leasing, gpu, self._max_calls)

    @contextmanager
    def _held(self, request: Request) -> Iterator[LeasedWorker]:
        self.waits_since = self.waits_since or time.monotonic()
        worker = self._pool.take(request)
        try:
            with self._lock:
                self._worker = worker
                worker.line.begin()
                if self.is_cancelled:
                    worker.line.cancel()
            yield worker
        finally:
            with self._lock:
                self._worker = None
            self._pool.put_back(request, worker)
