"""A worker process of a simulation with its lease, and a message's request for such a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from flower_gpu.calls.leasing import Leasing
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.lease import Lease, LeaseRequest
from flower_gpu.leases.ledger import Claimant
from flower_gpu.leases.tickets import Ticket
from flower_gpu.workers.caller import Line

# Seconds after its grant during which a lease on cores stays with the run, even if others wait. Without such
# a turn, short messages would spend much of their time on requests to the ledger.
_TURN_S: Final = 0.5


@dataclass(frozen=True)
class CoreShare:
    """The default lease on cores, for messages on the CPU without ``num_cpus``.

    ``amount``: thousandths of a core.
    ``max_leases``: maximum number of leases of this amount. A further message runs without a lease.
    ``label``: label of the leases in the ledger.
    """

    amount: int
    max_leases: int
    label: str


@dataclass(eq=False)
class Request:
    """A message's request for a worker, a lease and main memory.

    ``label``: name of the message in texts.
    ``check``: called repeatedly during waits. Its errors end the wait.
    ``leasing``: acquires leases for the message. None: the worker needs no lease.
    ``gpu``: amount of a GPU, or None if the message runs on the CPU.
    ``max_calls``: maximum number of calls of the worker.
    """

    label: str
    check: Callable[[], object]
    leasing: Leasing | None = None
    gpu: LeaseRequest | None = None
    max_calls: int = 1
    # The rest belongs to the pool
    cores: int = field(default=0, init=False)  # thousandths of a core to lease on the CPU
    ticket_label: str = field(default="", init=False)  # label of its ticket in the ledger
    is_admitted: bool = field(default=False, init=False)  # True if it has room in main memory
    is_in_ledger: bool = field(default=False, init=False)  # True while it waits in the ledger
    worker: LeasedWorker | None = field(default=None, init=False)  # the worker that it gets
    # Notified when the request has a worker, or was cancelled
    changed: threading.Condition = field(init=False)

    @property
    def must_run_alone(self) -> bool:
        """True if the message must run alone, because its previous worker ran out of main memory."""
        return self.leasing is not None and self.leasing.asks_for_all_memory

    @property
    def is_first_try(self) -> bool:
        """False for a retry after GPU memory ran out, because a retry changes the request."""
        return self.leasing is None or self.gpu in (None, self.leasing.settings.request)

    @property
    def queue(self) -> str:
        """Name of the request's queue. At most one first try of each queue waits in the ledger."""
        return CORES if self.leasing is None or self.gpu is None else self.leasing.key.task

    def can_use(self, worker: LeasedWorker) -> bool:
        """Return True if a worker has the lease that the message needs."""
        if self.leasing is None or self.gpu is None:
            return 0 < worker.cores == self.cores
        return (
            self.is_first_try
            and not self.must_run_alone
            and self.max_calls > 1
            and worker.suits(self.leasing)
        )


class LeasedWorker:
    """A worker process, and the lease on a GPU or on cores under which it runs.

    The worker process also holds a lease on a GPU, so the lease lasts until the worker process ends. Only the
    process of the run holds a lease on cores, so it can be released while the worker lives.

    ``line``: runs the calls.
    ``ticket``: the ticket of the lease, or None without a lease.
    ``lease``: the lease on a GPU, or None.
    ``cores``: thousandths of a core of a lease on cores, otherwise 0.
    ``leasing``: the object that acquired the lease.
    ``turn_ends``: time until which a lease on cores stays with the run, even if other runs wait.
    ``is_for_one_call``: True if the worker ends after its call.
    """

    def __init__(self) -> None:
        self.line = Line()
        self.ticket: Ticket | None = None
        self.lease: Lease | None = None
        self.cores = 0
        self.leasing: Leasing
        self.turn_ends = 0.0
        self.is_for_one_call = False
        self._label = ""  # label of the ticket
        self._grant = ExitStack()

    def acquire(self, request: Request, leasing: Leasing) -> None:
        """Acquire the lease of a request. Blocks until the ledger grants it.

        ``leasing``: acquires the lease, with the deadline of the wait.
        """
        if request.gpu is not None:
            self.line.retire()
            self.lease, self.ticket = self._grant.enter_context(leasing.hold(request.gpu))
            # Do not keep a lease that is larger than other calls need. The first call of a task gets a whole
            # GPU to measure its need, and a retry may request more than other calls.
            self.is_for_one_call = not (request.is_first_try and leasing.may_have(self.lease))
        else:
            ledger, needs = leasing.ledger(), (HostNeed(CORES, request.cores, least=request.cores),)
            claimant = Claimant(count=0, host_needs=lambda: needs, label=request.ticket_label)
            self.ticket = ledger.acquire(claimant, deadline=leasing.deadline)
            self._grant.callback(ledger.release, self.ticket)
            self.cores, self.turn_ends = request.cores, time.monotonic() + _TURN_S
        self.leasing, self._label = leasing, request.ticket_label

    def serve(self, label: str) -> None:
        """Show ``label`` in the ledger as the call that the lease on a GPU now serves."""
        if self.lease is not None and self.ticket is not None and label != self._label:
            self._label = label
            self.ticket.relabel(label)

    def suits(self, leasing: Leasing) -> bool:
        """Return True if a call with an equal request and a similar need can use this lease on a GPU."""
        if self.lease is None or _size(self.leasing) != _size(leasing):
            return False
        return leasing.may_have(self.lease)

    def give_way(self) -> None:
        """Release the lease. If it is on a GPU, end the worker process first, which takes seconds."""
        if self.lease is not None:
            self.line.retire()
        self.ticket = self.lease = None
        self.cores, self.turn_ends, self.is_for_one_call = 0, 0.0, False
        self._grant.close()

    def close(self) -> None:
        """Let the process exit, and release the lease and the place at the fork server."""
        self.line.retire()
        self.line.close()
        self.give_way()


def _size(leasing: Leasing) -> object:
    """Return a value to compare the sizes of the leases that calls request."""
    return leasing.settings.request, leasing.settings.compute, leasing.host.num_cpus
