"""The host-wide record of leases: asking, waiting, letting go. There is no daemon.

Each process decides for itself, by :func:`flower_gpu.leases.admission.plan` over all tickets with the mutex
held, and grants leases to itself only. A process that changes the ledger wakes the waiting processes that can
go on. The first in line also looks by itself: holders may have been killed, and other programs come and go.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from flower_gpu.errors import GPUError, LeaseError, LeaseTimeoutError
from flower_gpu.gpu import inventory, sharing
from flower_gpu.gpu.inventory import GPU, GPUProcess, Inventory
from flower_gpu.leases import admission, host, tickets
from flower_gpu.leases.admission import CORES, Card, CardRequest, Need, Part
from flower_gpu.leases.host import HostMeasured
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Entry, Reader, Ticket
from flower_gpu.printable import format_bytes

_FIRST_LOOKS_S = 0.05  # how often the first in line looks whether it can go on
_NEXT_LOOKS_S = 0.1  # how often the second looks whether the first is still there; later ones more rarely
_OTHERS_LOOK_S = 5.0  # how often the others do so at least
_STEP_IN_S = 2.0  # after so long the second does the work of the first as well; later ones after longer
_ASK_S = 0.5  # how often a deadline that may change is read, at least
_VERIFY_EVERY_S = 0.5  # how often the first in line checks which waiting processes are dead
_FRESH_S = 1.0  # a measurement this old is repeated before the mutex is taken
_COARSE_BYTES = 16 << 20  # a change of a GPU's use by less is no reason to decide anew

#: When a wait ends, on the clock of ``time.monotonic``; or a function that returns that; or None: never.
Deadline = float | Callable[[], float] | None


@dataclass(frozen=True)
class Wish:
    """A request to the ledger."""

    # Returns the options for these GPUs (all usable and allowed ones) as of now: the footprint of a task may
    # change while the request waits
    options: Callable[[Sequence[GPU]], tuple[CardRequest, ...]]
    version: Callable[[], object] = lambda: None  # returns a value that differs after such a change
    count: int = 1  # how many GPUs; 0: none, only what ``needs`` returns
    # Returns what it takes of the host's cores and main memory, as of now
    needs: Callable[[], tuple[Need, ...]] = lambda: ()
    pack: bool = False  # see :class:`flower_gpu.leases.admission.Claim`
    label: str = ""  # what it is for; shown to this account only


@dataclass(frozen=True)
class State:
    """What the ledger says at one moment."""

    gpus: tuple[GPU, ...]  # those that can be used
    cards: tuple[Card, ...]  # the same, as admission sees them
    host: tuple[Card, ...]  # cores and main memory
    holders: tuple[Entry, ...]  # leases
    waiting: tuple[Entry, ...]  # requests that wait, in the order of the line
    # Files in the place of tickets that are none, with their accounts
    invalid: Mapping[str, int] = field(default_factory=dict)
    # When something was changed in the ledger, see :meth:`LedgerFolder.stamps`
    stamps: tuple[object, ...] = field(default=(), repr=False, compare=False)

    def granted(self) -> dict[str, tuple[Part, ...]]:
        """Return the parts of each waiting request that can be granted now."""
        holdings = [entry.holding for entry in self.holders]
        cards = (*self.cards, *self.host)
        return admission.plan(cards, holdings, [entry.claim for entry in self.waiting])

    def in_the_way(self, leases: Sequence[str], waiting: Container[str]) -> set[str]:
        """Return which of some leases have to end, so that requests are granted that wait.

        A request that would not be granted without all of them either has to find what it could use free
        when the rest is.

        ``leases``: ids of leases that can end. The first ones do so first.
        ``waiting``: ids of the requests that count.
        """
        claims = [entry.claim for entry in self.waiting if entry.id in waiting]

        def granted(ended: Container[str]) -> set[str]:
            holdings = [entry.holding for entry in self.holders if entry.id not in ended]
            return set(admission.plan((*self.cards, *self.host), holdings, claims))

        ending = set(leases)
        most = granted(ending)
        others = [entry for entry in self.waiting if entry.id in waiting and entry.id not in most]
        parts = {entry.id: entry.parts for entry in self.holders}
        for lease in reversed(leases):
            is_used = any(entry.could_use(parts.get(lease, ())) for entry in others)
            if not is_used and granted(ending - {lease}) >= most:
                ending.discard(lease)
        return ending

    def leased_bytes(self, uuid: str) -> int:
        """Memory of a GPU that is leased; of cores, thousandths of a core."""
        return sum(part.memory_bytes for entry in self.holders for part in entry.parts if part.uuid == uuid)


@dataclass(frozen=True)
class _DriverReadings:
    """What NVML says, asked before the mutex is taken: the answer may take seconds, or never come.

    Leases come and go between the answer and the decision. So the decision reads leases from the tickets as
    they are now, and takes only the use of other programs from the older answer. That use may come out too
    high: the next look corrects it. It must not come out too low, or memory would be leased that other
    programs have.

    The use of other programs is all that NVML counted, less what workers used *at that time*:

    - what a worker had reported before NVML was asked, or what NVML reported of it; no later report counts;
    - nothing for leases that are newer than the answer: their workers had reported nothing;
    - for leases that have ended since, what NVML reported of the worker. Where it reports none, their memory
      counts as another program's until the next look.
    """

    found: Inventory  # the GPUs; none where nobody asks for one
    host: HostMeasured  # cores and main memory
    held: Sequence[Entry]  # the leases before that
    # By ticket the last report of its worker before that, see :meth:`Entry.reported`
    told: Mapping[str, tuple[int, dict[str, int]]]
    fresh_until: float  # On the clock of ``time.monotonic``. Other programs' use may have grown by then.
    is_held: Callable[[], bool] = lambda: True  # see :meth:`LedgerFolder.locked`


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
        self._pid_namespace = tickets.pid_namespace()
        self._verified_at = 0.0

    def acquire(self, wish: Wish, *, deadline: Deadline = None) -> Ticket:
        """Wait until a request is granted.

        ``wish``: what is asked for.
        ``deadline``: on the clock of ``time.monotonic``. A callable is asked again and again; an error that
        it raises ends the wait.
        Returns the ticket, its parts in ``entry.parts``. Give it back by :meth:`release` once the worker has
        ended. The kernel does so when this process and the worker have both ended, or when the worker has and
        nobody has the ticket any more.
        Raises LeaseError if no GPU of this host can ever grant it, or the ledger cannot be used.
        Raises LeaseTimeoutError if it was not granted by the deadline. The message names who holds what.
        """
        with self._clear_errors():
            ticket, state, version = self._enqueue(wish)
            try:
                if not ticket.entry.parts:
                    self._wait(ticket, wish, version, state, deadline)
            except BaseException:
                self.release(ticket)
                raise
        return ticket

    def _enqueue(self, wish: Wish) -> tuple[Ticket, State, object]:
        """Write a ticket, granted if that is possible at once."""
        version = wish.version()
        with self._locked(wish.count > 0) as measured:
            _check(measured, wish)
            own = self.folder.own()
            state = self._look(measured, verify=True)
            alive = (*state.holders, *state.waiting)
            tickets.clean(own, [entry for entry in alive if entry.user == os.getuid()])
            options = self._options(wish, state)
            order = 1 + max((entry.order for entry in alive), default=0)
            needs = measured.host.needs(wish.needs())
            entry = tickets.new_entry(own, order, options, wish.count, wish.pack, needs)
            state = replace(state, waiting=(*state.waiting, entry))
            state = replace(state, host=self._host_cards(measured, state.holders, state.waiting))
            parts = _checked(entry, state.granted().get(entry.id, ()))
            ticket = Ticket.create(own, replace(entry, parts=parts), wish.label)
            _take_back(ticket, measured)
        if not ticket.entry.parts:
            _ask(state.holders, ticket.entry)
        return ticket, state, version

    def release(self, ticket: Ticket) -> None:
        """Remove a ticket, held or waiting, and wake the processes that can go on without it."""
        try:
            with self._clear_errors():
                ticket.let_go()
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
        """Return what the ledger says now. It waits for the mutex, so that it sees no half-done change."""
        with self._clear_errors(), self._locked(asks_for_gpus=True) as measured:
            return self._look(measured, verify=True)

    @contextmanager
    def _locked(self, asks_for_gpus: bool) -> Iterator[_DriverReadings]:
        """Hold the mutex, with what was measured just before."""
        # The tickets are read here once more: then little is left to read while others wait for the mutex.
        measured = self._measure(self._reader.read(self.folder.all()), asks_for_gpus)

        def measure_again() -> None:
            nonlocal measured
            if time.monotonic() > measured.fresh_until:
                measured = self._measure(self._reader.read(self.folder.all()), asks_for_gpus)

        with self.folder.locked(measure_again) as is_held:
            yield replace(measured, is_held=is_held)

    def _measure(self, entries: Sequence[Entry], asks_for_gpus: bool) -> _DriverReadings:
        """Look what there is.

        NVML is not asked where no request is about GPUs: its answer takes long, and would start it in
        processes that have no use for it.
        """
        held = [entry for entry in entries if entry.parts]
        told: dict[str, tuple[int, dict[str, int]]] = {}
        found = Inventory((), None, None)
        if asks_for_gpus or any(not entry.parts and entry.count for entry in entries):
            told = {entry.id: entry.reported() for entry in held}
            found = inventory.take()  # after the reports, see _Measured
        return _DriverReadings(found, host.measure(), held, told, time.monotonic() + _FRESH_S)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except GPUError:  # of which some are OSErrors, too
            raise
        except OSError as error:
            raise LeaseError(f"the ledger in {self.folder.root} cannot be used: {error}") from error

    def _look(self, measured: _DriverReadings, *, verify: bool = False) -> State:
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
        cards = self._cards(measured, holders)
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
        measured = self._measure((*state.holders, *state.waiting), asks_for_gpus=False)
        now = (
            *self._cards(measured, state.holders),
            *self._host_cards(measured, state.holders, state.waiting),
        )
        return _roughly(now) != _roughly((*state.cards, *state.host))

    def _cards(self, measured: _DriverReadings, holders: Sequence[Entry]) -> tuple[Card, ...]:
        now = {entry.id for entry in holders}
        ended = [entry for entry in measured.held if entry.id not in now]
        return tuple(self._card(gpu, holders, ended, measured.told) for gpu in measured.found.usable)

    def _host_cards(
        self, measured: _DriverReadings, holders: Sequence[Entry], waiting: Sequence[Entry]
    ) -> tuple[Card, ...]:
        return measured.host.cards(holders, waiting, self._host_reserve_bytes)

    def _is_alive(self, entry: Entry) -> bool:
        if entry.is_alive():
            return True
        self._reader.forget(entry)
        return False

    def _ready(self, state: State) -> dict[str, tuple[Part, ...]]:
        """Return the parts of each waiting request that can be granted now and whose process lives."""
        granted = state.granted()
        if all(self._is_alive(entry) for entry in state.waiting if entry.id in granted):
            return granted
        return replace(state, waiting=tuple(filter(self._is_alive, state.waiting))).granted()

    def _card(
        self,
        gpu: GPU,
        holders: Sequence[Entry],
        ended: Sequence[Entry],
        reports: Mapping[str, tuple[int, dict[str, int]]],
    ) -> Card:
        """Return how much of a GPU can be leased: all but what other programs use.

        Our workers' use is known as far as they or NVML report it. The rest counts as other programs' use, so
        that unknown use is never leased.
        """
        assert gpu.total_bytes is not None and gpu.used_bytes is not None
        listed = {process.pid: process.used_bytes for process in gpu.processes or ()}
        if _other_program(gpu) and not any(
            part.uuid == gpu.uuid for entry in (*holders, *ended) for part in entry.parts
        ):
            return Card(gpu.uuid, 0)
        ours = untold = 0
        for entry in (*holders, *ended):
            leased = sum(part.memory_bytes for part in entry.parts if part.uuid == gpu.uuid)
            if leased:
                pid, told = reports.get(entry.id, (0, {}))
                used = min(told.get(gpu.uuid, 0), leased)
                is_seen = entry.pid_namespace == self._pid_namespace
                if is_seen and listed.get(pid) is not None:
                    used = min(listed[pid] or 0, leased)
                elif entry in ended or (is_seen and pid and not Path(f"/proc/{pid}").exists()):
                    used = 0  # its worker is gone, and what it used may be another program's by now
                else:
                    untold += leased - used
                ours += used
        others = max(0, gpu.used_bytes - ours)
        most = gpu.total_bytes - (gpu.reserved_bytes or 0) - self._reserve_bytes
        return Card(gpu.uuid, max(0, most - others), min(untold, others, max(0, most)))

    def sizes(self, gpus: Sequence[GPU]) -> dict[str, int]:
        """Return how many bytes of each GPU leases could have if nothing else ran there."""
        return {
            gpu.uuid: (gpu.total_bytes or 0) - (gpu.reserved_bytes or 0) - self._reserve_bytes for gpu in gpus
        }

    def _options(self, wish: Wish, state: State) -> tuple[CardRequest, ...]:
        if not wish.count:
            return ()
        options = wish.options(state.gpus)
        sizes = self.sizes(state.gpus)
        possible = admission.possible(sizes, options)
        if len(possible) < wish.count:
            raise LeaseError(_impossible(wish, options, state.gpus, sizes))
        alone = {gpu.uuid for gpu in state.gpus if sharing.is_for_one(gpu, os.environ)}
        return tuple(CardRequest(one.uuid, alone=True) if one.uuid in alone else one for one in possible)

    def _wait(self, ticket: Ticket, wish: Wish, version: object, state: State, deadline: Deadline) -> None:
        """Wait until the ticket is granted."""
        while True:
            news, verify = self._pause(ticket, wish, version, state, deadline)
            with self._locked(wish.count > 0) as measured:
                _check(measured, wish)
                state = self._look(measured, verify=verify)
                if ticket.entry.id not in [entry.id for entry in state.waiting]:
                    raise LeaseError(f"{wish.label or 'a call'}: its ticket {ticket.entry.path} was removed")
                if news != version:
                    version = news
                    needs = measured.host.needs(wish.needs())
                    ticket.write(replace(ticket.entry, options=self._options(wish, state), needs=needs))
                    waiting = [ticket.entry if e.id == ticket.entry.id else e for e in state.waiting]
                    state = replace(state, waiting=tuple(waiting))
                    _ask(state.holders, ticket.entry)
                ready = self._ready(state)
                parts = _checked(ticket.entry, ready.pop(ticket.entry.id, ()))
                if parts:
                    ticket.write(replace(ticket.entry, parts=parts, since=time.time()))
                    _take_back(ticket, measured)
                _wake(state.waiting, ready)
            if ticket.entry.parts:
                return

    def _pause(
        self, ticket: Ticket, wish: Wish, version: object, state: State, deadline: Deadline
    ) -> tuple[object, bool]:
        """Wait until another look is worth it; return the wish's version and whether to verify who lives."""
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
                raise LeaseTimeoutError(self._what_is_held(wish, ticket))
            news = wish.version()
            if woken or news != version:
                return news, False
            if elder and not elder[-1].is_alive():
                return news, elder[-1].path.exists()  # killed, and not only gone
            if now >= look_at:
                look_at = now + look_every_s
                if self._is_old(state):
                    return news, now >= self._verified_at + _VERIFY_EVERY_S

    def _what_is_held(self, wish: Wish, ticket: Ticket) -> str:
        state = self.status()
        lines = []
        for card in state.host if not wish.count else ():
            lines.append(f"{amount_text(card.uuid, card.capacity_bytes)} can be leased in all")
            for entry in state.holders:
                for part in entry.parts:
                    if part.uuid == card.uuid and part.memory_bytes:
                        amount = amount_text(part.uuid, part.memory_bytes)
                        lines.append(f"  {amount} held by {describe(entry)}")
        for gpu, card in zip(state.gpus, state.cards, strict=True) if wish.count else ():
            free = card.capacity_bytes - state.leased_bytes(gpu.uuid)
            lines.append(f"GPU {gpu.index} ({gpu.name}): {format_bytes(max(0, free))} can be leased")
            for entry in state.holders:
                for part in entry.parts:
                    if part.uuid == gpu.uuid:
                        lines.append(f"  {format_bytes(part.memory_bytes)} held by {describe(entry)}")
            if not card.capacity_bytes and (other := _other_program(gpu)):
                lines.append(
                    f"  its compute mode is {gpu.compute_mode}, and process {other.pid} {other.name} has it: "
                    f"end that, or as root nvidia-smi -i {gpu.index} -c DEFAULT"
                )
        for first in state.waiting[:1]:
            if first.id != ticket.entry.id:  # nobody gets what is kept for it, also if it never takes that
                lines.append(f"first in line: {describe(first)}")
        text = "\n".join(lines)
        what = "GPU" if wish.count else "cores or memory"
        return f"{wish.label or 'a call'} got no {what} in time; {len(state.waiting)} were waiting.\n{text}"


