"""The host-wide ledger of leases: claim, wait, release.

The problem: processes of several runs and accounts share the GPUs of a host, any of them can be killed at any
moment, and none of them should depend on a daemon that somebody has to start.

The objects: each claim is a ticket, a locked file in the folder of its account (:mod:`.tickets`). It is a
file because the kernel releases its lock when the last process that has it open ends. So a killed process
leaves no lease behind. The ledger is the set of all tickets with a living owner. One mutex, a ``flock`` on a
file, protects all changes (:mod:`.ledger_folder`).

Who decides: each process for itself, and only about its own claim. It takes the mutex, reads all tickets, and
calls :func:`flower_gpu.leases.admission.plan`. The plan is the same in every process, so a process grants
itself exactly what the others expect. A process that adds or removes a ticket writes to the wake-up pipes of
the claims that can go on now.

What wake-ups miss: a killed holder wakes nobody, and other programs allocate and free GPU memory without a
word. So the first claim in the queue also polls. The second watches the first, because a stopped process
(Ctrl-Z) keeps its place but does not poll. Later claims poll more and more rarely, which keeps the cost of
hundreds of waiting processes low.

Time of the driver: NVML may take seconds to answer, or never answer. So the ledger asks NVML before it takes
the mutex, and combines that older answer with the tickets of the moment
(:class:`flower_gpu.leases.state.Readings`).

The race of a replaced mutex: in a sticky folder, the account that made the mutex file can replace it while
another process holds the lock. Then two processes decide at the same time. So each process checks after it
has written a grant that its mutex is still the file with that name, and withdraws the grant otherwise.

Alternatives: a daemon would have to be started by somebody, and could die. POSIX semaphores stay taken when
their holder is killed, and cannot say who holds them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from flower_gpu.errors import GPUError, LeaseError, LeaseTimeoutError
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases import admission, tickets, wording
from flower_gpu.leases.admission import Card, GPUNeed, HostNeed, Part
from flower_gpu.leases.entries import Entry, Reader
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.state import Readings, State
from flower_gpu.leases.tickets import Ticket

# Polling intervals in seconds. The first claim in the queue polls the host, the others watch the claim before
# them.
_FIRST_POLLS_S = 0.05
_NEXT_POLLS_S = 0.1  # multiplied by the number of earlier claims
_MAX_POLL_S = 5.0
# The second claim also polls the host after this long, in case the first is stopped. Later claims wait
# longer.
_TAKEOVER_S = 2.0
_DEADLINE_POLL_S = 0.5  # longest time between two calls of a deadline function
_VERIFY_EVERY_S = 0.5  # shortest time between two checks for dead processes in the queue
# A change of a GPU's use by less than this is not a reason to decide again.
_COARSE_BYTES = 16 << 20

#: Seconds of waiting after which a call without a lease, or a run without a worker, says what it waits for.
SAID_AFTER_S = 5.0

#: End of a wait on the clock of ``time.monotonic``, a function that returns it, or None for no limit.
Deadline = float | Callable[[], float] | None


@dataclass(frozen=True)
class Claimant:
    """A request for a lease.

    Its needs are functions because they may change while the claim waits: another call may learn the
    footprint of the same task meanwhile.
    """

    # Returns the present needs, given all usable GPUs of the host
    gpu_needs: Callable[[Sequence[GPU]], tuple[GPUNeed, ...]] = lambda _: ()
    # Returns a value that changes when the needs may have changed
    version: Callable[[], object] = lambda: None
    count: int = 1  # number of GPUs; 0 for a claim with ``host_needs`` only
    # Returns the present needs of cores and main memory
    host_needs: Callable[[], tuple[HostNeed, ...]] = lambda: ()
    pack: bool = False  # see :class:`flower_gpu.leases.admission.Claim`
    label: str = ""  # name of the call, shown to this account only

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.label or "a call"


class Ledger:
    """The ledger of a host. An instance must not be used by two threads at the same time.

    ``folder``: folder of the ledger; by default the host's ledger.
    ``reserve_bytes``: memory of each GPU that is never leased.
    ``host_reserve_bytes``: main memory that is never leased; by default the fraction
    :data:`flower_gpu.leases.host.RESERVED_PART`.
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

        ``deadline``: end of the wait on the clock of ``time.monotonic``. A function is called repeatedly, and
        an error raised by it ends the wait.
        Returns the ticket, with the granted parts in ``entry.parts``. Pass it to :meth:`release` after the
        worker has ended. If this process is killed, the kernel releases the lease when the worker has ended.
        Raises LeaseError if this host can never grant the claim, or if the ledger cannot be used.
        Raises LeaseTimeoutError if the claim was not granted by the deadline. The message names the holders.
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
        """Write a ticket, with its parts if the claim can be granted at once."""
        version = claimant.version()
        with self._locked(claimant.count > 0) as readings:
            _check_nvml(readings, claimant)
            own_folder = self.folder.own_folder()
            state = self._read_state(readings, verify=True)
            alive = (*state.holders, *state.waiting)
            tickets.remove_stale(own_folder, [entry for entry in alive if entry.user == os.getuid()])
            order = 1 + max((entry.order for entry in alive), default=0)
            entry = tickets.new_entry(own_folder, order, claimant.count, claimant.pack)
            entry = self._with_needs(entry, claimant, state, readings)
            state = replace(state, waiting=(*state.waiting, entry))
            state = replace(state, host=self._host_cards(readings, state.holders, state.waiting))
            parts = state.granted().get(entry.id, ())
            ticket = Ticket.create(own_folder, replace(entry, parts=parts), claimant.label)
            _withdraw_if_unsafe(ticket, readings)
        if not ticket.entry.parts:
            _wake_holders(state.holders, ticket.entry)
        return ticket, state, version

    def release(self, ticket: Ticket) -> None:
        """Remove a ticket, held or waiting, and wake the claims that can go on without it.

        The ticket stays if a process of its worker still runs: that process keeps the lease until it ends.
        The first claim in the queue notices the end.
        """
        try:
            with self._clear_errors():
                if not ticket.release_lock():
                    ticket.close()
                    return
                # Removed in a step of its own, so that the lease is free even if the next step fails.
                with self.folder.locked():
                    ticket.remove()
                    entries = self._reader.read(self.folder.all())
                if any(not entry.parts for entry in entries):
                    with self._locked(asks_for_gpus=False) as readings:
                        state = self._read_state(readings)
                        _wake(state.waiting, self._grantable(state))
        except LeaseError:
            # The ledger cannot be used. Without a file, the ticket does not count.
            ticket.remove()

    def status(self, *, asks_for_gpus: bool = True) -> State:
        """Return the state of the ledger. Waits for the mutex, so that no half-done change is seen.

        ``asks_for_gpus``: False if the cards of GPUs are needed only if a claim waits for them.
        """
        with self._clear_errors(), self._locked(asks_for_gpus=asks_for_gpus) as readings:
            return self._read_state(readings, verify=True)

    @contextmanager
    def _locked(self, asks_for_gpus: bool) -> Iterator[Readings]:
        """Hold the mutex. Yields readings from just before the mutex was acquired."""
        # Reading the tickets here fills the reader's cache, so little is left to read with the mutex held.
        readings = Readings.take(self._reader.read(self.folder.all()), asks_for_gpus=asks_for_gpus)

        def renew() -> None:
            nonlocal readings
            if time.monotonic() > readings.fresh_until:
                readings = Readings.take(self._reader.read(self.folder.all()), asks_for_gpus=asks_for_gpus)

        with self.folder.locked(renew) as is_held:
            yield replace(readings, is_held=is_held)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn each OSError into a LeaseError that names the ledger's folder."""
        try:
            yield
        except GPUError:  # comes first, because some of our errors are OSErrors too
            raise
        except OSError as error:
            raise LeaseError(f"the ledger in {self.folder.root} cannot be used: {error}") from error

    def _read_state(self, readings: Readings, *, verify: bool = False) -> State:
        """Read all tickets. The mutex must be held.

        ``verify``: also check which waiting processes have died. With hundreds of waiting processes, this
        takes most of the time.
        """
        folders = self.folder.all()
        stamps = self.folder.stamps(folders)
        entries = self._reader.read(folders)
        alive = [entry for entry in entries if not (entry.parts or verify) or self._is_alive(entry)]
        if verify:
            self._verified_at = time.monotonic()
        holders = tuple(entry for entry in alive if entry.parts)
        waiting = tuple(entry for entry in alive if not entry.parts)
        cards = readings.cards(holders, self._reserve_bytes)
        host_cards = self._host_cards(readings, holders, waiting)
        self._reader.warn_of_invalid()
        invalid = self._reader.invalid
        return State(readings.inventory.usable, cards, host_cards, holders, waiting, invalid, stamps)

    def _may_have_changed(self, state: State) -> bool:
        """Return True if the ledger or the cards may have changed since ``state``.

        Needs neither the mutex nor a look at all tickets.
        """
        if self.folder.stamps(self.folder.all()) != state.stamps:
            return True
        if not all(entry.is_alive() for entry in state.holders):
            return True
        readings = Readings.take((*state.holders, *state.waiting), asks_for_gpus=False)
        cards = (
            *readings.cards(state.holders, self._reserve_bytes),
            *self._host_cards(readings, state.holders, state.waiting),
        )
        return _rounded(cards) != _rounded((*state.cards, *state.host))

    def _host_cards(
        self, readings: Readings, holders: Sequence[Entry], waiting: Sequence[Entry]
    ) -> tuple[Card, ...]:
        return readings.host.cards(holders, waiting, self._host_reserve_bytes)

    def _is_alive(self, entry: Entry) -> bool:
        if entry.is_alive():
            return True
        self._reader.forget(entry)
        return False

    def _grantable(self, state: State) -> dict[str, tuple[Part, ...]]:
        """Return the parts of each waiting claim that can be granted now, leaving out dead processes."""
        granted = state.granted()
        if all(self._is_alive(entry) for entry in state.waiting if entry.id in granted):
            return granted
        return replace(state, waiting=tuple(filter(self._is_alive, state.waiting))).granted()

    def sizes(self, gpus: Sequence[GPU]) -> dict[str, int]:
        """Return the bytes of each GPU that leases could use on an idle host, by UUID."""
        return {
            gpu.uuid: (gpu.total_bytes or 0) - (gpu.reserved_bytes or 0) - self._reserve_bytes for gpu in gpus
        }

    def _with_needs(self, entry: Entry, claimant: Claimant, state: State, readings: Readings) -> Entry:
        """Return an entry with its claimant's present needs."""
        host_needs = readings.host.needs(claimant.host_needs())
        if not claimant.count:
            return replace(entry, host_needs=host_needs)
        requested = claimant.gpu_needs(state.gpus)
        sizes = self.sizes(state.gpus)
        satisfiable = admission.satisfiable(sizes, requested)
        if len(satisfiable) < claimant.count:
            raise LeaseError(wording.why_never(claimant.name, claimant.count, requested, state.gpus, sizes))
        exclusive = {gpu.uuid for gpu in state.gpus if gpu.is_exclusive}
        gpu_needs = tuple(
            GPUNeed(need.uuid, alone=True) if need.uuid in exclusive else need for need in satisfiable
        )
        return replace(entry, gpu_needs=gpu_needs, host_needs=host_needs)

    def _wait(
        self, ticket: Ticket, claimant: Claimant, version: object, state: State, deadline: Deadline
    ) -> None:
        """Wait until the ticket is granted."""
        while True:
            present_version, verify = self._pause(ticket, claimant, version, state, deadline)
            with self._locked(claimant.count > 0) as readings:
                _check_nvml(readings, claimant)
                state = self._read_state(readings, verify=verify)
                if ticket.entry.id not in [entry.id for entry in state.waiting]:
                    raise LeaseError(f"{claimant.name}: its ticket {ticket.entry.path} was removed")
                if present_version != version:
                    version = present_version
                    ticket.write(self._with_needs(ticket.entry, claimant, state, readings))
                    waiting = [ticket.entry if e.id == ticket.entry.id else e for e in state.waiting]
                    state = replace(state, waiting=tuple(waiting))
                    _wake_holders(state.holders, ticket.entry)
                grantable = self._grantable(state)
                parts = grantable.pop(ticket.entry.id, ())
                if parts:
                    ticket.write(replace(ticket.entry, parts=parts, since=time.time()))
                    _withdraw_if_unsafe(ticket, readings)
                _wake(state.waiting, grantable)
            if ticket.entry.parts:
                return

    def _pause(
        self, ticket: Ticket, claimant: Claimant, version: object, state: State, deadline: Deadline
    ) -> tuple[object, bool]:
        """Wait until the claim should be decided again.

        Returns the version of the claimant's needs, and True if dead processes should be looked for.
        Raises LeaseTimeoutError after the deadline.
        """
        earlier = [entry for entry in state.waiting if entry.order < ticket.entry.order]
        if earlier and not self._is_alive(earlier[-1]):
            return version, True
        # Earlier claims poll the host as well, but their processes may be stopped (Ctrl-Z).
        poll_every_s = _TAKEOVER_S * len(earlier)
        poll_at = time.monotonic() + poll_every_s
        while True:
            pause_s = min(_NEXT_POLLS_S * len(earlier), _MAX_POLL_S) if earlier else _FIRST_POLLS_S
            if callable(deadline):
                pause_s = min(pause_s, _DEADLINE_POLL_S)
            was_woken = ticket.wait(min(pause_s, _time_of(deadline) - time.monotonic()))
            now = time.monotonic()
            if now >= _time_of(deadline):
                text = wording.what_is_held(self.status(), ticket.entry, claimant.name)
                raise LeaseTimeoutError(text)
            present_version = claimant.version()
            if was_woken or present_version != version:
                return present_version, False
            if earlier and not earlier[-1].is_alive():
                # The file of a killed process is still there. A claim that was granted or given up needs no
                # check.
                return present_version, earlier[-1].path.exists()
            if now >= poll_at:
                poll_at = now + poll_every_s
                if self._may_have_changed(state):
                    return present_version, now >= self._verified_at + _VERIFY_EVERY_S


