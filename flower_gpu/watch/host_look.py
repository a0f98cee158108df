"""Reads the state of this host from the driver and the ledger, for the live view and for metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flower_gpu.errors import FlowerGPUError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.leases.entries import Entry
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.state import State


@dataclass(frozen=True)
class Seen:
    """The state of this host at the time ``now``."""

    now: float  # Unix seconds
    inventory: Inventory
    temperatures: Mapping[str, int] = field(default_factory=dict)  # degrees Celsius by UUID of the card
    state: State | None = None  # state of the ledger, or None if it cannot be read
    ledger_problem: str | None = None  # reason why the ledger cannot be read
    #: Report of each lease's worker, by ticket: its pid, and the bytes in use by UUID.
    reports: Mapping[str, tuple[int, Mapping[str, int]]] = field(default_factory=dict)

    @property
    def holders(self) -> tuple[Entry, ...]:
        """Tickets with a lease."""
        return self.state.holders if self.state else ()

    @property
    def capacity_bytes(self) -> dict[str, int]:
        """Current capacity for leases on each card, cores and main memory included."""
        cards = (*self.state.cards, *self.state.host) if self.state else ()
        return {card.uuid: card.capacity_bytes for card in cards}

    def report(self, ticket: str) -> tuple[int, Mapping[str, int]]:
        """Return the pid of a lease's worker, or 0 before its first report, and the bytes in use by UUID."""
        return self.reports.get(ticket, (0, {}))

    def numbers(self, uuids: Iterable[str]) -> tuple[int, ...]:
        """Return the indices of the GPUs. Unknown GPUs are left out."""
        index = {gpu.uuid: gpu.index for gpu in self.inventory.gpus if gpu.uuid}
        return tuple(sorted({index[uuid] for uuid in uuids if uuid in index}))

    def age(self, since: float) -> float:
        """Return the number of seconds since a Unix time."""
        return max(0.0, self.now - since)


def look_at_host(mutex_wait_s: float, reserve_bytes: int) -> Seen:
    """Return the current state of this host, without changing it.

    Processes hold the mutex of the ledger for milliseconds only. If it is held for longer than
    ``mutex_wait_s``, the result has no state of the ledger and gives this as the problem.
    """
    state, problem = None, None
    try:
        folder = replace(LedgerFolder.find(), mutex_wait_s=mutex_wait_s)
        state = Ledger(folder, reserve_bytes).status()
    except (FlowerGPUError, OSError) as error:
        problem = str(error)
    return Seen(
        time.time(),
        inventory.take(processes=False),
        inventory.temperatures(),
        state,
        problem,
        {entry.id: entry.reported() for entry in (state.holders if state else ())},
    )
