"""Workers for virtual clients: forks of the run's fork server, and the lease that goes with each of them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from flower_gpu.calls.leasing import MOST_TOO_MUCH, Attempt, Leasing
from flower_gpu.calls.runner import Workers
from flower_gpu.errors import GPUError, WorkerDiedError
from flower_gpu.leases import tickets
from flower_gpu.leases.admission import Option
from flower_gpu.leases.lease import Lease
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Entry, Ticket
from flower_gpu.simulation.core_leases import CoreLeases
from flower_gpu.simulation.durations import CPU, device_of
from flower_gpu.workers import caller as worker
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver.line import Line
from flower_gpu.workers.forkserver.run_server import RunServer
from flower_gpu.workers.life import StopOrder
from flower_gpu.workers.methods import StartMethod


class Slot(Workers):
    """Runs the calls of one thread, one at a time.

    Parameters
    ----------
    run_server : RunServer
        It forks the workers.
    turns : LeaseTurns
        The leases of the run.
    cores : CoreLeases, optional
        The cores of the run; None: they are not counted.

    Attributes
    ----------
    calls_per_worker : int
        How many calls the worker of the next call runs, at most, before it ends.
    is_copying : bool
        Whether the next calls handle copies of messages, to be compared.
    is_used_again : bool
        Whether the last call had a worker that had run others before.
    call_s : float
        How long the last call took in its worker, with the worker's start if it was new.
    import_s : float, optional
        What of that were imports of libraries, at least, which later workers are forked with.
    device : str
        What the last call was on: models of GPUs, or the CPU.
    workers_started : int
        How many workers there were.
    waits_since : float, optional
        Since when the call that was begun waits for its worker, on the clock of ``time.monotonic``.
    """

    #: What a client says of its progress is for the trace; the run has its own display.
    shows_progress = False

    def __init__(self, run_server: RunServer, turns: LeaseTurns, cores: CoreLeases | None = None) -> None:
        self._line = Line(run_server)
        self._turns = turns
        self._cores = cores
        self.calls_per_worker = 1
        self.is_copying = False
        self._lease = ExitStack()
        self._chosen: dict[tuple[str, bool], StartMethod] = {}
        self._held: tuple[Lease, Ticket] | None = None
        self._is_for_one_call = False  # the lease that is held
        self._order: StopOrder | None = None  # to end a worker that is not the line's
        self._ordering = threading.Lock()
        self.is_used_again = False
        self.call_s = 0.0
        self.import_s: float | None = None
        self.device = CPU
        self.workers_started = 0
        self.waits_since: float | None = None

    @property
    def peak_bytes(self) -> int:
        """The most memory that a worker of this slot was seen to take."""
        return self._line.peak_bytes

    @property
    def has_worker(self) -> bool:
        """Whether a worker waits for another call."""
        return self._line.has_worker

    @property
    def has_lease(self) -> bool:
        """Whether its worker waits for another call with a lease."""
        return self._held is not None

    def choose(self, start_method: str, *, server_first: bool = False) -> StartMethod:
        """Choose how a worker is started, once for all calls: it is not this process that is forked."""
        key = (start_method, server_first)
        if key not in self._chosen:
            self._chosen[key] = start.choose(start_method, server_first=server_first)
        return self._chosen[key]

    def run(self, call: Call, method: StartMethod, **options: Any) -> Any:
        """Run a call in a worker."""
        self.waits_since = None
        if call.held < 0 and self._held is not None:
            self.retire()  # it has no use for a GPU
        self.device = device_of(self._held[0] if self._held is not None else None)
        if not method.from_server:
            self._line.retire()  # not the lease, which is this call's
            self.is_used_again = False
            self.workers_started += 1
            began = time.monotonic()
            try:
                return self._run_own(call, method, **options)
            finally:
                self.call_s, self.import_s = time.monotonic() - began, None
        del options["or_spawn"], options["or_copy"]
        most = 1 if self._is_for_one_call else self.calls_per_worker
        self.is_used_again = self._line.has_worker
        self.workers_started += not self.is_used_again
        try:
            return self._line.run(call, calls=most, **options)
        finally:
            self.call_s, self.import_s = self._line.call_s, self._line.import_s

    def _run_own(self, call: Call, method: StartMethod, **options: Any) -> Any:
        """Run a call in a worker of its own, which is none of the run's fork server's."""
        order = StopOrder()
        try:
            with self._ordering:
                self._order = order
            if self._line.is_cancelled:
                raise WorkerDiedError(f"{call.label} was cancelled before its worker was there")
            return worker.run(call, method, stopped_by=order, **options)
        finally:
            with self._ordering:
                self._order = None
            order.close()

    @contextmanager
    def held(self, leasing: Leasing, attempt: Attempt) -> Iterator[tuple[Lease, Ticket]]:
        """Hold a lease for a call: the one of the worker that is there, or a new one."""
        if not self._may_go_on(leasing, attempt):
            self.retire()
            self._take(leasing, attempt)
        assert self._held is not None
        try:
            yield self._held
        finally:
            if not self._line.has_worker:
                self._release()

    @contextmanager
    def held_on_cpu(self, leasing_: Leasing) -> Iterator[None]:
        """Hold cores of the run for a call on the CPU. This process holds them, and no worker."""

        def check() -> None:
            if self._line.is_cancelled:
                raise WorkerDiedError(f"{leasing_.purpose.label} was cancelled before it had cores")

        with self._cores.held(check) if self._cores is not None else nullcontext():
            yield

    def _may_go_on(self, leasing: Leasing, attempt: Attempt) -> bool:
        """Tell whether a call can have the worker that is there, and its lease."""
        if self._held is None or not self._line.has_worker or attempt != Attempt():
            return False
        lease, ticket = self._held
        return leasing.may_have(lease) and not self._turns.is_wanted(ticket)

    def _take(self, leasing: Leasing, attempt: Attempt) -> None:
        """Get a new lease, as soon as it is this call's turn to ask."""
        began = time.monotonic()

        def deadline() -> float:
            if self._line.is_cancelled:
                raise WorkerDiedError(f"{leasing.purpose.label} was cancelled before it had a lease")
            return self._turns.deadline(began, leasing.settings.lease_timeout_s)

        # The round's own time limit is the grid's matter, which cancels what is late.
        asking = replace(leasing, deadline=deadline, round_deadline=math.inf)
        turn: AbstractContextManager[None] = nullcontext()  # a second try asks for more than the others do
        if attempt == Attempt():
            turn = self._turns.turn(leasing.purpose.task, deadline)
        with turn:
            self._held = self._lease.enter_context(asking.held(attempt))
            self._turns.taken()
        # A call that is measured has all of a GPU, and a second try more than others ask for.
        self._is_for_one_call = attempt != Attempt() or not leasing.may_have(self._held[0])

    def retire(self) -> None:
        """Let the worker that waits for a call end, and give its lease back."""
        self._line.retire()
        self._release()

    def begin(self) -> None:
        """Take the next call, which :meth:`cancel` means from now on."""
        self.waits_since = time.monotonic()
        self._line.begin()

    def cancel(self) -> None:
        """End the call that was begun, from another thread; it fails."""
        self._line.cancel()
        self._turns.wake()
        if self._cores is not None:
            self._cores.wake()
        with self._ordering:
            if self._order is not None:
                self._order.give()

    def close(self) -> None:
        """End what is left."""
        self._line.close()
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        self._is_for_one_call = False
        try:
            self._lease.close()
        finally:
            if held is not None:
                self._turns.given_back()


