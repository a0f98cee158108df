"""What the host's GPUs and its ledger say at one moment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from flower_gpu.errors import FlowerGPUError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.inventory import GPU
from flower_gpu.leases.ledger import Ledger, State
from flower_gpu.leases.ledger_folder import LedgerFolder

_log = logging.getLogger("flwr.flower_gpu")

# Prometheus waits 10 s for an answer by default; the mutex is held for milliseconds.
_MUTEX_WAIT_S: Final = 2.0


@dataclass(frozen=True)
class HostState:
    """GPUs and leases at one moment."""

    gpus: tuple[GPU, ...] = ()  # broken ones, too
    celsius: Mapping[str, int] = field(default_factory=dict)  # by UUID of the card
    leases: State | None = None  # None: the ledger cannot be read


class Host:
    """Looks at GPUs and ledger; what cannot be had is missing, and the reason is logged once."""

    def __init__(self, reserve_bytes: int) -> None:
        self._reserve_bytes = reserve_bytes
        self._ledger: Ledger | None = None
        self._problem = ""

    def look(self) -> HostState:
        """Look now. NVML is given back: an administrator may want to reset a GPU between two looks."""
        try:
            return HostState(inventory.take(processes=False).gpus, inventory.temperatures(), self._leases())
        finally:
            inventory.close()

    def _leases(self) -> State | None:
        try:
            if self._ledger is None:
                folder = replace(LedgerFolder.find(), mutex_wait_s=_MUTEX_WAIT_S)
                self._ledger = Ledger(folder, self._reserve_bytes)
            state = self._ledger.status()
            self._problem = ""
            return state
        except (FlowerGPUError, OSError) as error:
            self._ledger = None  # looked for anew the next time
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("the ledger cannot be read: %s", error)
            return None
