"""The pool of a run: its workers with their leases, and the messages that wait for one.

The problem. A message needs three things: a worker, a lease on a share of a GPU or on cores, and room in main
memory. All are scarce, and all are worth keeping. Starting a worker with CUDA takes seconds, and a request to
the ledger costs the time of a short message. So a worker keeps its process and its lease after its message,
and the next message goes on with both. But a kept lease blocks other runs, the server's evaluation, and
messages of this run that need another size. So a kept lease must be released as soon as a request waits in
the ledger that cannot be granted otherwise.

The objects. A :class:`LeasedWorker` is a process with its lease. It is in use by one message, or *parked*
here, and any message may take it. A :class:`Request` is what a message needs. It gets, in this order: the
latest parked worker with a suitable lease, or a new lease, if possible for a parked worker without a lease. A
message on the CPU may also run without a lease, because the run handles one more message than the cores have
leases. All three resources pass this one gate: a waiting message holds no resource that others wait for.

Who calls what:

- Each message thread calls :meth:`WorkerPool.take` before a try of a call, and :meth:`WorkerPool.put_back`
  after it (``message_worker``). While its request ``is_in_ledger``, the thread itself waits in the ledger.
- Any thread may call ``end_parked``, or ``wake`` after it has cancelled a message.
- The watcher is one daemon thread, which starts with the first lease. It waits until one of these is
  readable: the wake-up file of a ticket (a request waits in the ledger), the descriptor of a parked process
  on a GPU (it has exited), or ``_wakes`` (the leases have changed). Then it decides which parked workers give
  way. Parking a worker wakes it only if a request waits in the ledger. A wake-up for each message would cost
  time.

``_lock`` protects all state. After each change, ``_serve`` decides under the lock which waiting requests get
a worker. It ends no process and writes no ticket, because both take long. Both happen without the lock.

One ticket. Of the first tries in a queue, only the oldest one waits in the ledger. The others wait here
without a ticket. Only a message that must run alone has a time limit here. If each waiting message had a
ticket, other runs would release a lease for each ticket. A second try after GPU memory ran out has a ticket
of its own, because it needs more than the others.

Turns. A lease on cores stays with the run for half a second, even if other runs wait. A lease on a GPU has no
such turn: its worker takes no further message if another request waits for its GPU.

The races:

- A request may arrive while the watcher decides. So the watcher clears the wake-ups *before* it reads the
  ledger. A later request then wakes it again. The watcher also watches the tickets of workers in use, so
  ``_has_queued_requests`` is up to date when a worker is parked.
- A parked worker may be taken while the watcher decides without the lock. So the watcher takes the lock again
  at the end, and ends only workers that are still parked.
- A message of this run may already wait in the ledger when a suitable worker is parked. Its ticket is then no
  reason to end the worker: the message is woken, finds the worker, and removes its ticket. Tickets of this
  run are recognized by process and label.
- Another process may have a larger memory reserve than this process. Its request may then not fit although
  this process computes that it fits. So the watcher also looks every ``_LOOK_S`` seconds. If it sees a
  request twice, it ends every parked worker with a lease that the request could use.

Alternatives. An earlier version had a gate for each resource. It needed three queues, two threads, and rules
for the order of the gates. Main memory could be part of the ticket. But then a second try would wait for
other runs, and the first messages of a run would start one by one, because their memory is unknown. A single
thread that waits for all workers would need an asynchronous version of each step of a call; the threads cost
little, because they only wait. A poll of the ledger after each message would cost more than the watcher.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from logging import WARNING
from typing import Final

from flwr.common.logger import log

from flower_gpu.calls import notices
from flower_gpu.calls.leasing import MOST_TOO_MUCH
from flower_gpu.errors import GPUError, LeaseError, LeaseTimeoutError
from flower_gpu.leases.admission import GPUNeed
from flower_gpu.leases.entries import Entry, Reader, pid_namespace
from flower_gpu.leases.ledger import SAID_AFTER_S
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Ticket
from flower_gpu.polling import readable
from flower_gpu.simulation.host_memory import HostMemory
from flower_gpu.simulation.leased_worker import CoreShare, LeasedWorker, Request
from flower_gpu.workers import methods
from flower_gpu.workers.output import AdmitLines, all_lines

# Maximum seconds between two looks for requests of other processes. A wake-up causes an earlier look.
_LOOK_S: Final = 2.0
# Maximum seconds between two looks at main memory while messages wait for it, because other processes of the
# host also release memory
_POLL_S: Final = 0.2


class _WorkerIsParkedError(Exception):
    """Ends a message's wait in the ledger, because a parked worker has a suitable lease."""


