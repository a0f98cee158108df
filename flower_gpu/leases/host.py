"""Cores and main memory of this host, as cards: what there is, less what programs without a lease use.

Every process that shares the ledger must count alike. So the cores are those of the host, whatever this
process may use of them; what its control groups allow is a card of its own, and a need of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from flower_gpu import control_group
from flower_gpu.leases.admission import CORES, MEMORY, UNKNOWN_MEMORY, Card, HostNeed, kind_of, of_group
from flower_gpu.leases.entries import Entry

#: Of all main memory, the part that is never leased.
RESERVED_PART: Final = 0.05

#: After so long, what a call that nobody has measured takes is what it needs.
SETTLED_S: Final = 10.0

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Available:
    """Main memory of the host, or of a control group."""

    available_bytes: int  # what can be used before the kernel kills, or slows down
    total_bytes: int
    group: int | None = None  # the control group that has this limit; None: the host


@dataclass(frozen=True)
class HostMeasured:
    """What there is at one moment."""

    cores: int  # of the host, in thousandths
    # What this process's control groups allow: which group it is, and thousandths of a core
    quota: tuple[int, int] | None
    memory: tuple[Available, ...]  # of the host, and of the control group with the least, if one has a limit

    def needs(self, asked: Iterable[HostNeed]) -> tuple[HostNeed, ...]:
        """Return what is asked of the host, and the same of this process's control groups."""
        found = []
        for need in asked:
            found.append(need)
            if need.resource == CORES and self.quota is not None:
                group, capacity = self.quota
                found.append(HostNeed(of_group(CORES, group), need.amount, need.least, capacity))
            for one in self.memory if need.resource == MEMORY else ():
                if one.group is not None:
                    name = of_group(MEMORY, one.group)
                    found.append(HostNeed(name, need.amount, need.least, one.total_bytes))
        return tuple(found)

    def cards(
        self, holders: Sequence[Entry], waiting: Sequence[Entry], reserve_bytes: int | None
    ) -> tuple[Card, ...]:
        """Return what leases may have in all.

        ``holders``, ``waiting``: the tickets.
        ``reserve_bytes``: how much main memory is never leased; default: :data:`RESERVED_PART` of it.
        """
        # What control groups of other processes allow is in their tickets.
        most: dict[str, int] = {}
        for entry in (*holders, *waiting):
            limits = [(part.uuid, part.budget_bytes) for part in entry.parts]
            limits += [(need.resource, need.capacity) for need in entry.host_needs]
            for name, capacity in limits:
                if kind_of(name) is not None and capacity:
                    most[name] = min(capacity, most.get(name, capacity))
        most[CORES] = self.cores
        if self.quota is not None:
            most[of_group(CORES, self.quota[0])] = self.quota[1]
        for one in self.memory:
            name = MEMORY if one.group is None else of_group(MEMORY, one.group)
            reserve = int(RESERVED_PART * one.total_bytes) if reserve_bytes is None else reserve_bytes
            # What workers have taken of their leases already is not available, and is theirs.
            ours = sum(
                min(entry.own_memory_bytes(anonymous_bytes), part.memory_bytes)
                for entry in holders
                for part in entry.parts
                if part.uuid == name
            )
            most[name] = max(0, one.available_bytes - reserve + ours)
        for name, freed_bytes in _not_taken(holders):
            most[name] += freed_bytes
        return tuple(Card(name, capacity) for name, capacity in sorted(most.items()))


def measure() -> HostMeasured:
    """Look what there is."""
    cores = 1000 * control_group.all_cores()
    limit = control_group.cpu_limit()
    quota = None
    if limit is not None and int(1000 * limit[0]) < cores:
        quota = (limit[1], int(1000 * limit[0]))
    memory = [Available(*control_group.host_memory())]
    of_groups = control_group.memory_limit()
    if of_groups is not None and of_groups[1] < memory[0].total_bytes:  # without a limit it is a huge number
        memory.append(Available(*of_groups))
    return HostMeasured(cores, quota, tuple(memory))


def total_memory_bytes() -> int:
    """Return how much main memory there is for this process."""
    return min(one.total_bytes for one in measure().memory)


def anonymous_bytes(pid: int) -> int:
    """Return how much memory a process has that is no part of a file; 0 where that is not known."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return max(0, resident - shared) * _PAGE_BYTES


def _not_taken(holders: Sequence[Entry]) -> Iterator[tuple[str, int]]:
    """Return by card what calls that nobody has measured have not taken of the guess for them.

    So calls of one task begin one after the other also where none ends: they may wait for each other.
    """
    for entry in holders:
        for part in entry.parts:
            if kind_of(part.uuid) == UNKNOWN_MEMORY and time.time() > entry.since + SETTLED_S:
                yield part.uuid, max(0, part.memory_bytes - entry.own_memory_bytes(anonymous_bytes))
