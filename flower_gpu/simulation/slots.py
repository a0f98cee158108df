"""Slots: each runs the calls of one thread, and keeps a worker with its lease between calls.

A handler's thread (``messages``) has one slot. The slot has a place: a :class:`LeasedLine`, which is a worker
and its lease. ``begin`` announces a call, ``run`` runs it, and ``cancel`` may end it from another thread.

After a call the worker stays in the slot. If no message follows, or the message waits for memory, ``idle``
parks the place in the run's :class:`LeaseTurns` and gives the slot a new, empty one. The next call with a
lease takes, in this order: the worker of the slot, an idle worker of the run, or a new lease.

There are two locks, because ending a worker takes seconds, and ``cancel`` must not wait for that:

- ``_between_calls`` is held while a worker is taken, parked or ended between two calls. The thread of the
  slot and other threads that call ``retire`` compete for it.
- ``_replacing`` is held only while the place is exchanged. A cancelled call stays cancelled on the new place,
  because the exchange copies the flag under this lock, and ``cancel`` sets it under the same lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from flower_gpu.calls.leasing import Leasing
from flower_gpu.calls.tries import Workers
from flower_gpu.errors import WorkerDiedError
from flower_gpu.leases.lease import Lease, LeaseRequest
from flower_gpu.leases.tickets import Ticket
from flower_gpu.simulation.in_worker import READY, TAKES_MANY
from flower_gpu.simulation.lease_turns import LeasedLine, LeaseTurns
from flower_gpu.simulation.workers import CoreLeases
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.caller import Line
from flower_gpu.workers.methods import StartMethod
from flower_gpu.workers.output import AdmitLines, all_lines


class WorkerIdlesError(Exception):
    """Ends a message's wait for a lease, because it can use an idle worker."""