def _other_program(gpu: GPU) -> GPUProcess | None:
    """Return who computes on a GPU that is for one process at a time; None where nobody is in the way."""
    if not sharing.is_for_one(gpu, os.environ):
        return None
    return next((process for process in gpu.processes or () if process.computes), None)


def _check(measured: _DriverReadings, wish: Wish) -> None:
    """Fail if NVML hangs: a process that kept its place in the line would keep the others waiting."""
    if wish.count and measured.found.hangs:
        raise LeaseError(f"{wish.label or 'a call'} gets no lease: {measured.found.problem}")


def amount_text(uuid: str, amount: int) -> str:
    """Return an amount of cores or main memory in words."""
    if admission.kind_of(uuid) == CORES:
        return f"{amount / 1000:g} core{'' if amount == 1000 else 's'}"
    what = (
        "main memory" if admission.kind_of(uuid) == admission.MEMORY else "memory of calls not measured yet"
    )
    return f"{format_bytes(amount)} of {what}"


def describe(entry: Entry) -> str:
    """Name the owner of a ticket."""
    user = "" if entry.user == os.getuid() else f" of user {entry.user}"
    seconds = max(0.0, time.time() - entry.since)
    return f"{entry.label() or 'process'} (pid {entry.pid}{user}) for {seconds:.0f} s"


