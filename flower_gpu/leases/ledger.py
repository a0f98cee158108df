"""The host-wide record of leases: asking, waiting, letting go. There is no daemon.

Each process decides for itself, by :func:`flower_gpu.leases.admission.plan` over all tickets with the mutex
held, and grants leases to itself only. A process that changes the ledger wakes the waiting processes that can
go on. The first in line also looks by itself: holders may have been killed, and other programs come and go.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from flower_gpu.errors import GPUError, LeaseError, LeaseTimeoutError
from flower_gpu.gpu.gpus import GPU, is_for_one
from flower_gpu.leases import admission, tickets, wording
from flower_gpu.leases.admission import Card, GPUNeed, HostNeed, Part
from flower_gpu.leases.entries import Entry, Reader
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.state import Readings, State
from flower_gpu.leases.tickets import Ticket

_FIRST_LOOKS_S = 0.05  # how often the first in line looks whether it can go on
_NEXT_LOOKS_S = 0.1  # how often the second looks whether the first is still there; later ones more rarely
_OTHERS_LOOK_S = 5.0  # how often the others do so at least
_STEP_IN_S = 2.0  # after so long the second does the work of the first as well; later ones after longer
_ASK_S = 0.5  # how often a deadline that may change is read, at least
_VERIFY_EVERY_S = 0.5  # how often the first in line checks which waiting processes are dead
_COARSE_BYTES = 16 << 20  # a change of a GPU's use by less is no reason to decide anew

#: After so long without a lease, or a run without a worker, it says what it waits for.
SAID_AFTER_S = 5.0

#: When a wait ends, on the clock of ``time.monotonic``; or a function that returns that; or None: never.
Deadline = float | Callable[[], float] | None


@dataclass(frozen=True)
class Claimant:
    """Asks the ledger for a lease. Its claim is read again at each look, since it may change meanwhile."""

    # Returns what it needs of these GPUs (all that can be used) as of now: a task's footprint may be learned
    # while it waits
    gpu_needs: Callable[[Sequence[GPU]], tuple[GPUNeed, ...]] = lambda _: ()
    version: Callable[[], object] = lambda: None  # returns a value that differs after such a change
    count: int = 1  # how many GPUs; 0: none, only what ``host_needs`` returns
    # Returns what it needs of the host's cores and main memory, as of now
    host_needs: Callable[[], tuple[HostNeed, ...]] = lambda: ()
    pack: bool = False  # see :class:`flower_gpu.leases.admission.Claim`
    label: str = ""  # what it is for; shown to this account only

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.label or "a call"


class Ledger:
    """The ledger, for one process or one thread.

    ``folder``: where it is; default: the host's.
    ``reserve_bytes``: memory of each GPU that is never leased.
    ``host_reserve_bytes``: main memory that is never leased; default:
    :data:`flower_gpu.leases.host.RESERVED_PART` of it.
    """

    def __init__(
        self,
        folder: LedgerFolder | None = None,
        reserve_bytes: int = 256 << 20,
        host_reserve_bytes: int | None = None,
    ) -> None:
        self.folder = folder or LedgerFolder.find()
        self._reserve_bytes = reserve_bytes
        self._host_reserve_bytes = host_reserve_bytes
        self._reader = Reader()
        self._verified_at = 0.0

    def acquire(self, claimant: Claimant, *, deadline: Deadline = None) -> Ticket:
        """Wait until a claim is granted.

        ``deadline``: on the clock of ``time.monotonic``. A callable is asked again and again; an error that
        it raises ends the wait.
        Returns the ticket, its parts in ``entry.parts``. Give it back by :meth:`release` once the worker has
        ended. The kernel does so when this process and the worker have both ended, or when the worker has and
        nobody has the ticket any more.
        Raises LeaseError if no GPU of this host can ever grant it, or the ledger cannot be used.
        Raises LeaseTimeoutError if it was not granted by the deadline. The message names who holds what.
        """
        with self._clear_errors():
            ticket, state, version = self._enqueue(claimant)
            try:
                if not ticket.entry.parts:
                    self._wait(ticket, claimant, version, state, deadline)
            except BaseException:
                self.release(ticket)
                raise
        return ticket

    def _enqueue(self, claimant: Claimant) -> tuple[Ticket, State, object]:
        """Write a ticket, granted if that is possible at once."""
        version = claimant.version()
        with self._locked(claimant.count > 0) as measured:
            _check(measured, claimant)
            own = self.folder.own()
            state = self._look(measured, verify=True)
            alive = (*state.holders, *state.waiting)
            tickets.clean(own, [entry for entry in alive if entry.user == os.getuid()])
            order = 1 + max((entry.order for entry in alive), default=0)
            entry = tickets.new_entry(own, order, claimant.count, claimant.pack)
            entry = self._with_needs(entry, claimant, state, measured)
            state = replace(state, waiting=(*state.waiting, entry))
            state = replace(state, host=self._host_cards(measured, state.holders, state.waiting))
            parts = state.granted().get(entry.id, ())
            ticket = Ticket.create(own, replace(entry, parts=parts), claimant.label)
            _take_back(ticket, measured)
        if not ticket.entry.parts:
            _ask(state.holders, ticket.entry)
        return ticket, state, version

    def release(self, ticket: Ticket) -> None:
        """Remove a ticket, held or waiting, and wake the processes that can go on without it.

        A ticket that a process of its worker still has locked stays: the lease is that process's until it is
        gone. Its end wakes nobody; the first process in line sees it.
        """
        try:
            with self._clear_errors():
                if not ticket.let_go():
                    ticket.leave()
                    return
                with self.folder.locked():  # first, so that it is free whatever becomes of the rest
                    ticket.remove()
                    entries = self._reader.read(self.folder.all())
                if any(not entry.parts for entry in entries):
                    with self._locked(asks_for_gpus=False) as measured:
                        state = self._look(measured)
                        _wake(state.waiting, self._ready(state))
        except LeaseError:  # the ledger cannot be used; a removed ticket is enough
            ticket.remove()

    def status(self) -> State:
        """Return the state of the ledger. It waits for the mutex, so that it sees no half-done change."""
        with self._clear_errors(), self._locked(asks_for_gpus=True) as measured:
            return self._look(measured, verify=True)

    @contextmanager
    def _locked(self, asks_for_gpus: bool) -> Iterator[Readings]:
        """Hold the mutex, with a measurement from just before."""
        # The tickets are read here once more: then little is left to read while others wait for the mutex.
        measured = Readings.take(self._reader.read(self.folder.all()), asks_for_gpus=asks_for_gpus)

        def measure_again() -> None:
            nonlocal measured
            if time.monotonic() > measured.fresh_until:
                measured = Readings.take(self._reader.read(self.folder.all()), asks_for_gpus=asks_for_gpus)

        with self.folder.locked(measure_again) as is_held:
            yield replace(measured, is_held=is_held)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except GPUError:  # of which some are OSErrors, too
            raise
        except OSError as error:
            raise LeaseError(f"the ledger in {self.folder.root} cannot be used: {error}") from error

    def _look(self, measured: Readings, *, verify: bool = False) -> State:
        """Read all tickets, with the mutex held.

        ``verify`` also checks which waiting processes are dead. With hundreds of them that takes most of the
        time.
        """
        folders = self.folder.all()
        stamps = self.folder.stamps(folders)
        entries = self._reader.read(folders)
        alive = [entry for entry in entries if not (entry.parts or verify) or self._is_alive(entry)]
        if verify:
            self._verified_at = time.monotonic()
        holders = tuple(entry for entry in alive if entry.parts)
        waiting = tuple(entry for entry in alive if not entry.parts)
        cards = measured.cards(holders, self._reserve_bytes)
        of_host = self._host_cards(measured, holders, waiting)
        self._reader.say_invalid()
        invalid = self._reader.invalid
        return State(measured.found.usable, cards, of_host, holders, waiting, invalid, stamps)

    def _is_old(self, state: State) -> bool:
        """Tell whether anything may have changed, without the mutex and without reading all tickets."""
        if self.folder.stamps(self.folder.all()) != state.stamps:
            return True
        if not all(entry.is_alive() for entry in state.holders):
            return True
        measured = Readings.take((*state.holders, *state.waiting), asks_for_gpus=False)
        now = (
            *measured.cards(state.holders, self._reserve_bytes),
            *self._host_cards(measured, state.holders, state.waiting),
        )
        return _roughly(now) != _roughly((*state.cards, *state.host))

    def _host_cards(
        self, measured: Readings, holders: Sequence[Entry], waiting: Sequence[Entry]
    ) -> tuple[Card, ...]:
        return measured.host.cards(holders, waiting, self._host_reserve_bytes)

    def _is_alive(self, entry: Entry) -> bool:
        if entry.is_alive():
            return True
        self._reader.forget(entry)
        return False

    def _ready(self, state: State) -> dict[str, tuple[Part, ...]]:
        """Return the parts of each waiting claim that can be granted now and whose process lives."""
        granted = state.granted()
        if all(self._is_alive(entry) for entry in state.waiting if entry.id in granted):
            return granted
        return replace(state, waiting=tuple(filter(self._is_alive, state.waiting))).granted()

    def sizes(self, gpus: Sequence[GPU]) -> dict[str, int]:
        """Return how many bytes of each GPU leases could have if nothing else ran there."""
        return {
            gpu.uuid: (gpu.total_bytes or 0) - (gpu.reserved_bytes or 0) - self._reserve_bytes for gpu in gpus
        }

    def _with_needs(self, entry: Entry, claimant: Claimant, state: State, measured: Readings) -> Entry:
        """Return an entry with its claimant's present needs."""
        host_needs = measured.host.needs(claimant.host_needs())
        if not claimant.count:
            return replace(entry, host_needs=host_needs)
        asked = claimant.gpu_needs(state.gpus)
        sizes = self.sizes(state.gpus)
        possible = admission.possible(sizes, asked)
        if len(possible) < claimant.count:
            raise LeaseError(wording.why_never(claimant.name, claimant.count, asked, state.gpus, sizes))
        alone = {gpu.uuid for gpu in state.gpus if is_for_one(gpu, os.environ)}
        needs = tuple(GPUNeed(one.uuid, alone=True) if one.uuid in alone else one for one in possible)
        return replace(entry, gpu_needs=needs, host_needs=host_needs)

    def _wait(
        self, ticket: Ticket, claimant: Claimant, version: object, state: State, deadline: Deadline
    ) -> None:
        """Wait until the ticket is granted."""
        while True:
            news, verify = self._pause(ticket, claimant, version, state, deadline)
            with self._locked(claimant.count > 0) as measured:
                _check(measured, claimant)
                state = self._look(measured, verify=verify)
                if ticket.entry.id not in [entry.id for entry in state.waiting]:
                    raise LeaseError(f"{claimant.name}: its ticket {ticket.entry.path} was removed")
                if news != version:
                    version = news
                    ticket.write(self._with_needs(ticket.entry, claimant, state, measured))
                    waiting = [ticket.entry if e.id == ticket.entry.id else e for e in state.waiting]
                    state = replace(state, waiting=tuple(waiting))
                    _ask(state.holders, ticket.entry)
                ready = self._ready(state)
                parts = ready.pop(ticket.entry.id, ())
                if parts:
                    ticket.write(replace(ticket.entry, parts=parts, since=time.time()))
                    _take_back(ticket, measured)
                _wake(state.waiting, ready)
            if ticket.entry.parts:
                return

    def _pause(
        self, ticket: Ticket, claimant: Claimant, version: object, state: State, deadline: Deadline
    ) -> tuple[object, bool]:
        """Wait until another look is worth it; return the version, and whether to verify who lives.

        Raises LeaseTimeoutError after the deadline.
        """
        elder = [entry for entry in state.waiting if entry.order < ticket.entry.order]
        if elder and not self._is_alive(elder[-1]):
            return version, True
        # Earlier ones look as well, but may have been stopped (Ctrl-Z).
        look_every_s = _STEP_IN_S * len(elder)
        look_at = time.monotonic() + look_every_s
        while True:
            pause_s = min(_NEXT_LOOKS_S * len(elder), _OTHERS_LOOK_S) if elder else _FIRST_LOOKS_S
            if callable(deadline):
                pause_s = min(pause_s, _ASK_S)
            woken = ticket.wait(min(pause_s, _at(deadline) - time.monotonic()))
            now = time.monotonic()
            if now >= _at(deadline):
                text = wording.what_is_held(self.status(), ticket.entry, claimant.name)
                raise LeaseTimeoutError(text)
            news = claimant.version()
            if woken or news != version:
                return news, False
            if elder and not elder[-1].is_alive():
                return news, elder[-1].path.exists()  # killed, and not only gone
            if now >= look_at:
                look_at = now + look_every_s
                if self._is_old(state):
                    return news, now >= self._verified_at + _VERIFY_EVERY_S


