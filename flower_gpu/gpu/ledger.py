"""The host-wide record of leases: asking, waiting, letting go. There is no daemon.

Everybody decides alike by :func:`flower_gpu.gpu.admission.plan`, with the mutex held and over what all
tickets say, and grants only to itself. Whoever changes something wakes those who can go on by it; the first in
line also looks by itself, for leases whose holders were killed and for other programs that come and go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from flower_gpu.errors import LeaseError, LeaseTimeoutError
from flower_gpu.gpu import admission, inventory, tickets
from flower_gpu.gpu.admission import Card, Option, Part
from flower_gpu.gpu.inventory import GPU
from flower_gpu.gpu.ledger_folder import LedgerFolder
from flower_gpu.gpu.request import format_bytes
from flower_gpu.gpu.tickets import Entry, Reader, Ticket

_FIRST_LOOKS_S = 0.05  # how often the first in line looks whether it can go on
_OTHERS_LOOK_S = 2.0  # how often the others look whether the one before them is still there
_COARSE_BYTES = 16 << 20  # a change of a GPU's use by less is no reason to decide anew


@dataclass(frozen=True)
class Wish:
    """What a caller asks the ledger for.

    Parameters
    ----------
    options : callable
        Returns the options for these GPUs (all that are usable and allowed) as they are now: what is known of
        a task may change while it waits.
    version : callable
        Returns something that is another one after such a change.
    count : int
        How many GPUs.
    pack : bool
        See :class:`flower_gpu.gpu.admission.Claim`.
    label : str
        What it is for; shown to this account only.
    """

    options: Callable[[Sequence[GPU]], tuple[Option, ...]]
    version: Callable[[], object] = lambda: None
    count: int = 1
    pack: bool = False
    label: str = ""


@dataclass(frozen=True)
class State:
    """What the ledger says at one moment."""

    gpus: tuple[GPU, ...]
    cards: tuple[Card, ...]
    holders: tuple[Entry, ...]
    waiting: tuple[Entry, ...]

    def granted(self) -> dict[str, tuple[Part, ...]]:
        """Return what those who wait could have now."""
        holdings = [entry.holding for entry in self.holders]
        return admission.plan(self.cards, holdings, [entry.claim for entry in self.waiting])

    def leased_bytes(self, uuid: str) -> int:
        """Memory of a GPU that is leased."""
        return sum(part.memory_bytes for entry in self.holders for part in entry.parts if part.uuid == uuid)


class Ledger:
    """A ledger, as one process (or one thread of it) uses it.

    Parameters
    ----------
    folder : LedgerFolder, optional
        Where it is; default: the host's.
    reserve_bytes : int
        Memory of each GPU that is never leased.
    """

    def __init__(self, folder: LedgerFolder | None = None, reserve_bytes: int = 256 << 20) -> None:
        self.folder = folder or LedgerFolder.find()
        self._reserve_bytes = reserve_bytes
        self._reader = Reader()

    def acquire(self, wish: Wish, *, deadline: float | None = None) -> Ticket:
        """Wait until a request is granted.

        Parameters
        ----------
        wish : Wish
            What is asked for.
        deadline : float, optional
            On the clock of ``time.monotonic``.

        Returns
        -------
        Ticket
            What was granted is in its ``entry.parts``. To be let go by :meth:`release`, once the worker is
            gone; it lets go by itself as soon as this process and the worker are both gone.

        Raises
        ------
        LeaseError
            If no GPU of this host can ever grant it, or the ledger cannot be used.
        LeaseTimeoutError
            If it was not granted by the deadline. The message names who holds what.
        """
        own = self.folder.own()
        version = wish.version()
        with self.folder.locked():
            state = self._look(clean=True)
            options = self._options(wish, state)
            entries = (*state.holders, *state.waiting)
            order = 1 + max((entry.order for entry in entries), default=0)
            entry = tickets.new_entry(own, order, options, wish.count, wish.pack)
            granted = replace(state, waiting=(*state.waiting, entry)).granted()
            ticket = Ticket.create(own, replace(entry, parts=granted.get(entry.id, ())), wish.label)
        if ticket.entry.parts:
            return ticket
        try:
            self._wait(ticket, wish, version, deadline)
        except BaseException:
            self.release(ticket)
            raise
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Take a ticket away, held or waiting, and wake those who can go on by it."""
        try:
            with self.folder.locked():
                ticket.remove()
                state = self._look()
                _wake(state.waiting, state.granted())
        except LeaseError:  # the mutex is stuck; to be dead is enough
            ticket.remove()

    def status(self) -> State:
        """Return what the ledger says now. Waits for the mutex, so nothing is seen half done."""
        with self.folder.locked():
            return self._look()

    def _look(self, *, clean: bool = False, roughly: bool = False) -> State:
        """Read everything, with the mutex held.

        Parameters
        ----------
        clean : bool
            Remove what processes of this account have left that are dead.
        roughly : bool
            The mutex is not held: what is seen may be half done, and who waits may be dead.
        """
        entries = self._reader.read(self.folder.all())
        alive = [entry for entry in entries if (roughly and not entry.parts) or entry.is_alive()]
        if clean:
            tickets.clean(self.folder.own(), [entry for entry in alive if entry.user == os.getuid()])
        holders = tuple(entry for entry in alive if entry.parts)
        waiting = tuple(entry for entry in alive if not entry.parts)
        gpus = inventory.take().usable
        return State(gpus, tuple(self._card(gpu, holders) for gpu in gpus), holders, waiting)

    def _card(self, gpu: GPU, holders: Sequence[Entry]) -> Card:
        """Return what of a GPU is there for leases: not what other programs use.

        Of what our workers use, only as much is known as they or NVML tell; the rest counts as others', so
        that what is not known is never given away.
        """
        assert gpu.total_bytes is not None and gpu.used_bytes is not None
        by_pid = {process.pid: process.used_bytes or 0 for process in gpu.processes or ()}
        ours = 0
        for entry in holders:
            leased = sum(part.memory_bytes for part in entry.parts if part.uuid == gpu.uuid)
            if leased:
                pid, told = entry.reported()
                used = told.get(gpu.uuid, 0)
                if pid in by_pid and entry.pid_namespace == tickets.HOST_PID_NAMESPACE:
                    used = by_pid[pid]
                ours += min(used, leased)
        others = max(0, gpu.used_bytes - ours)
        return Card(
            gpu.uuid, max(0, gpu.total_bytes - (gpu.reserved_bytes or 0) - self._reserve_bytes - others)
        )

    def sizes(self, gpus: Sequence[GPU]) -> dict[str, int]:
        """Return by GPU what leases could have of it if nothing else ran there, in bytes."""
        return {
            gpu.uuid: (gpu.total_bytes or 0) - (gpu.reserved_bytes or 0) - self._reserve_bytes for gpu in gpus
        }

    def _options(self, wish: Wish, state: State) -> tuple[Option, ...]:
        options = wish.options(state.gpus)
        sizes = self.sizes(state.gpus)
        possible = admission.possible(sizes, options)
        if len(possible) < wish.count:
            raise LeaseError(_impossible(wish, options, state.gpus, sizes))
        return tuple(possible)

    def _wait(self, ticket: Ticket, wish: Wish, version: object, deadline: float | None) -> None:
        seen: object = None
        before: Entry | None = None  # whoever waits in front of this one
        state: State | None = None
        while True:
            first = state is not None and before is None
            pause_s = _FIRST_LOOKS_S if first else _OTHERS_LOOK_S if state is not None else 0.0
            if deadline is not None:
                pause_s = min(pause_s, deadline - time.monotonic())
            woken = ticket.wait(pause_s)
            if deadline is not None and time.monotonic() >= deadline:
                raise LeaseTimeoutError(self._what_is_held(wish))
            news = wish.version()
            if state is not None and not woken and news == version:
                if before is not None and before.path.exists() and before.is_alive():
                    continue
                # Without the mutex: what it tells may be half done, and is looked at again with it.
                if first and _signature(self._look(roughly=True)) == seen:
                    continue
            with self.folder.locked():
                state = self._look(clean=True)
                if news != version:
                    version = news
                    ticket.write(replace(ticket.entry, options=self._options(wish, state)))
                    waiting = [ticket.entry if e.id == ticket.entry.id else e for e in state.waiting]
                    state = replace(state, waiting=tuple(waiting))
                seen = _signature(state)
                ready = state.granted()
                parts = ready.pop(ticket.entry.id, None)
                if parts:
                    ticket.write(replace(ticket.entry, parts=parts, since=time.time()))
                _wake(state.waiting, ready)
            if parts:
                return
            elder = [entry for entry in state.waiting if entry.order < ticket.entry.order]
            before = elder[-1] if elder else None

    def _what_is_held(self, wish: Wish) -> str:
        state = self.status()
        lines = []
        for gpu, card in zip(state.gpus, state.cards, strict=True):
            free = card.capacity_bytes - state.leased_bytes(gpu.uuid)
            lines.append(f"GPU {gpu.index} ({gpu.name}): {format_bytes(max(0, free))} can be leased")
            for entry in state.holders:
                for part in entry.parts:
                    if part.uuid == gpu.uuid:
                        lines.append(f"  {format_bytes(part.memory_bytes)} held by {describe(entry)}")
        text = "\n".join(lines)
        return f"{wish.label or 'a call'} got no GPU in time; {len(state.waiting)} were waiting.\n{text}"


def describe(entry: Entry) -> str:
    """Name the owner of a ticket."""
    user = "" if entry.user == os.getuid() else f" of user {entry.user}"
    seconds = max(0.0, time.time() - entry.since)
    return f"{entry.label() or 'process'} (pid {entry.pid}{user}) for {seconds:.0f} s"


def _wake(waiting: Sequence[Entry], ready: Container[str]) -> None:
    for entry in waiting:
        if entry.id in ready:
            entry.wake()


def _signature(state: State) -> object:
    """Return what is another one whenever somebody may have become able to go on."""
    entries = [entry.path for entry in (*state.holders, *state.waiting)]
    return entries, [(card.uuid, card.capacity_bytes // _COARSE_BYTES) for card in state.cards]


def _impossible(wish: Wish, options: Sequence[Option], gpus: Sequence[GPU], sizes: dict[str, int]) -> str:
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
