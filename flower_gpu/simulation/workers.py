"""The workers of a host: their number, their settings, and the cores that they have."""

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
from flower_gpu.options import CALL
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.threads import available_cores, cores

_CONCURRENCY: Final = "FLOWER_GPU_CONCURRENCY"
_ROUNDING: Final = 1e-9  # what 2 / 0.1 may be off by
# What every worker needs, whatever the app imports.
_OURS: Final = ("flower_gpu.simulation.in_worker", "flower_gpu.calls.leased_worker", "numpy.random")
_WITHOUT_TORCH: Final = {
    "flwr",
    "numpy",
    "flower_gpu",
    "scipy",
    "sklearn",
    "pandas",
} | sys.stdlib_module_names
_LOOK_S: Final = 0.25  # between two looks whether somebody else waits for cores
# That a lease stays at least while messages follow one another, also where others wait: to ask the ledger for
# each message costs a short one a good part of its time.
_TURN_S: Final = 0.5
_SHARES: Final = 8  # of a GPU, where nobody says how large they are: the ledger lets in what has room


def concurrency(settings: CallSettings, leases: int, max_workers: int | None, nodes: int) -> int:
    """Return how many messages are handled at a time, at most: of cores and leases what is more."""
    if max_workers is not None:
        return min(max_workers, nodes)
    ranks = settings.gpu.request.count  # of each message, as long as it is on several GPUs
    at_once = cores() // ranks
    if settings.host.num_cpus is not None:
        at_once = int(available_cores() / settings.host.num_cpus + _ROUNDING)
    return min(max(1, at_once, leases), nodes)


def most_leases(settings: CallSettings, uuids: Sequence[str]) -> int:
    """Return how many leases a run can have at a time on these GPUs; a guess where it names no size."""
    if not uuids:
        return 0
    gpus = look_at_gpus().usable
    shares = sum(_shares_of(settings, gpu.total_bytes) for gpu in gpus if gpu.uuid in uuids)
    return shares // settings.gpu.request.count


def look_at_gpus() -> Inventory:
    """Return the GPUs of this host, and leave no device file open."""
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
    """Return the environment variables of workers of which so many run at a time: they share the cores."""
    asked = {} if num_cpus is None else {CALL["num_cpus"].variable: f"{num_cpus:g}"}
    return {_CONCURRENCY: str(min(count, cores())), **asked, **(env or {})}


def core_leases(settings: CallSettings, count: int, most: int, name: str) -> CoreLeases:
    """Return the cores of a run of an app of which so many messages are handled at a time.

    ``most``: how many of them if all ask for as little as some clients do.
    """
    host = settings.host
    need = replace(host, at_once=count if host.num_cpus is None else None).cores(on_gpu=False)
    assert need is not None
    return CoreLeases(host, need.amount, most, f"messages of {name}")


def load_data(settings: CallSettings, env: Mapping[str, str], without: frozenset[str]) -> None:
    """Load data where workers are forked from, if there are such data.

    Raises WorkerStartError if that fails.
    """
    worker = settings.worker
    method = start.choose(worker.start_method, server_first=True)
    if worker.preload and method.from_server:
        call = Call("builtins:print", env=env, preload=worker.preload, without=without, label="preload")
        client.find(call, None, {}).close()


@dataclass(frozen=True)
class Needs:
    """What the workers of an app are forked with.

    ``modules``: libraries that they have use for.
    ``without``: those they have none for, which makes forks cheaper; as of a
    :class:`flower_gpu.workers.call.Call`.
    """

    modules: tuple[str, ...]
    without: frozenset[str] = frozenset()

    @classmethod
    def of(cls, libraries: Sequence[str]) -> Needs:
        """Find out what workers need whose app imports these libraries."""
        if not _may_use_torch(libraries):
            return cls((*_OURS, *libraries), frozenset({"torch"}))
        return cls((*_OURS, *libraries, "torch", *frameworks.imported_in_use("torch")))

    def learn_beside(self, settings: CallSettings) -> None:
        """Have the host's fork server import that, in a thread, before the first worker is forked.

        So this goes on while this process imports the ServerApp.
        """
        if not start.choose(settings.worker.start_method).from_server:
            return

        def learn() -> None:
            with suppress(FlowerGPUError, OSError):  # who needs a worker tries again, and tells
                client.learn(self.modules, self.without, client.LEARN_FOR_LIMITED_S)

        with suppress(RuntimeError):  # no more threads: the first worker waits for it
            threading.Thread(target=learn, daemon=True).start()


def _may_use_torch(libraries: Sequence[str]) -> bool:
    # Of a library that is not known to do without, whoever wrote it may have used torch.
    tops = {name.partition(".")[0] for name in libraries}
    return "flower_gpu.pytorch" in libraries or bool(tops - _WITHOUT_TORCH)


