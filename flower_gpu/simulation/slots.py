"""Workers for virtual clients, and the lease that goes with each of them."""

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
    """A message waits for a lease, and a worker idles that would do."""


class Slot(Workers):
    """Runs the calls of one thread, one at a time.

    Between two calls another thread may end its worker, by :meth:`retire`.

    ``turns``: the leases of the run.
    ``without``: as of a :class:`flower_gpu.workers.call.Call`.
    ``cores``: the cores of the run; None: they are not counted.
    ``admit_lines``: decides which lines of its clients are shown.
    ``is_used_again``: whether the last call had a worker that had run others before.
    ``workers_started``: how many workers there were.
    ``max_messages``: number of messages that the app handles at once, as the worker said in the last call.
    ``ready_s``: seconds from asking for a worker of the last call until the worker was ready to train, by
    ``is_step`` of the event; empty if the worker may have another call.
    ``waits_since``: since when the call that was begun waits for its worker, on the clock of
    ``time.monotonic``.
    """

    #: What a client says of its progress is for the trace; the run has its own display.
    shows_progress = False
    #: A run counts the host's memory itself.
    learns_memory = False
    #: What the ServerApp sets in the process of the run is not for its clients.
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
        self._calls = 1  # of a worker, at most
        self._chosen: dict[tuple[str, bool], StartMethod] = {}
        self._replacing = threading.Lock()
        # Held while a worker is taken, parked or ended between two calls. Ending one takes seconds, so that
        # is not the lock that cancel needs.
        self._between_calls = threading.RLock()
        self.is_used_again = False
        self.workers_started = 0
        self.max_messages = 1
        self.ready_s: dict[bool, float] = {}
        self.waits_since: float | None = None

    @property
    def line(self) -> Line:
        """Where its calls run: what is known of the last one, and of a worker that waits for another."""
        return self._place.line

    @property
    def is_cancelled(self) -> bool:
        """Whether the call that was begun is to be ended."""
        return self.line.is_cancelled

    @property
    def has_lease(self) -> bool:
        """Whether its worker waits for another call with a lease."""
        return self._place.held is not None

    @property
    def may_use_again(self) -> bool:
        """Whether there is a used worker for the next call: here, or one of the run that idles."""
        return self.line.has_worker or self._turns.has_idle()

    def choose(self, start_method: str, *, server_first: bool = False) -> StartMethod:
        """Choose how a worker is started, once for all calls: it is not this process that is forked."""
        key = (start_method, server_first)
        if key not in self._chosen:
            self._chosen[key] = start.choose(start_method, server_first=server_first)
        return self._chosen[key]

    def run(self, call: Call, method: StartMethod, **options: Any) -> Any:
        """Run a call in a worker."""
        call = replace(call, admit_lines=self._admit_lines, without=self._without)
        self.waits_since = None
        if call.held < 0 and self.has_lease:
            self.retire()  # it has no use for a GPU
        place = self._place
        self.is_used_again = False
        most = 1 if place.is_for_one_call else self._calls
        self.max_messages = 1
        self.ready_s = {}
        asked_s = time.monotonic()
        idle_pid, on_start, on_event = place.line.idle_pid, options.pop("on_start"), options.pop("on_event")

        def on_worker(pid: int, used: str) -> None:
            self.is_used_again = pid == idle_pid
            self.workers_started += not self.is_used_again
            on_start(pid, used)

        def on_told(event: dict[str, Any]) -> None:
            if event.get("event") == TAKES_MANY:
                self.max_messages = event["max_messages"]
            elif event.get("event") == READY:
                self.ready_s[event["is_step"]] = time.monotonic() - asked_s
            else:
                on_event(event)

        return place.line.run(call, method, calls=most, on_start=on_worker, on_event=on_told, **options)

    @contextmanager
    def held(self, leasing: Leasing, request: LeaseRequest) -> Iterator[tuple[Lease, Ticket]]:
        """Hold a lease for a call: the one of a worker that is there, or a new one."""
        is_usual = request == leasing.settings.request  # a second try asks for more than the others do

        def fits(place: LeasedLine) -> bool:
            return is_usual and self._calls > 1 and place.suits(leasing)

        while not (is_usual and self._may_go_on(leasing)):
            self.idle()
            self.retire()
            if self._take_idle(fits):
                break
            try:
                self._take(leasing, request, fits, is_usual=is_usual)
                break
            except WorkerIdlesError:
                pass  # it is taken, unless somebody else was faster
        place = self._place
        assert place.held is not None
        place.serve(leasing.label)
        try:
            yield place.held
        finally:
            if not place.line.has_worker:
                place.release()

    @contextmanager
    def held_on_cpu(self, leasing_: Leasing) -> Iterator[None]:
        """Hold cores of the run for a call on the CPU. This process holds them, and no worker."""

        def check() -> None:
            if self.is_cancelled:
                raise WorkerDiedError(f"{leasing_.label} was cancelled before it had cores")

        with self._cores.held(check, leasing_.host.num_cpus) if self._cores is not None else nullcontext():
            yield

    def end_idle(self) -> None:
        """End all workers of the run that idle with a lease."""
        self._turns.end_idle()

    def _may_go_on(self, leasing: Leasing) -> bool:
        """Tell whether a call can have the worker that is here, and its lease."""
        if self._place.held is None or not self.line.has_worker:
            return False
        return self._place.suits(leasing) and not self._turns.is_wanted(self._place.held[1])

    def _take(
        self, leasing: Leasing, request: LeaseRequest, fits: Callable[[LeasedLine], bool], *, is_usual: bool
    ) -> None:
        """Get a new lease, as soon as it is this call's turn to ask."""
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
            lease = self._place.take(asking, request)
        # A call that is measured has all of a GPU, and a second try more than others ask for.
        self._place.is_for_one_call = not (is_usual and leasing.may_have(lease))

    def go_on(self, calls: int) -> None:
        """Have a used worker for the next call, where there is one; it handles so many calls at most."""
        self._calls = calls
        with self._between_calls:
            if calls > 1 and not self.line.has_worker:
                self._take_idle()

    def wait(self) -> None:
        """Wait for the host's memory with the call that was begun; others may have the lease meanwhile."""
        self.waits_since = self.waits_since or time.monotonic()
        self.idle()

    def idle(self) -> None:
        """Let a worker with a lease idle: any message of the run may have it, and others its room."""
        with self._between_calls:
            if self.has_lease:
                self._turns.park(self._replaced(LeasedLine(Line(), self._turns)))

    def _take_idle(self, fits: Callable[[LeasedLine], bool] | None = None) -> bool:
        """Take a worker that idles, if there is one; there is none here."""
        place = self._turns.take_idle(fits)
        if place is not None:
            self._replaced(place).close()
        return place is not None

    def _replaced(self, place: LeasedLine) -> LeasedLine:
        """Go to another place; returns the one before."""
        with self._replacing:
            before, self._place = self._place, place
            place.line.begin()
            if before.line.is_cancelled:
                place.line.cancel()
        return before

    def retire(self) -> None:
        """Let the worker that waits for a call end, and give its lease back."""
        with self._between_calls:
            self._place.retire()

    def begin(self) -> None:
        """Take the next call, which :meth:`cancel` means from now on."""
        self.waits_since = time.monotonic()
        self._place.line.begin()

    def cancel(self) -> None:
        """End the call that was begun, from another thread; it fails."""
        with self._replacing:
            self._place.line.cancel()
        self._turns.wake()
        if self._cores is not None:
            self._cores.wake()

    def close(self) -> None:
        """End the remaining worker."""
        with self._between_calls:
            self._place.close()
