"""The state of the ledger at one moment: cards, leases and waiting claims."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU, GPUProcess, Inventory
from flower_gpu.leases import admission, host
from flower_gpu.leases.admission import Card, Part
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.leases.host import HostReading

# Readings older than this are repeated before the mutex is acquired
_FRESH_S = 1.0


@dataclass(frozen=True)
class State:
    """The ledger and the cards at one moment."""

    gpus: tuple[GPU, ...]  # all usable GPUs
    cards: tuple[Card, ...]  # the same GPUs, as admission sees them
    host: tuple[Card, ...]  # cores and main memory
    holders: tuple[Entry, ...]  # leases
    waiting: tuple[Entry, ...]  # waiting claims in the order of the queue
    # User ids of the owners of invalid tickets, by path
    invalid: Mapping[str, int] = field(default_factory=dict)
    # Versions of the ledger's folders, see :meth:`LedgerFolder.stamps`
    stamps: tuple[object, ...] = field(default=(), repr=False, compare=False)

    def granted(self) -> dict[str, tuple[Part, ...]]:
        """Return the parts of each waiting claim that can be granted now."""
        return admission.plan((*self.cards, *self.host), self.holders, self.waiting)

    def leases_to_release(self, leases: Sequence[str], waiting: Container[str]) -> set[str]:
        """Return the leases that must be released so that waiting claims are granted.

        Some claims cannot be granted even if all of ``leases`` are released. For these, each lease on a card
        that they need is released too, so that they find it free when the rest becomes free.

        ``leases``: ids of the leases that can be released. Earlier ones are released first.
        ``waiting``: ids of the claims to consider.
        """
        claims = [entry for entry in self.waiting if entry.id in waiting]

        def granted_without(released: Container[str]) -> set[str]:
            holders = [entry for entry in self.holders if entry.id not in released]
            return set(admission.plan((*self.cards, *self.host), holders, claims))

        to_release = set(leases)
        all_granted = granted_without(to_release)
        still_waiting = [entry for entry in claims if entry.id not in all_granted]
        parts_by_lease = {entry.id: entry.parts for entry in self.holders}
        for lease in reversed(leases):
            is_needed = any(entry.could_use(parts_by_lease.get(lease, ())) for entry in still_waiting)
            if not is_needed and granted_without(to_release - {lease}) >= all_granted:
                to_release.discard(lease)
        return to_release

    def leased_bytes(self, uuid: str) -> int:
        """Return the leased memory of a card in bytes; for cores, thousandths of a core."""
        return sum(part.memory_bytes for entry in self.holders for part in entry.parts if part.uuid == uuid)


@dataclass(frozen=True)
class Readings:
    """Measurements of the host from just before the mutex was acquired.

    NVML may take seconds to answer, or never answer, so it must not be called with the mutex held. But leases
    come and go between its answer and the decision. So a decision reads the leases from the tickets of the
    moment, and uses the older answer only for the memory of *other programs*. An estimate of that memory may
    be too high, because the next poll corrects it. It must not be too low, because the memory of other
    programs would be leased.

    The memory of other programs is the total of NVML, less the memory of our workers *at that time*:

    - A worker counts with its last report before NVML was called, or with NVML's own figure for the process.
      Later reports do not count.
    - A lease newer than the answer counts with 0, because its worker had reported nothing.
    - A lease that has ended since counts with NVML's figure for its worker. If NVML has no figure, the memory
      counts as another program's until the next poll.
    """

    inventory: Inventory  # the GPUs; empty if no claim needs a GPU
    host: HostReading  # cores and main memory
    leases: Sequence[Entry]  # the leases before NVML was called
    # The last report of each worker before NVML was called, by ticket, see :meth:`Entry.reported`
    reports: Mapping[str, tuple[int, dict[str, int]]]
    # Time on the clock of ``time.monotonic`` after which the use of other programs may have grown
    fresh_until: float
    is_held: Callable[[], bool] = lambda: True  # see :meth:`LedgerFolder.locked`

    @classmethod
    def take(cls, entries: Sequence[Entry], *, asks_for_gpus: bool) -> Readings:
        """Measure the host.

        NVML is called only if a claim needs a GPU. It answers slowly, and processes without a use for GPUs
        should not have to initialize it.
        """
        holders = [entry for entry in entries if entry.parts]
        reports: dict[str, tuple[int, dict[str, int]]] = {}
        gpus = Inventory((), None, None)
        if asks_for_gpus or any(not entry.parts and entry.count for entry in entries):
            # The reports come first: a later report could make the use of other programs look too low.
            reports = {entry.id: entry.reported() for entry in holders}
            gpus = inventory.take()
        return cls(gpus, host.measure(), holders, reports, time.monotonic() + _FRESH_S)

    def cards(self, holders: Sequence[Entry], reserve_bytes: int) -> tuple[Card, ...]:
        """Return the GPUs as admission sees them, without the reserve."""
        present = {entry.id for entry in holders}
        ended = [entry for entry in self.leases if entry.id not in present]
        return tuple(self._card(gpu, holders, ended, reserve_bytes) for gpu in self.inventory.usable)

    def _card(
        self,
        gpu: GPU,
        holders: Sequence[Entry],
        ended: Sequence[Entry],
        reserve_bytes: int,
    ) -> Card:
        """Return the card of a GPU, with all memory that other programs do not use.

        The use of our workers is known from their reports or from NVML. All other use counts as that of other
        programs, so unknown use is never leased.
        """
        assert gpu.total_bytes is not None and gpu.used_bytes is not None
        listed = {process.pid: process.used_bytes for process in gpu.processes or ()}
        if other_program(gpu) and not any(
            part.uuid == gpu.uuid for entry in (*holders, *ended) for part in entry.parts
        ):
            return Card(gpu.uuid, 0)
        ours = unreported = 0
        # Listed use of each process, less the part already assigned to a lease. A program that calls in its
        # own process may hold several leases.
        unassigned = {pid: used or 0 for pid, used in listed.items()}
        for entry in (*holders, *ended):
            leased = sum(part.memory_bytes for part in entry.parts if part.uuid == gpu.uuid)
            if leased:
                pid, used_by_uuid = self.reports.get(entry.id, (0, {}))
                reported_bytes = used_by_uuid.get(gpu.uuid, 0)
                used = min(reported_bytes, leased)
                is_visible = entry.pid_namespace == pid_namespace()
                if is_visible and listed.get(pid) is not None:
                    used = self._listed_use(pid, listed[pid] or 0, reported_bytes, leased, unassigned)
                elif entry in ended or (is_visible and pid and not Path(f"/proc/{pid}").exists()):
                    # The worker has ended, and another program may already use its memory.
                    used = 0
                else:
                    unreported += leased - used
                ours += used
        others = max(0, gpu.used_bytes - ours)
        leasable = gpu.total_bytes - (gpu.reserved_bytes or 0) - reserve_bytes
        return Card(gpu.uuid, max(0, leasable - others), min(unreported, others, max(0, leasable)))

    def _listed_use(
        self, pid: int, listed_bytes: int, reported_bytes: int, leased_bytes: int, unassigned: dict[int, int]
    ) -> int:
        """Return the listed use of a worker and its children, and subtract it from ``unassigned``.

        A worker reports the sum of its processes, so the part beyond its own use belongs to its children.
        That part is looked for among processes of the worker's process group without a lease. Other processes
        never count as children, because a report may be outdated, or forged by the code of an app.
        """
        used = min(unassigned[pid], leased_bytes)
        used_by_other_leases = listed_bytes - unassigned[pid]
        unassigned[pid] -= used
        missing = min(reported_bytes - used_by_other_leases, leased_bytes) - used
        workers = {pid for pid, _ in self.reports.values()}
        for process in unassigned:
            if missing <= 0:
                break
            if process not in workers and unassigned[process] and _has_same_group(process, pid):
                found_bytes = min(missing, unassigned[process])
                unassigned[process] -= found_bytes
                used, missing = used + found_bytes, missing - found_bytes
        return used


def _has_same_group(process: int, worker: int) -> bool:
    """Return True if a process is in the process group of a worker, as its children are."""
    try:
        return os.getpgid(process) == os.getpgid(worker)
    except OSError:  # one of them has ended
        return False


def other_program(gpu: GPU) -> GPUProcess | None:
    """Return the process that occupies a GPU in exclusive compute mode, or None.

    Also None if the GPU admits several processes.
    """
    if not gpu.is_exclusive:
        return None
    return next((process for process in gpu.processes or () if process.computes), None)