def _at(deadline: Deadline) -> float:
    if deadline is None:
        return math.inf
    return deadline() if callable(deadline) else deadline


def _take_back(ticket: Ticket, measured: _DriverReadings) -> None:
    """Give up what was just granted if another process may have decided at the same time.

    If the mutex was still the same file after the ticket was written, whoever decides later has seen that.
    """
    if ticket.entry.parts and not measured.is_held():
        ticket.write(replace(ticket.entry, parts=()))


def _checked(entry: Entry, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return what was granted to a request; an error if that is not what it asks for."""
    if parts and not admission.answers(parts, entry.claim):
        raise LeaseError(f"the ledger granted {parts} to a request for {entry.options} and {entry.needs}")
    return parts


def _wake(waiting: Sequence[Entry], ready: Container[str]) -> None:
    for entry in waiting:
        if entry.id in ready:
            entry.wake()


def _ask(holders: Sequence[Entry], asking: Entry) -> None:
    """Have the owners of leases look whether a request needs one of them that nobody uses."""
    names = {option.uuid for option in asking.options} | {need.resource for need in asking.needs}
    for entry in holders:
        if any(part.uuid in names for part in entry.parts):
            entry.wake()


def _roughly(cards: Sequence[Card]) -> list[tuple[str, int]]:
    return [(card.uuid, card.capacity_bytes // _COARSE_BYTES) for card in cards]


def _impossible(
    wish: Wish, options: Sequence[CardRequest], gpus: Sequence[GPU], sizes: dict[str, int]
) -> str:
    what = wish.label or "a request"
    if not gpus:
        return f"{what}: this host has no usable GPU (see flower-gpu gpus)"
    room = ", ".join(
        f"GPU {gpu.index} ({gpu.name}) has {format_bytes(max(0, sizes[gpu.uuid]))} for leases" for gpu in gpus
    )
    if wish.count > 1 and len(options) < wish.count:
        return f"{what} asks for {wish.count} GPUs and may use {len(options)}: {room}"
    asked = max((option.memory_bytes or 0 for option in options), default=0)
    if asked:
        return f"{what} asks for {format_bytes(asked)} of one GPU, which none can ever give: {room}"
    least = format_bytes(admission.LEAST_SHARE_BYTES)
    return f"{what} asks for a share that would be less than {least}, too little for CUDA itself: {room}"