class LeaseTurns:
    """Which message of a run asks the ledger for a lease: one at a time; and how many leases the run holds.

    The others wait here, without a limit: for their own run, whose calls end one after the other. That is no
    reason to give a message up, nor for a ticket each: for every ticket in the ledger other runs let go of
    their leases.

    Parameters
    ----------
    most : int, optional
        How many leases there can be at a time, where that is known: with so many, nobody asks for more.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._lines: dict[str, deque[object]] = defaultdict(deque)
        self._held = 0
        self._none_since = time.monotonic()
        self._reading = threading.Lock()
        self._reader = tickets.Reader()
        self._pid_namespace = tickets.pid_namespace()

    @contextmanager
    def turn(self, kind: str, check: Callable[[], object]) -> Iterator[None]:
        """Wait until nobody else asks; in the block it is the caller who does.

        Parameters
        ----------
        kind : str
            What the lease is for. Calls of another kind ask for something else, and have a line of their own.
        check : callable
            Called after each :meth:`wake`; what it raises ends the wait.
        """
        me = object()
        with self._changed:
            line = self._lines[kind]
            line.append(me)
        try:
            with self._changed:
                check()
                while line[0] is not me or (self._most is not None and self._held >= self._most):
                    self._changed.wait()
                    check()
            yield
        finally:
            with self._changed:
                line.remove(me)
                self._changed.notify_all()

    def wake(self) -> None:
        """Have all who wait for their turn check whether they still want it."""
        with self._changed:
            self._changed.notify_all()

    def taken(self) -> None:
        """Take note of a lease that this run has now."""
        with self._changed:
            self._held += 1

    def given_back(self) -> None:
        """Take note of a lease that this run has no more."""
        with self._changed:
            self._held -= 1
            self._none_since = time.monotonic()
            self._changed.notify_all()

    def deadline(self, began: float, timeout_s: float) -> float:
        """Return until when a call may wait in the ledger, as it is now.

        While the run holds a lease there is no limit: its calls go on, and each that ends makes room. Without
        one it waits for others, and that is what the limit is for.

        Parameters
        ----------
        began : float
            When the call began to wait, on the clock of ``time.monotonic``.
        timeout_s : float
            How long it may.
        """
        with self._changed:
            return float("inf") if self._held else max(began, self._none_since) + timeout_s

    def is_wanted(self, ticket: Ticket) -> bool:
        """Tell whether somebody waits for room that a lease takes, other than for the same in this process.

        The mutex is not taken: a ticket that is just being written is seen after the next call.
        """
        uuids = {part.uuid for part in ticket.entry.parts}
        with self._reading:
            try:
                entries = self._reader.read(LedgerFolder.find().all())
            except (OSError, GPUError):  # no more files can be opened; whoever asks for a lease is told
                return False
        return any(
            not entry.parts
            and any(option.uuid in uuids for option in entry.options)
            and not self._is_same(entry, ticket.entry)
            and entry.is_alive()
            for entry in entries
        )

    def _is_same(self, entry: Entry, own: Entry) -> bool:
        if entry.pid != os.getpid() or entry.pid_namespace != self._pid_namespace:
            return False
        return entry.count == own.count and all(map(_is_alike, entry.options, own.options))


def _is_alike(one: Option, other: Option) -> bool:
    """Tell whether options ask for as much, as far as a footprint that is learned stays the same."""
    if (one.uuid, one.share, one.alone) != (other.uuid, other.share, other.alone):
        return False
    sizes = sorted([one.memory_bytes or 0, other.memory_bytes or 0])
    return sizes[1] <= MOST_TOO_MUCH * sizes[0]
