"""Leases of one run: messages take turns to request them, and idle workers keep them until others need room.

The problem. A message needs a worker with a lease, and starting a worker with CUDA takes seconds. So a worker
keeps its process and its lease after its message is done, and the next message continues with it. But a lease
that an idle worker keeps blocks other runs, and also messages of this run that need another size. So idle
workers must end as soon as a request waits in the ledger that cannot be granted otherwise.

The objects. A :class:`LeasedLine` is a worker with its lease. A slot (``slots``) owns one while its thread
runs a call. Between calls the slot may park it in :class:`LeaseTurns`, and any thread of the run may take it
from there. All slots of a run share the same ``LeaseTurns``. It also has a queue per kind of lease, because
only the first message of each queue requests a lease from the ledger. The others wait here, without a ticket.

The threads:

- The threads of the slots call ``turn``, ``park``, ``take_idle``, ``count_acquired`` and ``count_released``.
- The watcher is one daemon thread, which starts with the first parked worker. It waits until one of these is
  readable: the wake-up file of an idle worker's ticket (a request waits in the ledger), the connection to an
  idle worker (the worker is gone), or the pipe of this object (the list of idle workers has changed). It then
  decides which idle workers end, and ends them in parallel.
- Any thread may call ``wake``, for example after a message was cancelled.

``_changed`` protects all state except the ledger's reader, which has the lock ``_reading``.

The races:

- A request may arrive while the watcher decides. So the watcher clears the wake-ups *before* it reads the
  ledger. A later request then wakes it again.
- An idle worker may be taken while the watcher decides without the lock. So the watcher takes the lock again
  at the end, and ends only workers that are still in the list.
- A message of this run may already wait in the ledger when a suitable worker becomes idle. Its ticket is then
  no reason to end the worker: the message finds the worker by ``has_idle`` and takes it. Tickets of this run
  are recognized by process and label.
- Another process may reserve more memory than this process. It may then see no room for its request where
  this process sees room, and sends no wake-up. So the watcher also looks every ``_LOOK_S`` seconds. If it
  sees a request twice, it ends every idle worker with a lease that the request could use.
"""

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

# Seconds between two looks for requests without a wake-up. A process with another reserve may send no
# wake-up.
_LOOK_S: Final = 2.0


class LeasedLine:
    """A line of workers, and the lease of its worker.

    ``line``: runs the calls of the slot.
    ``turns``: the leases of the run.
    ``lease_and_ticket``: the lease and its ticket, or None.
    ``is_for_one_call``: True if the worker ends after its call.
    """

    def __init__(self, line: Line, turns: LeaseTurns) -> None:
        self.line = line
        self.lease_and_ticket: tuple[Lease, Ticket] | None = None
        self.is_for_one_call = False
        self.asking: Leasing  # the request for the lease
        self._label = ""  # label of the lease's ticket
        self._turns = turns
        self._lease = ExitStack()

    def acquire(self, asking: Leasing, request: LeaseRequest) -> Lease:
        """Return a new lease. Blocks until the ledger grants it."""
        self.lease_and_ticket = self._lease.enter_context(asking.hold(request))
        self.asking, self._label = asking, asking.label
        self._turns.count_acquired()
        return self.lease_and_ticket[0]

    def serve(self, label: str) -> None:
        """Show ``label`` in the ledger as the call that the lease now serves."""
        if label != self._label:
            self._label = label
            self.lease_now()[1].relabel(label)

    def suits(self, leasing: Leasing) -> bool:
        """Return True if a call can use the worker: it requests the same, and may have the lease."""
        return _size(self.asking) == _size(leasing) and leasing.may_have(self.lease_now()[0])

    def lease_now(self) -> tuple[Lease, Ticket]:
        """Return the lease and its ticket. Call this only while there is a lease."""
        assert self.lease_and_ticket is not None
        return self.lease_and_ticket

    def descriptors(self) -> tuple[int, int]:
        """Return two descriptors to wait on while the worker idles.

        The first descriptor becomes readable when a request waits for the lease, and the second descriptor
        when the worker has exited.
        """
        return self.lease_now()[1].wake_descriptor, self.line.descriptor

    def retire(self) -> None:
        """End the worker that waits for a call, and release its lease."""
        self.line.retire()
        self.release()

    def release(self) -> None:
        """Release the lease after its worker has ended."""
        lease_and_ticket, self.lease_and_ticket = self.lease_and_ticket, None
        self.is_for_one_call = False
        try:
            self._lease.close()
        finally:
            if lease_and_ticket is not None:
                self._turns.count_released()

    def close(self) -> None:
        """End the remaining workers."""
        self.line.close()
        self.release()


@dataclass(frozen=True)
class _LeaseRequester:
    """A message that waits in the ledger for a lease."""

    label: str  # label of its ticket
    fits: Callable[[LeasedLine], bool]  # returns True if the message can use the idle worker