class WorkerPool:
    """The workers of a run, and the messages that need one. Thread-safe.

    ``max_gpu_leases``: maximum number of leases on GPUs at a time, if known. While messages use this many, no
    other first try on a GPU waits in the ledger.
    ``cores``: the usual lease on cores. None: cores are not counted.
    ``without``: as for :class:`flower_gpu.workers.call.Call`.
    ``admit_lines``: decides which lines of the clients are shown.
    """

    def __init__(
        self,
        max_gpu_leases: float = math.inf,
        cores: CoreShare | None = None,
        without: frozenset[str] = frozenset(),
        admit_lines: AdmitLines = all_lines,
    ) -> None:
        self._max_gpu_leases = max_gpu_leases
        self._cores = cores
        self.without = without
        self.admit_lines = admit_lines
        #: Decides which messages have room in main memory.
        self.memory = HostMemory()
        #: Number of messages that had to wait for main memory.
        self.memory_waits = 0
        # Cached, because all messages of a run start their workers in the same way.
        self.choose = functools.cache(methods.choose)
        self._lock = threading.Lock()
        self._waiting: list[Request] = []  # in order of arrival
        self._parked: list[LeasedWorker] = []  # in order of parking
        self._leased: list[LeasedWorker] = []  # workers with a lease, parked or in use
        # Time at which a lease was last released, or a worker with a lease was last parked. A wait for other
        # runs cannot have begun before that.
        self._last_room_at = time.monotonic()
        self._reader = Reader()
        self._read_at = -_LOOK_S
        # True if requests may wait in the ledger, as of the last look or wake-up
        self._has_queued_requests = False
        self._seen_ids: set[str] = set()  # tickets that waited at the last late look
        self._pid_namespace = pid_namespace()
        # The watcher
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watched: dict[int, Ticket] = {}  # tickets by the descriptor of their wake-ups

    def take(self, request: Request) -> LeasedWorker:
        """Wait for main memory, and for a worker with the requested lease. Returns the worker.

        Pass the worker to :meth:`put_back` after the call.

        Raises LeaseError and GPUError as :meth:`flower_gpu.calls.leasing.Leasing.hold` does. Also raises
        LeaseTimeoutError if a message that must run alone had to wait too long for other messages.
        """
        request.changed = threading.Condition(self._lock)
        request.ticket_label = request.label
        with self._lock:
            if self._cores is not None and request.leasing is not None and request.gpu is None:
                need = request.leasing.host.cores(on_gpu=True)
                request.cores = self._cores.amount if need is None else need.amount
                request.ticket_label = self._cores.label
            self._waiting.append(request)
        try:
            while True:
                worker = self._wait(request)
                if request.must_run_alone:
                    # The memory of all other workers belongs to this message.
                    self.end_parked()
                    worker.line.retire()
                if not request.is_in_ledger or self._acquire(request, worker):
                    worker.serve(request.label)
                    return worker
        except BaseException:
            with self._lock:
                if request.worker is not None:
                    self._park(request.worker)
                self.memory.leave(request)
            raise
        finally:
            with self._lock:
                self._waiting.remove(request)
                self._serve()

    def put_back(self, request: Request, worker: LeasedWorker) -> None:
        """Park a worker after its call.

        Its lease is released if its process has exited, or if no watcher runs.
        """
        with self._lock:
            self.memory.learn(worker.line.peak_bytes)
            has_ended = worker.lease is not None and not worker.line.has_worker
            is_watched = self._watcher is not None and not self._is_closed
            is_kept = worker.ticket is None or (is_watched and not has_ended)
            if is_kept:
                self._park(worker)
            self.memory.leave(request)
            self._serve()
        if not is_kept:
            self._end([worker])

    def wake(self) -> None:
        """Make all waiting messages call their ``check``, for example after one was cancelled."""
        with self._lock:
            for request in self._waiting:
                request.changed.notify()

    def end_parked(self) -> None:
        """End the processes of all parked workers, and release their leases."""
        with self._lock:
            parked, self._parked = self._parked, []
        self._end(parked, LeasedWorker.close)

    def close(self) -> None:
        """End all workers. Call this after all messages have ended."""
        with self._lock:
            self._is_closed = True
        self._look()
        if self._watcher is not None:
            self._watcher.join()
        self.end_parked()
        os.close(self._wakes)

    # Waiting for a worker

    def _wait(self, request: Request) -> LeasedWorker:
        """Wait until a request has its worker. It still has to acquire its lease if it ``is_in_ledger``."""
        began = time.monotonic()
        # Waits for memory are counted, not logged. But a message that must run alone blocks the run, so its
        # wait is logged.
        is_logged = not request.must_run_alone
        with self._lock:
            self._serve()
            self.memory_waits += not request.is_admitted
            while request.worker is None:
                request.check()
                if request.must_run_alone and not request.is_admitted:
                    is_logged = self._check_alone(request, time.monotonic() - began, is_logged=is_logged)
                request.changed.wait(None if request.is_admitted else _POLL_S)
                request.check()
                self._serve()
            return request.worker

    def _check_alone(self, request: Request, waited_s: float, *, is_logged: bool) -> bool:
        """Check how long a message has waited to be alone. Return True if a line about it was logged.

        Raises LeaseTimeoutError if the message has waited longer than ``lease_timeout_s``.
        """
        timeout_s = math.inf if request.leasing is None else request.leasing.host.timeout_s
        if waited_s >= timeout_s:
            raise LeaseTimeoutError(
                f"{request.label} could not be handled alone within lease_timeout_s={timeout_s:g}: "
                f"{self.memory.blocking(request)}. Raise lease_timeout_s, or let fewer clients run at a time"
            )
        if waited_s >= SAID_AFTER_S and not is_logged:
            log(WARNING, "%s waits to be handled alone: %s", request.label, self.memory.blocking(request))
            return True
        return is_logged

    def _serve(self) -> None:
        """Give workers to the requests that can have one now, in the order of their arrival."""
        for request in self._waiting:
            if request.worker is None:
                self._serve_one(request)
        for request in self._waiting:
            if request.is_in_ledger and self._find(request) is not None:
                # The thread of this request waits in the ledger. After the wake-up, the ledger calls the
                # request's deadline function, which finds the parked worker.
                for entry in self._queued_entries():
                    if self._own_request(entry) is request:
                        entry.wake()

    def _serve_one(self, request: Request) -> None:
        worker = self._find(request)
        if not request.is_admitted:
            has_lease = worker is not None and worker.lease is not None
            request.is_admitted = self.memory.enter(request, has_lease=has_lease)
            if not request.is_admitted:
                return
        if worker is None:
            needs_lease = self._needs_lease(request)
            if needs_lease and not self._may_enqueue(request):
                return
            worker = self._without_lease()
            request.is_in_ledger = needs_lease
        else:
            self._parked.remove(worker)
        request.worker = worker
        request.changed.notify()

    def _find(self, request: Request) -> LeasedWorker | None:
        """Return the latest parked worker with a suitable lease, or None.

        A lease that another request waits for is not suitable.
        """
        others = self._queued_entries() if self._leased else []
        for worker in reversed(self._parked):
            if request.can_use(worker) and not self._is_requested(worker, others):
                return worker
        return None

    def _needs_lease(self, request: Request) -> bool:
        """Return True if a request without a parked worker needs a new lease."""
        if request.gpu is not None:
            return True
        if self._cores is None or not request.cores:
            return False
        # The run may handle one more message at a time than the cores have leases.
        return request.cores != self._cores.amount or self._in_use(is_on_gpu=False) < self._cores.max_leases

    def _may_enqueue(self, request: Request) -> bool:
        """Return True if a request may wait in the ledger now."""
        if not request.is_first_try:
            return True
        if any(other.is_in_ledger and other.queue == request.queue for other in self._waiting):
            return False
        return request.gpu is None or self._in_use(is_on_gpu=True) < self._max_gpu_leases

    def _in_use(self, *, is_on_gpu: bool) -> int:
        """Return the number of leases on GPUs, or on cores, of workers that are not parked."""
        leased = [worker for worker in self._leased if (worker.lease is not None) == is_on_gpu]
        return sum(worker not in self._parked for worker in leased)

    def _without_lease(self) -> LeasedWorker:
        """Return the latest parked worker without a lease, or a new one."""
        for worker in reversed(self._parked):
            if worker.ticket is None:
                self._parked.remove(worker)
                return worker
        return LeasedWorker()

    def _acquire(self, request: Request, worker: LeasedWorker) -> bool:
        """Acquire a new lease for a request. Return False if a parked worker has a suitable lease."""
        assert request.leasing is not None
        began = time.monotonic()

        def deadline() -> float:
            request.check()
            with self._lock:
                if self._find(request) is not None:
                    raise _WorkerIsParkedError
                return self._deadline(request, began)

        is_parked = False
        try:
            # A message that must run alone waits only for memory of its own run, in ``_wait``. So its ticket
            # requests no main memory.
            worker.acquire(request, replace(request.leasing, deadline=deadline, asks_for_all_memory=False))
        except _WorkerIsParkedError:
            is_parked = True
        except LeaseTimeoutError:
            raise
        except LeaseError as error:
            if request.gpu is not None or request.leasing.host.num_cpus is not None:
                raise
            notices.say_once(f"messages run without leases on cores: {error}")
            self._cores = None
        finally:
            with self._lock:
                request.is_in_ledger = False
                if is_parked:
                    request.worker = None
                    self._park(worker)
                elif worker.ticket is not None:
                    self._watch_ticket(worker)
        return not is_parked

    def _deadline(self, request: Request, began: float) -> float:
        """Return the time until which a request may wait in the ledger. Later calls may return another time.

        While messages of the run use leases on GPUs, a request for a GPU has no time limit, because each of
        these messages makes room when it ends. Otherwise the run waits for other runs. The time limit is
        meant for that case.

        ``began``: start of the request's wait, on the clock of ``time.monotonic``.
        """
        assert request.leasing is not None
        if request.gpu is None:
            return began + request.leasing.host.timeout_s
        if self._in_use(is_on_gpu=True):
            return math.inf
        return max(began, self._last_room_at) + request.leasing.settings.lease_timeout_s

    # Leases that others wait for

    def _park(self, worker: LeasedWorker) -> None:
        self._parked.append(worker)
        if worker.ticket is None:
            return
        self._last_room_at = time.monotonic()
        if self._has_queued_requests:
            self._look()

    def _is_requested(self, worker: LeasedWorker, waiting: Sequence[Entry]) -> bool:
        """Return True if another request waits for a card of a worker's lease.

        A request of this run for the same lease does not count. Other runs do not count during the
        turn of a lease on cores.
        """
        assert worker.ticket is not None
        lease, has_turn = worker.ticket.entry, time.monotonic() < worker.turn_ends
        for entry in waiting:
            is_own = self._own_request(entry) is not None
            if _requests_same_lease(entry, lease) if is_own else has_turn:
                continue
            cards = {need.uuid for need in entry.gpu_needs}
            cards |= {need.resource for need in entry.host_needs if need.least}
            if any(part.uuid in cards for part in lease.parts):
                return True
        return False

    def _queued_entries(self) -> list[Entry]:
        """Return the waiting requests in the ledger, including requests of this run.

        This does not acquire the ledger's mutex. A half-written ticket is seen next time.
        Without a wake-up, the ledger is read at most every ``_LOOK_S`` seconds.
        """
        now = time.monotonic()
        if not self._has_queued_requests and now < self._read_at + _LOOK_S:
            return []
        self._read_at = now
        try:
            entries = self._reader.read(LedgerFolder.find().all())
        except (OSError, GPUError):
            # The process may be out of file descriptors. The next request for a lease reports the error.
            return []
        waiting = [entry for entry in entries if not entry.parts and entry.is_alive()]
        self._has_queued_requests = bool(waiting)
        return waiting

    def _own_request(self, entry: Entry) -> Request | None:
        """Return the request of this run that a ticket belongs to, or None.

        A ticket of this process may also belong to other code, such as the server's evaluation.
        """
        if entry.pid != os.getpid() or entry.pid_namespace != self._pid_namespace:
            return None
        label = entry.label()
        asking = (request for request in self._waiting if request.is_in_ledger)
        return next((request for request in asking if request.ticket_label == label), None)

    # Ending workers

    def _end(
        self, workers: Sequence[LeasedWorker], how: Callable[[LeasedWorker], None] = LeasedWorker.give_way
    ) -> None:
        """Release the leases of workers that are no longer parked, and park the workers without a lease.

        This runs in parallel, because a process with CUDA takes long to exit.
        """
        threads = [
            threading.Thread(target=self._end_one, args=(worker, how), daemon=True) for worker in workers[1:]
        ]
        for thread in threads:
            thread.start()
        for worker in workers[:1]:
            self._end_one(worker, how)
        for thread in threads:
            thread.join()
        with self._lock:
            # These workers go to the front of the list. ``take`` searches from the end, so workers with a
            # process are used first.
            self._parked[:0] = workers
            self._serve()

    def _end_one(self, worker: LeasedWorker, how: Callable[[LeasedWorker], None]) -> None:
        with self._lock:
            if worker.ticket is not None:
                self._watched.pop(worker.ticket.wake_descriptor, None)
        try:
            how(worker)
        finally:
            with self._lock:
                if worker in self._leased:
                    self._leased.remove(worker)
                    self._last_room_at = time.monotonic()

    # The watcher

    def _watch_ticket(self, worker: LeasedWorker) -> None:
        """Watch a new lease. Without a watcher, the lease ends with its call."""
        assert worker.ticket is not None
        self._leased.append(worker)
        self._watched[worker.ticket.wake_descriptor] = worker.ticket
        if self._watcher is None:
            # The process may be out of threads.
            with suppress(RuntimeError):
                watcher = threading.Thread(target=self._watch, name="flower-gpu-leases", daemon=True)
                watcher.start()
                self._watcher = watcher
        self._look()

    def _look(self) -> None:
        """Make the watcher look at the parked workers."""
        with suppress(BlockingIOError):
            os.eventfd_write(self._wakes, 1)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while True:
            with self._lock:
                if self._is_closed:
                    return
                pause_s = self._pause_s(looked_at)
                processes = [worker.line.descriptor for worker in self._parked if worker.lease is not None]
                descriptors = [self._wakes, *self._watched, *processes]
            events = readable(descriptors, pause_s)
            is_late = time.monotonic() > looked_at + _LOOK_S
            looked_at = time.monotonic() if is_late else looked_at
            self._end(self._to_end(events, is_late=is_late))

    def _pause_s(self, looked_at: float) -> float | None:
        """Return the seconds until the watcher's next look, or None if there are no leases."""
        if not self._leased:
            return None
        now = time.monotonic()
        ends = [
            worker.turn_ends
            for worker in self._parked
            if self._has_queued_requests and worker.turn_ends > now
        ]
        return max(0.0, min([looked_at + _LOOK_S, *ends]) - now)

    def _to_end(self, events: Collection[int], *, is_late: bool) -> list[LeasedWorker]:
        """Remove the parked workers whose leases are in the way of others, and return them.

        ``events``: readable descriptors.
        ``is_late``: True if ``_LOOK_S`` seconds have passed since the last regular look. Such a look also
        finds requests that sent no wake-up.
        """
        with self._lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wakes)
            # Clear the wake-ups before the ledger is read: a later request then wakes the watcher again.
            for ticket in [self._watched[number] for number in events if number in self._watched]:
                self._has_queued_requests = ticket.wait(0) or self._has_queued_requests
            waiting = self._queued_entries()
            parked = [worker for worker in self._parked if worker.ticket is not None]
            ending = [worker for worker in parked if worker.lease and worker.line.has_lost_worker()]
            wanted = {
                worker.ticket.entry.id: worker
                for worker in parked
                if worker.ticket is not None and self._is_requested(worker, waiting)
            }
            # A message of this run that can use a parked worker will take it.
            waiting = [
                entry
                for entry in waiting
                if (own := self._own_request(entry)) is None or not any(map(own.can_use, parked))
            ]
            late: set[str] = set()
            if is_late:
                late, self._seen_ids = self._seen_ids, {entry.id for entry in waiting}
        ending += self._in_the_way(wanted, waiting, late)
        with self._lock:
            # A message may have taken a worker meanwhile.
            ending = [worker for worker in self._parked if worker in ending]
            self._parked = [worker for worker in self._parked if worker not in ending]
        return ending

    @staticmethod
    def _in_the_way(
        wanted: Mapping[str, LeasedWorker], waiting: Sequence[Entry], late: Collection[str]
    ) -> list[LeasedWorker]:
        """Return the workers whose leases must be released so that waiting requests are granted.

        ``wanted``: parked workers by the ids of their leases.
        ``late``: ids of requests that were seen ``_LOOK_S`` seconds before.
        """
        if not wanted or not waiting:
            return []
        workers = list(wanted.values())
        is_on_gpu = any(worker.lease is not None for worker in workers)
        # Errors mean that the ledger cannot be used, or that NVML hangs.
        try:
            state = workers[0].leasing.ledger().status(asks_for_gpus=is_on_gpu)
        except (OSError, GPUError):
            return []
        ids = state.leases_to_release(list(wanted), {entry.id for entry in waiting})
        ids |= {
            lease.id
            for lease in state.holders
            if any(entry.id in late and entry.could_use(lease.parts) for entry in waiting)
        }
        return [worker for id_, worker in wanted.items() if id_ in ids]


def _requests_same_lease(entry: Entry, lease: Entry) -> bool:
    """Return True if a request of this run asks for the same as one of its leases."""
    if (entry.count, entry.host_needs) != (lease.count, lease.host_needs):
        return False
    return all(map(_is_similar_need, entry.gpu_needs, lease.gpu_needs))


def _is_similar_need(first: GPUNeed, second: GPUNeed) -> bool:
    """Return True if two needs are equal, except for small changes of a learned footprint."""
    if (first.uuid, first.share, first.alone) != (second.uuid, second.share, second.alone):
        return False
    sizes = sorted([first.memory_bytes or 0, second.memory_bytes or 0])
    return sizes[1] <= MOST_TOO_MUCH * sizes[0]
