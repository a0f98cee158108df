"""Cores and main memory of the host as cards for leases, and the memory that a call needs.

All processes with the same ledger must measure the same. So one card has all cores of the host, even if this
process may use only some of them. The limit of a control group is a card of its own, with needs of its own.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flower_gpu import control_group
from flower_gpu.leases.admission import (
    CORES,
    MEMORY,
    UNKNOWN_MEMORY,
    Card,
    HostNeed,
    card_of_group,
    card_of_task,
    kind_of,
)
from flower_gpu.leases.entries import Entry
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import BESIDE_GPU, ON_CPU, Key, cautious_bytes, needed_bytes

#: Fraction of all main memory that is never leased.
RESERVED_PART: Final = 0.05

#: Seconds after which the memory used by a call without measurements is taken for its need.
SETTLED_S: Final = 10.0

# A measurement is recorded if it is lower than the known one by this factor.
_MUCH: Final = 1.25


@dataclass(frozen=True)
class HostReading:
    """Cores and main memory of the host, and of this process's control groups with lower limits."""

    cores: Mapping[str, int]  # thousandths of a core, by card
    # Bytes available before the kernel kills or throttles processes, and total bytes, by card
    memory: Mapping[str, tuple[int, int]]

    def needs(self, requested: Iterable[HostNeed]) -> tuple[HostNeed, ...]:
        """Return the requested needs, each repeated for the control groups of this process."""
        capacities = {**self.cores, **{name: total for name, (_, total) in self.memory.items()}}
        needs = []
        for need in requested:
            needs.append(need)
            for name, capacity in capacities.items():
                if kind_of(name) == need.resource != name:
                    needs.append(replace(need, resource=name, capacity=capacity))
        return tuple(needs)

    def cards(
        self, holders: Sequence[Entry], waiting: Sequence[Entry], reserve_bytes: int | None
    ) -> tuple[Card, ...]:
        """Return the cards of cores and main memory, with everything that leases may have.

        ``holders``, ``waiting``: the tickets of all processes.
        ``reserve_bytes``: main memory that is never leased; by default the fraction :data:`RESERVED_PART`.
        """
        capacities: dict[str, int] = {}
        # Limits of other processes' control groups are known from their tickets only.
        for entry in (*holders, *waiting):
            limits = [(part.uuid, part.budget_bytes) for part in entry.parts]
            limits += [(need.resource, need.capacity) for need in entry.host_needs]
            for name, capacity in limits:
                if kind_of(name) is not None and capacity:
                    capacities[name] = min(capacity, capacities.get(name, capacity))
        capacities |= self.cores
        for name, (available, total) in self.memory.items():
            # Memory that workers have allocated from their leases is not available, but belongs to leases.
            ours = sum(
                min(entry.worker_memory_bytes(), part.memory_bytes)
                for entry in holders
                for part in entry.parts
                if part.uuid == name
            )
            capacities[name] = max(0, available - reserve_of(total, reserve_bytes) + ours)
        for name, unused_bytes in _unused_assumptions(holders):
            capacities[name] += unused_bytes
        return tuple(Card(name, capacity) for name, capacity in sorted(capacities.items()))


def reserve_of(total_bytes: int, reserve_bytes: int | None) -> int:
    """Return the main memory that is never leased: ``reserve_bytes``, or a fraction of the total."""
    return int(RESERVED_PART * total_bytes) if reserve_bytes is None else reserve_bytes


def measure() -> HostReading:
    """Measure the cores and main memory of the host and of this process's control groups."""
    cores = {CORES: 1000 * control_group.all_cores()}
    quota = control_group.cores_limit()
    if quota is not None and (allowed := int(1000 * quota.cores)) < cores[CORES]:
        cores[card_of_group(CORES, quota.group)] = allowed
    available, total = control_group.host_memory()
    memory = {MEMORY: (available, total)}
    limit = control_group.memory_limit()
    if limit is not None and limit.total_bytes < total:  # an unlimited group has a huge number
        memory[card_of_group(MEMORY, limit.group)] = limit.available_bytes, limit.total_bytes
    return HostReading(cores, memory)


@dataclass(frozen=True)
class CallMemory:
    """The main memory that a call needs, known from earlier calls of its task.

    The need may change while the call waits.
    """

    footprints: Footprints
    key: Key  # of the task; the model of GPU is ignored
    on_gpu: bool
    reserve_bytes: int | None  # main memory that is never leased
    # True if the call ran out of memory and asks for all memory of leases
    asks_for_all: bool = False

    def needs(self) -> tuple[HostNeed, ...]:
        """Return the present needs, which are empty if the call needs no lease of main memory."""
        if self.asks_for_all:
            # More than leases can have, so the call gets all of it, and no other lease has memory meanwhile.
            _, total = control_group.host_memory()
            # Calls of the task that began before its first measurement hold their memory on another card.
            return HostNeed(MEMORY, total, least=total), self._unmeasured(total)
        known = self.footprints.get(self._key)
        if known is not None:
            needed = needed_bytes(known)
            return (HostNeed(MEMORY, needed, least=needed),)
        # The first call of a task has its GPU alone, unless the user has set the number of concurrent calls.
        if self.on_gpu:
            return ()
        _, total = control_group.available_memory()
        return (self._unmeasured(cautious_bytes(total)),)

    def _unmeasured(self, amount: int) -> HostNeed:
        """Return a need on the card of the task, on which only calls of the same task wait for each other."""
        task = card_of_task(os.getuid(), zlib.crc32(repr(self._key).encode()))
        _, total = control_group.available_memory()
        leasable = total - reserve_of(total, self.reserve_bytes)
        return HostNeed(task, amount, least=amount, capacity=max(1, leasable))

    def learn(self, peak_bytes: int, *, is_done: bool = True) -> None:
        """Record the peak of the call.

        Writing the file takes as long as a short call, so a peak close to the known one is not recorded.

        ``peak_bytes``: 0 if the peak is unknown, because the worker goes on with another call.
        ``is_done``: False if the call ended before its end. Its peak is recorded only if it is higher.
        """
        known = self.footprints.get(self._key)
        is_news = known is None or peak_bytes > known or (is_done and peak_bytes < known / _MUCH)
        if peak_bytes and is_news:
            self.footprints.learn(self._key, peak_bytes)

    @property
    def _key(self) -> Key:
        return self.key.on(BESIDE_GPU if self.on_gpu else ON_CPU)


def _unused_assumptions(holders: Sequence[Entry]) -> Iterator[tuple[str, int]]:
    """Yield the unused part of the assumed memory of each call without measurements, with its card.

    It becomes free after :data:`SETTLED_S`. So all calls of a task start eventually, even if none ends
    because they wait for each other.
    """
    for entry in holders:
        for part in entry.parts:
            if kind_of(part.uuid) == UNKNOWN_MEMORY and time.time() > entry.since + SETTLED_S:
                yield part.uuid, max(0, part.memory_bytes - entry.worker_memory_bytes())
