"""What driver and ledger tell of this host at one moment, for the live view and for metrics."""

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
    """What was seen at one moment."""

    now: float  # Unix seconds
    inventory: Inventory
    temperatures: Mapping[str, int] = field(default_factory=dict)  # by UUID of the card
    state: State | None = None  # None: the ledger cannot be used
    ledger_problem: str | None = None  # why
    # By ticket, what its holder has reported: pid, bytes by UUID.
    reports: Mapping[str, tuple[int, Mapping[str, int]]] = field(default_factory=dict)

    @property
    def holders(self) -> tuple[Entry, ...]:
        """The tickets that have a lease."""
        return self.state.holders if self.state else ()

    @property
    def capacity_bytes(self) -> dict[str, int]:
        """What leases can have of each card now, cores and main memory included."""
        cards = (*self.state.cards, *self.state.host) if self.state else ()
        return {card.uuid: card.capacity_bytes for card in cards}

    def report(self, ticket: str) -> tuple[int, Mapping[str, int]]:
        """Return the pid of a lease's worker, 0 before it has reported, and the bytes it uses by UUID."""
        return self.reports.get(ticket, (0, {}))

    def numbers(self, uuids: Iterable[str]) -> tuple[int, ...]:
        """Return the numbers of GPUs, as far as they are there."""
        index = {gpu.uuid: gpu.index for gpu in self.inventory.gpus if gpu.uuid}
        return tuple(sorted({index[uuid] for uuid in uuids if uuid in index}))

    def age(self, since: float) -> float:
        """Return the seconds since a moment."""
        return max(0.0, self.now - since)


def look_at_host(mutex_wait_s: float, reserve_bytes: int) -> Seen:
    """Look at driver and ledger now; change nothing.

    The ledger's mutex is held for milliseconds: that a process holds it longer than ``mutex_wait_s`` is a
    problem to be shown.
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