def waiting(reader: Reader) -> list[Entry]:
    """Return the requests that wait in the ledger.

    Its mutex is not taken: a ticket that is just being written is seen the next time.
    """
    try:
        entries = reader.read(LedgerFolder.find().all())
    except (OSError, GPUError):  # no more files can be opened; whoever asks for a lease is told
        return []
    return [entry for entry in entries if not entry.parts and entry.is_alive()]


class CoreLeases:
    """The cores that the messages of a run on the CPU have.

    A lease stays with the run when a message ends: the next one costs nothing. A thread looks whether
    somebody else waits for cores; then each lease goes back when its message ends and its turn is over, and
    idle ones at once.

    ``settings``: of the run's calls.
    ``amount``: what a message gets that asks for no number, in thousandths of a core.
    ``most``: how many leases there are at most; a message beyond these goes along with the others.
    ``label``: what the ledger shows.
    """

    def __init__(self, settings: HostSettings, amount: int, most: int, label: str) -> None:
        self._settings = settings
        self._amount = amount
        self._most = most
        self._label = label
        self._changed = threading.Condition()
        self._idle: list[Ticket] = []
        self._amounts: dict[str, int] = {}  # of leases, by ticket
        self._turns: dict[str, float] = {}  # until when they stay
        self._held = 0
        self._asking: int | None = None  # what somebody here asks the ledger for
        self._is_off = not settings.is_leased
        self._is_wanted = False
        self._end = threading.Event()
        self._ledger: Ledger | None = None
        self._watcher: threading.Thread | None = None

    @contextmanager
    def held(
        self, check: Callable[[], object] = lambda: None, num_cpus: float | None = None
    ) -> Iterator[None]:
        """Wait for cores, and hold them in the block.

        ``check``: called again and again; what it raises ends the wait.
        ``num_cpus``: how many this message asks for; None: as many as most do.
        """
        own = replace(self._settings, num_cpus=num_cpus).cores(on_gpu=True)
        ticket = self._take(check, self._amount if own is None else own.amount)
        try:
            yield
        finally:
            if ticket is not None:
                self._give(ticket)

    def wake(self) -> None:
        """Have all who wait here check whether they still want to."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Give back what is left."""
        self._end.set()
        with self._changed:
            idle, self._idle = self._idle, []
            self._held -= len(idle)
        self._release(idle)

    def _take(self, check: Callable[[], object], amount: int) -> Ticket | None:
        with self._changed:
            while True:
                check()
                if self._is_off:
                    return None
                fitting = [ticket for ticket in self._idle if self._amounts[ticket.entry.id] == amount]
                if fitting:
                    self._idle.remove(fitting[-1])
                    return fitting[-1]
                if amount == self._amount and self._held - len(self._idle) >= self._most:
                    return None
                if self._asking is None:
                    self._asking = amount
                    others, self._idle = self._idle, []
                    self._held -= len(others)
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
                    self._held += 1
                    self._amounts[ticket.entry.id] = amount
                    self._turns[ticket.entry.id] = time.monotonic() + _TURN_S
                self._changed.notify_all()
        return ticket

    def _ask(self, check: Callable[[], object], amount: int) -> Ticket | None:
        """Ask the ledger; None where it cannot be used, and nobody has named a number of cores."""
        ends = time.monotonic() + self._settings.timeout_s  # by default infinity

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
            notices.say_once(f"messages run without counted cores: {error}")
            self._is_off = True
            return None

    def _give(self, ticket: Ticket) -> None:
        with self._changed:
            has_turn = time.monotonic() < self._turns[ticket.entry.id]
            keeps = has_turn or not self._is_wanted
            if self._asking is not None:  # who waits for the ledger here gets it there, unless others would
                keeps = has_turn and self._is_wanted and self._asking == self._amounts[ticket.entry.id]
            if keeps and not self._end.is_set():
                self._idle.append(ticket)
                self._changed.notify_all()  # who waits may ask for another number
                return
            self._held -= 1
        self._release([ticket])
        self.wake()

    def _release(self, given_back: list[Ticket]) -> None:
        for ticket in given_back:
            self._turns.pop(ticket.entry.id, None)
            self._amounts.pop(ticket.entry.id, None)
            Ledger(self._ledger.folder if self._ledger else None).release(ticket)

    def _watch(self) -> None:
        reader = Reader()
        while not self._end.wait(_LOOK_S):
            count = sum(
                any(need.least and kind_of(need.resource) == CORES for need in entry.host_needs)
                for entry in waiting(reader)
            )
            idle: list[Ticket] = []
            with self._changed:
                # One of them may be of these leases themselves, but not of the server's evaluation.
                self._is_wanted = count > (self._asking is not None)
                if self._is_wanted:
                    idle, self._idle = self._idle, []
                    self._held -= len(idle)
            self._release(idle)
            if idle:
                self.wake()
