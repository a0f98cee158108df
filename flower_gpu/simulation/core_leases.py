"""Leases of a run on cores: each is used by one message after the other, until somebody else waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from flower_gpu.calls import notices
from flower_gpu.calls.settings import HostSettings
from flower_gpu.errors import GPUError, LeaseError, LeaseTimeoutError
from flower_gpu.leases.admission import CORES, HostNeed, kind_of
from flower_gpu.leases.entries import Reader
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Ticket

_LOOK_S: Final = 0.25  # between two looks whether somebody else waits for cores
# That a lease stays at least while messages follow one another, also where others wait: to ask the ledger for
# each message costs a short one a good part of its time.
_TURN_S: Final = 0.5


class CoreLeases:
    """The cores that the messages of a run on the CPU have.

    A lease stays with the run when a message ends: the next one costs nothing. A thread looks whether
    somebody else waits for cores; then each lease goes back when its message ends and its turn is over, and
    idle ones at once.

    ``settings``: of the run's calls.
    ``amount``: what each message gets, in thousandths of a core.
    ``most``: how many leases there are at most; a message beyond these goes along with the others.
    ``label``: what the ledger shows.
    """

    def __init__(self, settings: HostSettings, amount: int, most: int, label: str) -> None:
        self._settings = settings
        self._needs = (HostNeed(CORES, amount, least=amount),)
        self._most = most
        self._label = label
        self._changed = threading.Condition()
        self._idle: list[Ticket] = []
        self._turns: dict[str, float] = {}  # until when leases stay, by ticket
        self._held = 0
        self._is_asking = False
        self._is_off = not settings.is_leased
        self._is_wanted = False
        self._end = threading.Event()
        self._ledger: Ledger | None = None
        self._watcher: threading.Thread | None = None

    @contextmanager
    def held(self, check: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Wait for cores, and hold them in the block.

        ``check``: called again and again; what it raises ends the wait.
        """
        ticket = self._take(check)
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

    def _take(self, check: Callable[[], object]) -> Ticket | None:
        with self._changed:
            while True:
                check()
                if self._is_off:
                    return None
                if self._idle:
                    return self._idle.pop()
                if self._held >= self._most:
                    return None
                if not self._is_asking:
                    self._is_asking = True
                    break
                self._changed.wait()
        ticket = None
        try:
            ticket = self._ask(check)
        finally:
            with self._changed:
                self._is_asking = False
                if ticket is not None:
                    self._held += 1
                    self._turns[ticket.entry.id] = time.monotonic() + _TURN_S
                self._changed.notify_all()
        return ticket

    def _ask(self, check: Callable[[], object]) -> Ticket | None:
        """Ask the ledger; None where it cannot be used, and nobody has named a number of cores."""
        ends = time.monotonic() + self._settings.timeout_s  # by default infinity

        def deadline() -> float:
            check()
            return ends

        claimant = Claimant(count=0, host_needs=lambda: self._needs, label=self._label)
        try:
            if self._ledger is None:
                self._ledger = Ledger(host_reserve_bytes=self._settings.reserve_bytes)
                self._watcher = threading.Thread(target=self._watch, name="flower-gpu-cores", daemon=True)
                self._watcher.start()
            return self._ledger.acquire(claimant, deadline=deadline)
        except LeaseTimeoutError:
            raise
        except LeaseError as error:
            if self._settings.num_cpus is not None:
                raise
            notices.say_once(f"messages run without counted cores: {error}")
            self._is_off = True
            return None

    def _give(self, ticket: Ticket) -> None:
        with self._changed:
            has_turn = time.monotonic() < self._turns[ticket.entry.id]
            if (has_turn or not self._is_wanted) and not self._end.is_set():
                self._idle.append(ticket)
                self._changed.notify()
                return
            self._held -= 1
        self._release([ticket])
        self.wake()

    def _release(self, given_back: list[Ticket]) -> None:
        for ticket in given_back:
            self._turns.pop(ticket.entry.id, None)
            Ledger(self._ledger.folder if self._ledger else None).release(ticket)

    def _watch(self) -> None:
        reader = Reader()
        while not self._end.wait(_LOOK_S):
            try:
                entries = reader.read(LedgerFolder.find().all())
            except (OSError, GPUError):  # no more files can be opened; whoever asks for a lease is told
                continue
            waiting = sum(
                not entry.parts
                and any(need.least and kind_of(need.resource) == CORES for need in entry.host_needs)
                and entry.is_alive()
                for entry in entries
            )
            idle: list[Ticket] = []
            with self._changed:
                # One of them may be of these leases themselves, but not of the server's evaluation.
                self._is_wanted = waiting > self._is_asking
                if self._is_wanted:
                    idle, self._idle = self._idle, []
                    self._held -= len(idle)
            self._release(idle)
            if idle:
                self.wake()