class Slot(Workers):
    """Runs the calls of one thread, one at a time.

    Between two calls another thread may end its worker, by :meth:`retire`.

    ``turns``: the leases of the run.
    ``without``: as for :class:`flower_gpu.workers.call.Call`.
    ``cores``: the core leases of the run. None: cores are not counted.
    ``admit_lines``: decides which lines of the clients are shown.
    ``is_used_again``: True if the worker of the last call had run earlier calls.
    ``workers_started``: number of workers that this slot has started.
    ``max_messages``: number of messages that the app handles at once, as the worker reported in the last
    call.
    ``ready_s``: seconds from the start of the last call until its worker was ready to train, by the field
    ``is_step`` of the worker's event. Empty if the worker may get another call, because such a worker gets
    ready only once.
    ``waits_since``: start of the current call's wait for its worker, on the clock of ``time.monotonic``, or
    None.
    """

    #: The progress of clients goes to the trace only, because the run has its own display.
    shows_progress = False
    #: The run measures the host's memory itself.
    learns_memory = False
    #: Settings that the ServerApp changes in the process of the run do not apply to clients.
    takes_over = False

    def __init__(
        self,
        turns: LeaseTurns,
        without: frozenset[str] = frozenset(),
        cores: CoreLeases | None = None,
        admit_lines: AdmitLines = all_lines,
    ) -> None:
        self._turns = turns
        self._without = without
        self._place = LeasedLine(Line(), turns)
        self._cores = cores
        self._admit_lines = admit_lines
        self._max_calls = 1  # per worker
        self._chosen: dict[tuple[str, bool], StartMethod] = {}
        self._replacing = threading.Lock()
        # Ending a worker takes seconds, so cancel needs another lock.
        self._between_calls = threading.RLock()
        self.is_used_again = False
        self.workers_started = 0
        self.max_messages = 1
        self.ready_s: dict[bool, float] = {}
        self.waits_since: float | None = None

    @property
    def line(self) -> Line:
        """The line of workers that runs the calls, with the figures of the last call."""
        return self._place.line

    @property
    def is_cancelled(self) -> bool:
        """True if the current call was cancelled."""
        return self.line.is_cancelled

    @property
    def has_lease(self) -> bool:
        """True if this slot holds a lease."""
        return self._place.lease_and_ticket is not None

    def choose(self, start_method: str, *, server_first: bool = False) -> StartMethod:
        """Return the start method of workers. It is chosen once for all calls.

        The state of this process does not matter for the choice, because this process is never forked.
        """
        key = (start_method, server_first)
        if key not in self._chosen:
            self._chosen[key] = start.choose(start_method, server_first=server_first)
        return self._chosen[key]

    def run(self, call: Call, method: StartMethod, **options: Any) -> Any:
        """Return the result of a call, which runs in a worker."""
        call = replace(call, admit_lines=self._admit_lines, without=self._without)
        self.waits_since = None
        if call.lease_descriptor < 0 and self.has_lease:
            # The call does not use a GPU, so the lease would be idle.
            self.retire()
        place = self._place
        self.is_used_again = False
        max_calls = 1 if place.is_for_one_call else self._max_calls
        self.max_messages = 1
        self.ready_s = {}
        asked_s = time.monotonic()
        idle_pid, on_start, on_event = place.line.idle_pid, options.pop("on_start"), options.pop("on_event")

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

        return place.line.run(
            call, method, calls=max_calls, on_start=on_worker, on_event=on_worker_event, **options
        )

    @contextmanager
    def hold(self, leasing: Leasing, request: LeaseRequest) -> Iterator[tuple[Lease, Ticket]]:
        """Hold a lease for a call in the block: the lease of an existing worker, or a new one."""
        # A second try after running out of memory requests more than other calls.
        is_usual = request == leasing.settings.request

        def fits(place: LeasedLine) -> bool:
            return is_usual and self._max_calls > 1 and place.suits(leasing)

        while not (is_usual and self._can_continue(leasing)):
            self.idle()
            self.retire()
            if self._use_idle(fits):
                break
            try:
                self._acquire(leasing, request, fits, is_usual=is_usual)
                break
            except WorkerIdlesError:
                # The loop takes the idle worker, unless another thread was faster.
                pass
        place = self._place
        assert place.lease_and_ticket is not None
        place.serve(leasing.label)
        try:
            yield place.lease_and_ticket
        finally:
            if not place.line.has_worker:
                place.release()

    @contextmanager
    def hold_cores(self, leasing_: Leasing) -> Iterator[None]:
        """Hold cores for a call on the CPU in the block. This process holds their lease, not the worker."""

        def check() -> None:
            if self.is_cancelled:
                raise WorkerDiedError(f"{leasing_.label} was cancelled before it had cores")

        with self._cores.hold(check, leasing_.host.num_cpus) if self._cores is not None else nullcontext():
            yield

    def end_idle(self) -> None:
        """End all workers of the run that idle with a lease."""
        self._turns.end_idle()

    def _can_continue(self, leasing: Leasing) -> bool:
        """Return True if a call can use the slot's worker and its lease."""
        if self._place.lease_and_ticket is None or not self.line.has_worker:
            return False
        return self._place.suits(leasing) and not self._turns.is_wanted(self._place.lease_and_ticket[1])

    def _acquire(
        self, leasing: Leasing, request: LeaseRequest, fits: Callable[[LeasedLine], bool], *, is_usual: bool
    ) -> None:
        """Acquire a new lease, as soon as it is this call's turn to request a lease.

        Raises WorkerIdlesError if the call can use an idle worker instead.
        """
        began = time.monotonic()

        def deadline() -> float:
            if self.is_cancelled:
                raise WorkerDiedError(f"{leasing.label} was cancelled before it had a lease")
            if self._turns.has_idle(fits):
                raise WorkerIdlesError
            return self._turns.deadline(began, leasing.settings.lease_timeout_s)

        asking = replace(leasing, deadline=deadline)
        turn = self._turns.turn(leasing.key.task, leasing.label, deadline, fits)
        with turn if is_usual else nullcontext():
            lease = self._place.acquire(asking, request)
        # Do not keep a lease that is larger than other calls need: the lease of a measured call is a whole
        # GPU, and a second try requests more than other calls.
        self._place.is_for_one_call = not (is_usual and leasing.may_have(lease))

    def prepare(self, calls: int) -> None:
        """Prepare for the next call. Take an idle worker if workers are used again and the slot has none.

        ``calls``: maximum number of calls per worker.
        """
        self._max_calls = calls
        with self._between_calls:
            if calls > 1 and not self.line.has_worker:
                self._use_idle()

    def wait(self) -> None:
        """Note that the current call waits for the host's memory. Other calls may use the lease meanwhile."""
        self.waits_since = self.waits_since or time.monotonic()
        self.idle()

    def idle(self) -> None:
        """Park the slot's worker if it has a lease.

        Any message of the run may then use the worker. It ends if another claim needs the room of its lease.
        """
        with self._between_calls:
            if self.has_lease:
                self._turns.park(self._replaced(LeasedLine(Line(), self._turns)))

    def _use_idle(self, fits: Callable[[LeasedLine], bool] | None = None) -> bool:
        """Take an idle worker of the run. Return True if there was one. The slot must not have a worker."""
        place = self._turns.take_idle(fits)
        if place is not None:
            self._replaced(place).close()
        return place is not None

    def _replaced(self, place: LeasedLine) -> LeasedLine:
        """Replace the slot's place, and return the previous one. A cancelled call stays cancelled."""
        with self._replacing:
            previous, self._place = self._place, place
            place.line.begin()
            if previous.line.is_cancelled:
                place.line.cancel()
        return previous

    def retire(self) -> None:
        """End the worker that waits for a call, and release its lease. Any thread may call this."""
        with self._between_calls:
            self._place.retire()

    def begin(self) -> None:
        """Begin a call. From now on :meth:`cancel` refers to it."""
        self.waits_since = time.monotonic()
        self._place.line.begin()

    def cancel(self) -> None:
        """Make the current call fail. Another thread calls this."""
        with self._replacing:
            self._place.line.cancel()
        self._turns.wake()
        if self._cores is not None:
            self._cores.wake()

    def close(self) -> None:
        """End the remaining worker."""
        with self._between_calls:
            self._place.close()
