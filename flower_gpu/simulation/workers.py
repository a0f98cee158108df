"""The workers of a host: their number, their environment, and their cores.

The first functions decide how many messages a host handles at a time, and how many leases its GPUs can grant.
:class:`Needs` lists the libraries that workers are forked with.

:class:`CoreLeases` solves a problem of runs on the CPU. Such a run shares the host's cores with other runs
through the ledger. But a short message would spend much of its time on its request to the ledger. So a lease
stays with the run between messages, and any thread of the run may take it.

Threads. The threads of the slots call ``hold``. At most one of them requests a new lease from the ledger at a
time, and ``_asking`` is its amount. The others wait for an idle lease on ``_changed``, which protects all
state of the object. A daemon thread checks every ``_LOOK_S`` seconds if another claim waits for cores. If so,
it releases idle leases at once. A lease in use is released when its message ends, but not before its turn of
``_TURN_S`` is over. Tickets are always released outside of the lock, because that writes files.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from flower_gpu import frameworks
from flower_gpu.calls import notices
from flower_gpu.calls.settings import CallSettings, HostSettings
from flower_gpu.errors import FlowerGPUError, GPUError, LeaseError, LeaseTimeoutError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.leases.admission import CORES, HostNeed, kind_of
from flower_gpu.leases.entries import Entry, Reader
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Ticket
from flower_gpu.options import CALL, CONCURRENCY
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.threads import available_cores, cores

_ROUNDING: Final = 1e-9  # tolerance for quotients such as 2 / 0.1
# Modules that every worker needs, whatever the app imports
_OURS: Final = ("flower_gpu.simulation.in_worker", "flower_gpu.calls.grants", "numpy.random")
_WITHOUT_TORCH: Final = {
    "flwr",
    "numpy",
    "flower_gpu",
    "scipy",
    "sklearn",
    "pandas",
} | sys.stdlib_module_names
# Seconds between two looks for other claims that wait for cores
_LOOK_S: Final = 0.25
# Seconds that a lease stays with the run even if others wait, as long as messages follow one another. Without
# such a turn, short messages would spend much of their time on requests to the ledger.
_TURN_S: Final = 0.5
# Assumed number of leases per GPU if their size is unknown. The ledger admits only leases that
# have room.
_SHARES: Final = 8


def concurrency(settings: CallSettings, leases: int, max_workers: int | None, nodes: int) -> int:
    """Return the maximum number of messages in flight.

    By default, this is the number that the cores allow or the number of leases, whichever is larger.
    """
    if max_workers is not None:
        return min(max_workers, nodes)
    # A message that uses several GPUs has one rank for each of them.
    ranks = settings.gpu.request.count
    max_on_cores = cores() // ranks
    if settings.host.num_cpus is not None:
        max_on_cores = int(available_cores() / settings.host.num_cpus + _ROUNDING)
    return min(max(1, max_on_cores, leases), nodes)


def max_leases(settings: CallSettings, uuids: Sequence[str]) -> int:
    """Return the maximum number of leases of a run on these GPUs. It is a guess if its calls name no size."""
    if not uuids:
        return 0
    gpus = look_at_gpus().usable
    shares = sum(_shares_of(settings, gpu.total_bytes) for gpu in gpus if gpu.uuid in uuids)
    return shares // settings.gpu.request.count


def look_at_gpus() -> Inventory:
    """Return the GPUs of this host. No device file stays open."""
    try:
        return inventory.take(processes=False)
    finally:
        inventory.close()


def _shares_of(settings: CallSettings, total_bytes: int | None) -> int:
    request = settings.gpu.request
    if request.share:
        return max(1, int(1 / request.share + 1e-9))
    if request.memory_bytes and total_bytes:
        return max(1, total_bytes // request.memory_bytes)
    return _SHARES


def variables(count: int, env: Mapping[str, str] | None, num_cpus: float | None = None) -> dict[str, str]:
    """Return the environment variables of workers that share the cores.

    ``count``: number of workers that run at the same time.
    ``num_cpus``: cores that each call requests, or None.
    """
    requested = {} if num_cpus is None else {CALL["num_cpus"].variable: f"{num_cpus:g}"}
    return {CONCURRENCY.variable: str(min(count, cores())), **requested, **(env or {})}


def core_leases(settings: CallSettings, count: int, max_leases: int, name: str) -> CoreLeases:
    """Return the core leases of a run.

    ``count``: number of messages that are handled at the same time.
    ``max_leases``: that number, if every message requested as few cores as the clients that request least.
    """
    host = settings.host
    need = replace(host, concurrency=count if host.num_cpus is None else None).cores(on_gpu=False)
    assert need is not None
    return CoreLeases(host, need.amount, max_leases, f"messages of {name}")


def load_data(settings: CallSettings, env: Mapping[str, str], without: frozenset[str]) -> None:
    """Load the data of the ``preload`` option in the fork server, if the run uses both.

    Raises WorkerStartError if loading fails.
    """
    worker = settings.worker
    method = start.choose(worker.start_method, server_first=True)
    if worker.preload and method.from_server:
        call = Call("builtins:print", env=env, preload=worker.preload, without=without, label="preload")
        client.find(call, None, {}).close()


@dataclass(frozen=True)
class Needs:
    """The libraries that the workers of an app are forked with.

    ``modules``: libraries that the workers use.
    ``without``: libraries that they do not use, as for :class:`flower_gpu.workers.call.Call`. Forks are
    cheaper without them.
    """

    modules: tuple[str, ...]
    without: frozenset[str] = frozenset()

    @classmethod
    def of(cls, libraries: Sequence[str]) -> Needs:
        """Return the needs of workers of an app that imports these libraries."""
        if not _may_use_torch(libraries):
            return cls((*_OURS, *libraries), frozenset({"torch"}))
        return cls((*_OURS, *libraries, "torch", *frameworks.imported_in_use("torch")))

    def learn_beside(self, settings: CallSettings) -> None:
        """Let the fork server import the modules in the background, before the first worker is forked.

        A thread waits for the fork server, so that this process can import the ServerApp at the same time.
        """
        if not start.choose(settings.worker.start_method).from_server:
            return

        def learn() -> None:
            # A call that needs a worker tries again, and reports the error.
            with suppress(FlowerGPUError, OSError):
                client.learn(self.modules, self.without, client.LEARN_FOR_LIMITED_S)

        # If no thread can start, the first worker waits for the imports.
        with suppress(RuntimeError):
            threading.Thread(target=learn, daemon=True).start()


def _may_use_torch(libraries: Sequence[str]) -> bool:
    # An unknown library may import torch itself.
    packages = {name.partition(".")[0] for name in libraries}
    return "flower_gpu.pytorch" in libraries or bool(packages - _WITHOUT_TORCH)


def waiting(reader: Reader) -> list[Entry]:
    """Return the requests that wait in the ledger.

    This does not acquire the ledger's mutex. A ticket that is just being written is seen at the next call.
    """
    try:
        entries = reader.read(LedgerFolder.find().all())
    except (OSError, GPUError):
        # The process may be out of file descriptors. The next request for a lease reports the error.
        return []
    return [entry for entry in entries if not entry.parts and entry.is_alive()]


class CoreLeases:
    """The core leases of a run on the CPU. Thread-safe.

    A lease stays with the run when its message ends, so that the next message needs no request to the ledger.
    If other claims wait for cores, idle leases are released at once. A lease in use is released when its
    message and its turn have ended.

    ``settings``: settings of the run's calls.
    ``amount``: thousandths of a core for a message that requests no number of cores.
    ``max_leases``: maximum number of leases of this amount. A further message runs without a lease of its
    own.
    ``label``: label in the ledger.
    """

    def __init__(self, settings: HostSettings, amount: int, max_leases: int, label: str) -> None:
        self._settings = settings
        self._amount = amount
        self._max_leases = max_leases
        self._label = label
        self._changed = threading.Condition()
        self._idle: list[Ticket] = []
        self._amounts: dict[str, int] = {}  # thousandths of a core, by ticket
        self._turns: dict[str, float] = {}  # end of the turn, by ticket
        self._lease_count = 0
        self._asking: int | None = None  # amount of this run's request in the ledger
        self._is_off = not settings.is_leased
        self._is_wanted = False
        self._end = threading.Event()
        self._ledger: Ledger | None = None
        self._watcher: threading.Thread | None = None

    @contextmanager
    def hold(
        self, check: Callable[[], object] = lambda: None, num_cpus: float | None = None
    ) -> Iterator[None]:
        """Wait for cores, and hold them in the block.

        ``check``: called repeatedly. An error that it raises ends the wait.
        ``num_cpus``: cores that this message requests. None: the usual amount.
        """
        needed = replace(self._settings, num_cpus=num_cpus).cores(on_gpu=True)
        ticket = self._acquire(check, self._amount if needed is None else needed.amount)
        try:
            yield
        finally:
            if ticket is not None:
                self._return(ticket)

    def wake(self) -> None:
        """Make all waiting messages call their ``check`` now."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the watcher thread, and release all idle leases."""
        self._end.set()
        with self._changed:
            idle, self._idle = self._idle, []
            self._lease_count -= len(idle)
        self._release(idle)

    def _acquire(self, check: Callable[[], object], amount: int) -> Ticket | None:
        """Return an idle or a new lease of this amount, or None if the message runs without a lease."""
        with self._changed:
            while True:
                check()
                if self._is_off:
                    return None
                fitting = [ticket for ticket in self._idle if self._amounts[ticket.entry.id] == amount]
                if fitting:
                    self._idle.remove(fitting[-1])
                    return fitting[-1]
                if amount == self._amount and self._lease_count - len(self._idle) >= self._max_leases:
                    return None
                if self._asking is None:
                    self._asking = amount
                    others, self._idle = self._idle, []
                    self._lease_count -= len(others)
                    break
                self._changed.wait()
        ticket = None
        try:
            self._release(others)
            ticket = self._ask(check, amount)
        finally:
            with self._changed:
                self._asking = None
                if ticket is not None:
                    self._lease_count += 1
                    self._amounts[ticket.entry.id] = amount
                    self._turns[ticket.entry.id] = time.monotonic() + _TURN_S
                self._changed.notify_all()
        return ticket

    def _ask(self, check: Callable[[], object], amount: int) -> Ticket | None:
        """Return a new lease from the ledger.

        Returns None if the ledger cannot be used and the run requested no number of cores.
        """
        # By default the timeout is infinite.
        ends = time.monotonic() + self._settings.timeout_s

        def deadline() -> float:
            check()
            return ends

        needs = (HostNeed(CORES, amount, least=amount),)
        claimant = Claimant(count=0, host_needs=lambda: needs, label=self._label)
        try:
            if self._ledger is None:
                self._ledger = Ledger(host_reserve_bytes=self._settings.reserve_bytes)
                self._watcher = threading.Thread(target=self._watch, name="flower-gpu-cores", daemon=True)
                self._watcher.start()
            return self._ledger.acquire(claimant, deadline=deadline)
        except LeaseTimeoutError:
            raise
        except LeaseError as error:
            if self._settings.num_cpus is not None or amount != self._amount:
                raise
            notices.say_once(f"messages run without leases on cores: {error}")
            self._is_off = True
            return None

    def _return(self, ticket: Ticket) -> None:
        """Keep a lease for the next message of this run, or release it if another claim waits for cores."""
        with self._changed:
            has_turn = time.monotonic() < self._turns[ticket.entry.id]
            keeps = has_turn or not self._is_wanted
            if self._asking is not None:
                # A message of this run waits in the ledger, and gets the cores there if the lease is
                # released. The lease is kept only if another claim would get the cores first, and if the
                # message needs the same amount.
                keeps = has_turn and self._is_wanted and self._asking == self._amounts[ticket.entry.id]
            if keeps and not self._end.is_set():
                self._idle.append(ticket)
                # All are notified, because some of them may need another number of cores.
                self._changed.notify_all()
                return
            self._lease_count -= 1
        self._release([ticket])
        self.wake()

    def _release(self, tickets: list[Ticket]) -> None:
        """Release leases in the ledger. Must be called without the lock, because this writes files."""
        for ticket in tickets:
            self._turns.pop(ticket.entry.id, None)
            self._amounts.pop(ticket.entry.id, None)
            Ledger(self._ledger.folder if self._ledger else None).release(ticket)

    def _watch(self) -> None:
        """Release idle leases when another claim waits for cores. Runs in the watcher thread."""
        reader = Reader()
        while not self._end.wait(_LOOK_S):
            count = sum(
                any(need.least and kind_of(need.resource) == CORES for need in entry.host_needs)
                for entry in waiting(reader)
            )
            idle: list[Ticket] = []
            with self._changed:
                # One of the waiting claims is the request of this object, if it has a request. A claim of the
                # server's evaluation counts as another claim.
                self._is_wanted = count > (self._asking is not None)
                if self._is_wanted:
                    idle, self._idle = self._idle, []
                    self._lease_count -= len(idle)
            self._release(idle)
            if idle:
                self.wake()