def _check_nvml(readings: Readings, claimant: Claimant) -> None:
    """Raise LeaseError if NVML hangs: a process that kept its place in the queue would block the others."""
    if claimant.count and readings.inventory.hangs:
        raise LeaseError(f"{claimant.name} gets no lease: {readings.inventory.problem}")


def _time_of(deadline: Deadline) -> float:
    if deadline is None:
        return math.inf
    return deadline() if callable(deadline) else deadline


def _withdraw_if_unsafe(ticket: Ticket, readings: Readings) -> None:
    """Withdraw a new grant if another process may have decided at the same time.

    The mutex was replaced in that case. If it is still the same file after the ticket was written, every
    later decision has seen the ticket.
    """
    if ticket.entry.parts and not readings.is_held():
        ticket.write(replace(ticket.entry, parts=()))


def _wake(waiting: Sequence[Entry], ids: Container[str]) -> None:
    for entry in waiting:
        if entry.id in ids:
            entry.wake()


def _wake_holders(holders: Sequence[Entry], claim: Entry) -> None:
    """Wake the holders of cards that a claim needs, so that they release leases of idle workers."""
    names = {need.uuid for need in claim.gpu_needs} | {need.resource for need in claim.host_needs}
    for entry in holders:
        if any(part.uuid in names for part in entry.parts):
            entry.wake()


def _rounded(cards: Sequence[Card]) -> list[tuple[str, int]]:
    return [(card.uuid, card.capacity_bytes // _COARSE_BYTES) for card in cards]


def reason_for_wait(pids: Container[int]) -> str:
    """Return what the first waiting claim of these processes lacks, in words, or an empty text."""
    try:
        state = Ledger().status()
    except (OSError, GPUError):
        return ""
    return wording.reason_for_wait(state, pids)
