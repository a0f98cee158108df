"""Leases of a run: which message asks for one, and workers that idle with theirs until others need it."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from flower_gpu.calls.leasing import MOST_TOO_MUCH, Leasing
from flower_gpu.errors import GPUError
from flower_gpu.leases.admission import GPUNeed
from flower_gpu.leases.entries import Entry, Reader, pid_namespace
from flower_gpu.leases.lease import Lease, LeaseRequest
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.tickets import Ticket
from flower_gpu.polling import readable
from flower_gpu.simulation.workers import waiting
from flower_gpu.workers.caller import Line

# Between two looks whether somebody waits who has not said so: a process that counts with another reserve.
_LOOK_S: Final = 2.0


class LeasedLine:
    """A line of workers, and the lease that its worker has.

    ``line``: whoever has the place runs calls there.
    ``turns``: the leases of the run.
    ``held``: the lease.
    ``is_for_one_call``: whether the worker ends after one call.
    """

    def __init__(self, line: Line, turns: LeaseTurns) -> None:
        self.line = line
        self.held: tuple[Lease, Ticket] | None = None
        self.is_for_one_call = False
        self.asking: Leasing  # how the lease was asked for
        self._label = ""  # of the lease's ticket
        self._turns = turns
        self._lease = ExitStack()

    def take(self, asking: Leasing, request: LeaseRequest) -> Lease:
        """Wait for a lease."""
        self.held = self._lease.enter_context(asking.held(request))
        self.asking, self._label = asking, asking.label
        self._turns.taken()
        return self.held[0]

    def serve(self, label: str) -> None:
        """Have the ledger show the call that the lease is for now."""
        if label != self._label:
            self._label = label
            self.lease_held()[1].relabel(label)

    def suits(self, leasing: Leasing) -> bool:
        """Tell whether a call asks for as much as the worker has that is here, or idles."""
        return _size(self.asking) == _size(leasing) and leasing.may_have(self.lease_held()[0])

    def lease_held(self) -> tuple[Lease, Ticket]:
        """Return the lease that a worker idles with."""
        assert self.held is not None
        return self.held

    def descriptors(self) -> tuple[int, int]:
        """Return what can be read when somebody waits for the lease, and when the idle worker is gone."""
        return self.lease_held()[1].wake_descriptor, self.line.descriptor

    def retire(self) -> None:
        """Let the worker end that waits for a call, and give its lease back."""
        self.line.retire()
        self.release()

    def release(self) -> None:
        """Give the lease back; its worker is gone."""
        held, self.held = self.held, None
        self.is_for_one_call = False
        try:
            self._lease.close()
        finally:
            if held is not None:
                self._turns.given_back()

    def close(self) -> None:
        """End the remaining workers."""
        self.line.close()
        self.release()


@dataclass(frozen=True)
class _LeaseAsker:
    """A message that asks the ledger for a lease."""

    label: str  # of its ticket
    fits: Callable[[LeasedLine], bool]  # whether it can have the worker that idles there


class LeaseTurns:
    """Which message of a run asks the ledger for a lease: one at a time; and which workers idle with theirs.

    The others wait here, without a limit: for their own run, whose calls end one after the other. That is no
    reason to give a message up, nor for a ticket each: for every ticket in the ledger other runs let go of
    their leases.

    A worker without a message keeps process and lease, so that the next round need not start CUDA again.
    Whoever waits in the ledger tells all holders. Then a thread here has as many idle workers end as stand in
    the way.

    ``most``: how many leases there can be at a time, where that is known: with so many, nobody asks for more.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._lines: dict[str, deque[object]] = defaultdict(deque)
        self._asking: list[_LeaseAsker] = []
        self._held = 0
        self._none_since = time.monotonic()
        self._reading = threading.Lock()
        self._reader = Reader()
        self._pid_namespace = pid_namespace()
        self._idle: list[LeasedLine] = []  # the one that idles for the shortest time is the last
        self._needs_room = False  # whether a message waits here that can have none of these
        self._seen: set[str] = set()  # tickets that waited at the last look
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        self._woken = self._wakes = -1  # ends of a pipe, by which the watcher looks again

    @contextmanager
    def turn(
        self, kind: str, label: str, check: Callable[[], object], fits: Callable[[LeasedLine], bool]
    ) -> Iterator[None]:
        """Wait until nobody else asks; in the block it is the caller who does.

        ``kind``: what the lease is for. Calls of another kind ask for something else, and have a line of
        their own.
        ``label``: what the ticket is for.
        ``check``: called after each :meth:`wake`; what it raises ends the wait.
        ``fits``: tells whether an idle worker would do: then ``check`` raises an error.
        """
        me = object()
        asking = _LeaseAsker(label, fits)
        with self._changed:
            line = self._lines[kind]
            line.append(me)
        try:
            with self._changed:
                check()
                while line[0] is not me or (self._most is not None and self._held >= self._most):
                    if line[0] is me and self._idle:
                        self._needs_room = True
                        self._look_again()
                    self._changed.wait()
                    check()
                self._asking.append(asking)
            yield
        finally:
            with self._changed:
                line.remove(me)
                if asking in self._asking:
                    self._asking.remove(asking)
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

        While the run has calls with a lease there is no limit: each that ends makes room. Without one it
        waits for others, and that is what the limit is for.

        ``began``: when the call began to wait, on the clock of ``time.monotonic``.
        ``timeout_s``: how long it may.
        """
        with self._changed:
            if self._held > len(self._idle):
                return float("inf")
            return max(began, self._none_since) + timeout_s

    # Idle workers

    def park(self, place: LeasedLine) -> None:
        """Let a worker idle with its lease, until a message or somebody else takes it."""
        with self._changed:
            if self._is_watched():
                self._idle.append(place)
                self._none_since = time.monotonic()
                self._changed.notify_all()
                self._look_again()
                return
        place.retire()

    def has_idle(self, fits: Callable[[LeasedLine], bool] | None = None) -> bool:
        """Tell whether a worker idles that would do, and that nobody else waits for; ``fits``: None: any."""
        with self._changed:
            return self._found_idle(fits) is not None

    def take_idle(self, fits: Callable[[LeasedLine], bool] | None) -> LeasedLine | None:
        """Return such a worker, which does not idle any more; None: there is none."""
        with self._changed:
            place = self._found_idle(fits)
            if place is not None:
                self._idle.remove(place)
                self._look_again()
            return place

    def _found_idle(self, fits: Callable[[LeasedLine], bool] | None) -> LeasedLine | None:
        waiting = self._waiting() if self._idle else []
        for place in reversed(self._idle):
            if (fits is None or fits(place)) and not self._is_wanted(place.lease_held()[1], waiting):
                return place
        return None

    def close(self) -> None:
        """End idle workers."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._look_again()
        if self._watcher is not None:
            self._watcher.join()
            os.close(self._woken)
            os.close(self._wakes)
            self._wakes = -1
        for place in idle:
            place.close()

    def end_idle(self) -> None:
        """End the workers that idle at this moment."""
        with self._changed:
            idle, self._idle = self._idle, []
        for place in idle:
            place.retire()

    def _is_watched(self) -> bool:
        """Start the watcher where there is none; tell whether there is one."""
        if self._watcher is None and not self._is_closed:
            with suppress(OSError, RuntimeError):  # no more files, or no more threads
                if self._wakes < 0:
                    self._woken, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                watcher = threading.Thread(target=self._watch, name="flower-gpu-idle", daemon=True)
                watcher.start()
                self._watcher = watcher
        return self._watcher is not None and not self._is_closed

    def _look_again(self) -> None:
        if self._wakes >= 0:
            with suppress(BlockingIOError):  # it has more than one reason to look
                os.write(self._wakes, b"1")

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while True:
            with self._changed:
                if self._is_closed:
                    return
                watched = [self._woken, *(number for place in self._idle for number in place.descriptors())]
            left_s = looked_at + _LOOK_S - time.monotonic()
            readable(watched, max(0.0, left_s) if len(watched) > 1 else None)
            is_late = time.monotonic() > looked_at + _LOOK_S
            ending = self._to_end(is_late=is_late)
            looked_at = time.monotonic() if is_late else looked_at
            # Each takes as long as a process with CUDA takes to exit.
            threads = [threading.Thread(target=place.retire, daemon=True) for place in ending]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _to_end(self, *, is_late: bool) -> list[LeasedLine]:
        """Return the idle workers that have to end; they do not idle any more."""
        with self._changed:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
            idle = [(place, place.lease_held()[1]) for place in self._idle]
            for _, ticket in idle:
                ticket.wait(0)  # first: who asks from here on wakes the watcher again
            ending = [place for place, _ in idle if place.line.has_lost_worker()]
            needs_room, self._needs_room = self._needs_room, False
        leases = {ticket.entry.id: (place, ticket) for place, ticket in idle}
        wanted = self._in_the_way(leases, idle[0][0].asking.ledger(), is_late=is_late) if idle else ()
        ending += [place for place, ticket in idle if ticket.entry.id in wanted]
        if needs_room and not ending:
            ending = [place for place, _ in idle[:1]]
        with self._changed:
            ending = [place for place in self._idle if place in ending]
            self._idle = [place for place in self._idle if place not in ending]
        return ending

    def _in_the_way(
        self, idle: Mapping[str, tuple[LeasedLine, Ticket]], ledger: Ledger, *, is_late: bool
    ) -> Collection[str]:
        """Return the leases of idle workers without which requests can be granted that wait."""
        waiting = [
            entry
            for entry in self._waiting()
            # A message of this run takes the worker.
            if (asking := self._asking_by(entry)) is None
            or not any(asking.fits(place) for place, _ in idle.values())
        ]
        late = [entry for entry in waiting if is_late and entry.id in self._seen]
        if is_late:
            self._seen = {entry.id for entry in waiting}
        if not waiting:
            return ()
        found = {
            id_
            for id_, (_, ticket) in idle.items()
            if any(entry.could_use(ticket.entry.parts) for entry in late)
        }
        with suppress(OSError, GPUError):  # the ledger cannot be used, or NVML hangs
            found |= ledger.status().leases_to_release(list(idle), {entry.id for entry in waiting})
        return found

    def _asking_by(self, entry: Entry) -> _LeaseAsker | None:
        """Return the message of this run that a ticket is of; not of the server's evaluation, say."""
        if entry.pid != os.getpid() or entry.pid_namespace != self._pid_namespace:
            return None
        with self._changed:
            asking = {one.label: one for one in self._asking}
        return asking.get(entry.label()) if asking else None

    def _waiting(self) -> list[Entry]:
        with self._reading:
            return waiting(self._reader)

    def is_wanted(self, ticket: Ticket) -> bool:
        """Tell whether somebody waits for room that a lease takes; not a message of this run for the same."""
        return self._is_wanted(ticket, self._waiting())

    def _is_wanted(self, ticket: Ticket, waiting: Sequence[Entry]) -> bool:
        uuids = {part.uuid for part in ticket.entry.parts}
        return any(
            any(need.uuid in uuids for need in entry.gpu_needs) and not self._is_same(entry, ticket.entry)
            for entry in waiting
        )

    def _is_same(self, entry: Entry, own: Entry) -> bool:
        if self._asking_by(entry) is None:
            return False
        return entry.count == own.count and all(map(_is_alike, entry.gpu_needs, own.gpu_needs))


def _size(leasing: Leasing) -> object:
    return leasing.settings.request, leasing.settings.compute, leasing.host.num_cpus


def _is_alike(one: GPUNeed, other: GPUNeed) -> bool:
    """Tell whether needs ask for as much, as far as a footprint that is learned stays the same."""
    if (one.uuid, one.share, one.alone) != (other.uuid, other.share, other.alone):
        return False
    sizes = sorted([one.memory_bytes or 0, other.memory_bytes or 0])
    return sizes[1] <= MOST_TOO_MUCH * sizes[0]
