"""The state of the ledger at one moment, by tickets and the driver: cards, leases, requests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU, GPUProcess, Inventory, is_for_one
from flower_gpu.leases import admission, host
from flower_gpu.leases.admission import Card, Part
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.leases.host import HostMeasured

_FRESH_S = 1.0  # a measurement this old is repeated before the mutex is taken


@dataclass(frozen=True)
class State:
    """What the ledger says at one moment."""

    gpus: tuple[GPU, ...]  # those that can be used
    cards: tuple[Card, ...]  # the same, as admission sees them
    host: tuple[Card, ...]  # cores and main memory
    holders: tuple[Entry, ...]  # leases
    waiting: tuple[Entry, ...]  # claims that wait, in the order of the line
    # Files in the place of tickets that are none, with their accounts
    invalid: Mapping[str, int] = field(default_factory=dict)
    # When something was changed in the ledger, see :meth:`LedgerFolder.stamps`
    stamps: tuple[object, ...] = field(default=(), repr=False, compare=False)

    def granted(self) -> dict[str, tuple[Part, ...]]:
        """Return the parts of each waiting claim that can be granted now."""
        return admission.plan((*self.cards, *self.host), self.holders, self.waiting)

    def in_the_way(self, leases: Sequence[str], waiting: Container[str]) -> set[str]:
        """Return the leases of a set that have to end, so that waiting claims are granted.

        A claim that would not be granted without all of them either has to find what it could use free
        when the rest is.

        ``leases``: ids of leases that can end. The first ones do so first.
        ``waiting``: ids of the claims that count.
        """
        claims = [entry for entry in self.waiting if entry.id in waiting]

        def granted(ended: Container[str]) -> set[str]:
            held = [entry for entry in self.holders if entry.id not in ended]
            return set(admission.plan((*self.cards, *self.host), held, claims))

        ending = set(leases)
        most = granted(ending)
        others = [entry for entry in claims if entry.id not in most]
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
class Readings:
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

    @classmethod
    def take(cls, entries: Sequence[Entry], *, asks_for_gpus: bool) -> Readings:
        """Read tickets and cards.

        NVML is not asked where no claim is about GPUs: its answer takes long, and would start it in
        processes that have no use for it.
        """
        held = [entry for entry in entries if entry.parts]
        told: dict[str, tuple[int, dict[str, int]]] = {}
        found = Inventory((), None, None)
        if asks_for_gpus or any(not entry.parts and entry.count for entry in entries):
            told = {entry.id: entry.reported() for entry in held}
            found = inventory.take()  # after the reports
        return cls(found, host.measure(), held, told, time.monotonic() + _FRESH_S)

    def cards(self, holders: Sequence[Entry], reserve_bytes: int) -> tuple[Card, ...]:
        """Return the GPUs as admission sees them, without the reserve."""
        now = {entry.id for entry in holders}
        ended = [entry for entry in self.held if entry.id not in now]
        return tuple(self._card(gpu, holders, ended, reserve_bytes) for gpu in self.found.usable)

    def _card(
        self,
        gpu: GPU,
        holders: Sequence[Entry],
        ended: Sequence[Entry],
        reserve_bytes: int,
    ) -> Card:
        """Return the card of a GPU: all memory that other programs do not use.

        Our workers' use is known as far as they or NVML report it. The rest counts as other programs' use, so
        that unknown use is never leased.
        """
        assert gpu.total_bytes is not None and gpu.used_bytes is not None
        listed = {process.pid: process.used_bytes for process in gpu.processes or ()}
        if other_program(gpu) and not any(
            part.uuid == gpu.uuid for entry in (*holders, *ended) for part in entry.parts
        ):
            return Card(gpu.uuid, 0)
        ours = untold = 0
        # What each process uses, less what leases account for: one may have several, in a program that
        # calls in its own process.
        left = {pid: used or 0 for pid, used in listed.items()}
        for entry in (*holders, *ended):
            leased = sum(part.memory_bytes for part in entry.parts if part.uuid == gpu.uuid)
            if leased:
                pid, told = self.told.get(entry.id, (0, {}))
                used_by_process = told.get(gpu.uuid, 0)
                used = min(used_by_process, leased)
                is_seen = entry.pid_namespace == pid_namespace()
                if is_seen and listed.get(pid) is not None:
                    used = self._listed_use(pid, listed[pid] or 0, used_by_process, leased, left)
                elif entry in ended or (is_seen and pid and not Path(f"/proc/{pid}").exists()):
                    used = 0  # its worker is gone, and what it used may be another program's by now
                else:
                    untold += leased - used
                ours += used
        others = max(0, gpu.used_bytes - ours)
        most = gpu.total_bytes - (gpu.reserved_bytes or 0) - reserve_bytes
        return Card(gpu.uuid, max(0, most - others), min(untold, others, max(0, most)))

    def _listed_use(
        self, pid: int, listed_bytes: int, told_bytes: int, leased_bytes: int, left: dict[int, int]
    ) -> int:
        """Return what NVML lists of a worker and its children, and take that from ``left``.

        A worker reports the sum of its processes. The part beyond its own use is that of its children, as far
        as processes of its process group are listed that no lease accounts for. Other programs never count as
        children, because a report may be stale, or written by the code of an app.
        """
        own = min(left[pid], leased_bytes)
        of_other_leases = listed_bytes - left[pid]
        left[pid] -= own
        missing = min(told_bytes - of_other_leases, leased_bytes) - own
        workers = {pid for pid, _ in self.told.values()}
        for other in left:
            if missing > 0 and other not in workers and left[other] and _has_same_group(other, pid):
                taken = min(missing, left[other])
                left[other] -= taken
                own, missing = own + taken, missing - taken
        return own


def _has_same_group(process: int, worker: int) -> bool:
    """Return True if a process is in the process group of a worker, as its children are."""
    try:
        return os.getpgid(process) == os.getpgid(worker)
    except OSError:  # one of them has ended
        return False


def other_program(gpu: GPU) -> GPUProcess | None:
    """Return who computes on a GPU that is for one process at a time; None where nobody is in the way."""
    if not is_for_one(gpu, os.environ):
        return None
    return next((process for process in gpu.processes or () if process.computes), None)