def _check(measured: Readings, claimant: Claimant) -> None:
    """Fail if NVML hangs: a process that kept its place in the line would keep the others waiting."""
    if claimant.count and measured.found.hangs:
        raise LeaseError(f"{claimant.name} gets no lease: {measured.found.problem}")


def _at(deadline: Deadline) -> float:
    if deadline is None:
        return math.inf
    return deadline() if callable(deadline) else deadline


def _take_back(ticket: Ticket, measured: Readings) -> None:
    """Give up the new grant if another process may have decided at the same time.

    If the mutex was still the same file after the ticket was written, whoever decides later has seen that.
    """
    if ticket.entry.parts and not measured.is_held():
        ticket.write(replace(ticket.entry, parts=()))


def _wake(waiting: Sequence[Entry], ready: Container[str]) -> None:
    for entry in waiting:
        if entry.id in ready:
            entry.wake()


def _ask(holders: Sequence[Entry], asking: Entry) -> None:
    """Have the owners of leases look whether a claim needs one of them that nobody uses."""
    names = {need.uuid for need in asking.gpu_needs} | {need.resource for need in asking.host_needs}
    for entry in holders:
        if any(part.uuid in names for part in entry.parts):
            entry.wake()


def _roughly(cards: Sequence[Card]) -> list[tuple[str, int]]:
    return [(card.uuid, card.capacity_bytes // _COARSE_BYTES) for card in cards]


def waited_for(pids: Container[int]) -> str:
    """Return in words what the first waiting process of these lacks; empty: none waits."""
    try:
        state = Ledger().status()
    except (OSError, GPUError):
        return ""
    return wording.waited_for(state, pids)