class LeaseTurns:
    """The leases of a run: queues of messages that need a new lease, and workers that idle with a lease.

    One message per kind of lease requests a lease from the ledger. The other messages wait here, without a
    ticket. With a ticket for each message, other runs would release a lease for each of them. There is no
    time limit here, because these messages wait for calls of their own run, which end one after the other.

    An idle worker keeps its process and its lease, so that the next round need not start CUDA again. A
    request that waits in the ledger wakes all holders. The watcher thread then ends the idle workers that are
    in the way.

    ``max_leases``: maximum number of leases at a time, or None if unknown. While the run holds this number,
    no message requests a lease.
    """

    def __init__(self, max_leases: int | None = None) -> None:
        self._max_leases = max_leases
        self._changed = threading.Condition()
        self._queues: dict[str, deque[object]] = defaultdict(deque)
        self._waiting_in_ledger: list[_LeaseRequester] = []
        self._lease_count = 0
        # Latest time at which a lease was released or a worker was parked. The run's wait for other runs
        # cannot have begun earlier.
        self._none_since = time.monotonic()
        self._reading = threading.Lock()
        self._reader = Reader()
        self._pid_namespace = pid_namespace()
        self._idle: list[LeasedLine] = []  # in the order of parking
        self._needs_room = False  # True if a message waits here that can use no idle worker
        self._seen: set[str] = set()  # tickets that waited at the last look
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        # Ends of the pipe that wakes the watcher: the read end and the write end, or -1.
        self._woken = self._wakes = -1

    @contextmanager
    def turn(
        self, kind: str, label: str, check: Callable[[], object], fits: Callable[[LeasedLine], bool]
    ) -> Iterator[None]:
        """Wait for the caller's turn to request a lease. The turn lasts for the block.

        ``kind``: purpose of the lease. Calls of another kind request another size and have their own queue.
        ``label``: label of the ticket.
        ``check``: called after each :meth:`wake`. An error that it raises ends the wait.
        ``fits``: returns True if the caller could use an idle worker. In this case ``check`` raises an error.
        """
        turn = object()
        asking = _LeaseRequester(label, fits)
        with self._changed:
            queue = self._queues[kind]
            queue.append(turn)
        try:
            with self._changed:
                check()
                while queue[0] is not turn or (
                    self._max_leases is not None and self._lease_count >= self._max_leases
                ):
                    if queue[0] is turn and self._idle:
                        self._needs_room = True
                        self._look_again()
                    self._changed.wait()
                    check()
                self._waiting_in_ledger.append(asking)
            yield
        finally:
            with self._changed:
                queue.remove(turn)
                if asking in self._waiting_in_ledger:
                    self._waiting_in_ledger.remove(asking)
                self._changed.notify_all()

    def wake(self) -> None:
        """Make all messages that wait for their turn call their ``check``."""
        with self._changed:
            self._changed.notify_all()

    def count_acquired(self) -> None:
        """Count a lease that this run has acquired."""
        with self._changed:
            self._lease_count += 1

    def count_released(self) -> None:
        """Count a lease that this run has released."""
        with self._changed:
            self._lease_count -= 1
            self._none_since = time.monotonic()
            self._changed.notify_all()

    def deadline(self, began: float, timeout_s: float) -> float:
        """Return the time until which a call may wait in the ledger. Later calls may return another time.

        While calls of the run hold leases there is no limit, because each of them makes room when it ends.
        Otherwise the run waits for other runs, and the limit is meant for this case.

        ``began``: start of the call's wait, on the clock of ``time.monotonic``.
        ``timeout_s``: maximum wait in seconds.
        """
        with self._changed:
            if self._lease_count > len(self._idle):
                return float("inf")
            return max(began, self._none_since) + timeout_s

    # Idle workers

    def park(self, place: LeasedLine) -> None:
        """Let a worker idle with its lease, until a message takes it or another request needs its room.

        If idle workers cannot be watched, the worker ends at once.
        """
        with self._changed:
            if self._is_watched():
                self._idle.append(place)
                self._none_since = time.monotonic()
                self._changed.notify_all()
                self._look_again()
                return
        place.retire()

    def has_idle(self, fits: Callable[[LeasedLine], bool] | None = None) -> bool:
        """Return True if an idle worker is suitable, and no other request needs its lease.

        ``fits``: returns True for a suitable worker. None: every worker is suitable.
        """
        with self._changed:
            return self._find_idle(fits) is not None

    def take_idle(self, fits: Callable[[LeasedLine], bool] | None) -> LeasedLine | None:
        """Return an idle worker as for :meth:`has_idle`, which the caller now owns, or None.

        ``fits`` None: every worker is suitable.
        """
        with self._changed:
            place = self._find_idle(fits)
            if place is not None:
                self._idle.remove(place)
                self._look_again()
            return place

    def _find_idle(self, fits: Callable[[LeasedLine], bool] | None) -> LeasedLine | None:
        waiting = self._waiting() if self._idle else []
        for place in reversed(self._idle):
            if (fits is None or fits(place)) and not self._is_wanted(place.lease_now()[1], waiting):
                return place
        return None

    def close(self) -> None:
        """End the watcher and all idle workers."""
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
        """End all currently idle workers."""
        with self._changed:
            idle, self._idle = self._idle, []
        for place in idle:
            place.retire()

    def _is_watched(self) -> bool:
        """Start the watcher if necessary. Return True if it runs."""
        if self._watcher is None and not self._is_closed:
            # The process may be out of file descriptors or threads.
            with suppress(OSError, RuntimeError):
                if self._wakes < 0:
                    self._woken, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                watcher = threading.Thread(target=self._watch, name="flower-gpu-idle", daemon=True)
                watcher.start()
                self._watcher = watcher
        return self._watcher is not None and not self._is_closed

    def _look_again(self) -> None:
        if self._wakes >= 0:
            # A full pipe wakes the watcher anyway.
            with suppress(BlockingIOError):
                os.write(self._wakes, b"1")

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while True:
            with self._changed:
                if self._is_closed:
                    return
                idle = [descriptor for place in self._idle for descriptor in place.descriptors()]
            remaining_s = looked_at + _LOOK_S - time.monotonic()
            readable([self._woken, *idle], max(0.0, remaining_s) if idle else None)
            is_late = time.monotonic() > looked_at + _LOOK_S
            ending = self._to_end(is_late=is_late)
            looked_at = time.monotonic() if is_late else looked_at
            # A process with CUDA takes long to exit, so the workers end in parallel.
            threads = [threading.Thread(target=place.retire, daemon=True) for place in ending]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _to_end(self, *, is_late: bool) -> list[LeasedLine]:
        """Remove the idle workers that must end from the list, and return them."""
        with self._changed:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
            idle = [(place, place.lease_now()[1]) for place in self._idle]
            for _, ticket in idle:
                # Clear the wake-ups before the ledger is read: a later request then wakes the watcher again.
                ticket.wait(0)
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
        """Return the ids of idle leases that block waiting requests.

        ``is_late``: True if a look for requests without a wake-up is due, after ``_LOOK_S`` seconds.
        """
        waiting = [
            entry
            for entry in self._waiting()
            # A message of this run that can use an idle worker will take it.
            if (asking := self._asking_by(entry)) is None
            or not any(asking.fits(place) for place, _ in idle.values())
        ]
        late = [entry for entry in waiting if is_late and entry.id in self._seen]
        if is_late:
            self._seen = {entry.id for entry in waiting}
        if not waiting:
            return ()
        blocking = {
            id_
            for id_, (_, ticket) in idle.items()
            if any(entry.could_use(ticket.entry.parts) for entry in late)
        }
        # Errors mean that the ledger cannot be used, or that NVML hangs.
        with suppress(OSError, GPUError):
            blocking |= ledger.status().leases_to_release(list(idle), {entry.id for entry in waiting})
        return blocking

    def _asking_by(self, entry: Entry) -> _LeaseRequester | None:
        """Return the message of this run that a ticket belongs to, or None.

        A ticket of this process may also belong to other code, such as the server's evaluation.
        """
        if entry.pid != os.getpid() or entry.pid_namespace != self._pid_namespace:
            return None
        with self._changed:
            asker_by_label = {asker.label: asker for asker in self._waiting_in_ledger}
        return asker_by_label.get(entry.label()) if asker_by_label else None

    def _waiting(self) -> list[Entry]:
        with self._reading:
            return waiting(self._reader)

    def is_wanted(self, ticket: Ticket) -> bool:
        """Return True if another request waits for a GPU of this lease.

        A message of this run that requests the same does not count.
        """
        return self._is_wanted(ticket, self._waiting())

    def _is_wanted(self, ticket: Ticket, waiting: Sequence[Entry]) -> bool:
        uuids = {part.uuid for part in ticket.entry.parts}
        return any(
            any(need.uuid in uuids for need in entry.gpu_needs) and not self._is_same(entry, ticket.entry)
            for entry in waiting
        )

    def _is_same(self, entry: Entry, entry_of_lease: Entry) -> bool:
        """Return True if a request of this run needs the same as the lease ``entry_of_lease``."""
        if self._asking_by(entry) is None:
            return False
        return entry.count == entry_of_lease.count and all(
            map(_is_alike, entry.gpu_needs, entry_of_lease.gpu_needs)
        )


def _size(leasing: Leasing) -> object:
    """Return a value that is equal for calls that request leases of the same size."""
    return leasing.settings.request, leasing.settings.compute, leasing.host.num_cpus


def _is_alike(first: GPUNeed, second: GPUNeed) -> bool:
    """Return True if two needs are equal, except for small changes of a learned footprint."""
    if (first.uuid, first.share, first.alone) != (second.uuid, second.share, second.alone):
        return False
    sizes = sorted([first.memory_bytes or 0, second.memory_bytes or 0])
    return sizes[1] <= MOST_TOO_MUCH * sizes[0]
