"""Cores and main memory of this host as cards for leases, and a call's need of memory.

Every process that shares the ledger must count alike. So the cores are those of the host, whatever this
process may use of them; what its control groups allow is a card of its own, and a need of its own.
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
    kind_of,
    of_group,
    of_task,
)
from flower_gpu.leases.entries import Entry
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import BESIDE_GPU, ON_CPU, Key, cautious_bytes, needed_bytes

#: Of all main memory, the part that is never leased.
RESERVED_PART: Final = 0.05

#: After so long, what a call that nobody has measured takes is what it needs.
SETTLED_S: Final = 10.0

_MUCH: Final = 1.25  # a call that took so many times less than is known is a reason to write that down


@dataclass(frozen=True)
class HostMeasured:
    """What there is at one moment, by cards: of the host, and of this process's control groups with less."""

    cores: Mapping[str, int]  # in thousandths
    # Main memory: the bytes that can be used before the kernel kills, or slows down, and all
    memory: Mapping[str, tuple[int, int]]

    def needs(self, asked: Iterable[HostNeed]) -> tuple[HostNeed, ...]:
        """Return what is asked of the host, and the same of this process's control groups."""
        there = {**self.cores, **{name: total for name, (_, total) in self.memory.items()}}
        found = []
        for need in asked:
            found.append(need)
            for name, capacity in there.items():
                if kind_of(name) == need.resource != name:
                    found.append(replace(need, resource=name, capacity=capacity))
        return tuple(found)

    def cards(
        self, holders: Sequence[Entry], waiting: Sequence[Entry], reserve_bytes: int | None
    ) -> tuple[Card, ...]:
        """Return the cards with all that leases may have.

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
        most |= self.cores
        for name, (available, total) in self.memory.items():
            # What workers have taken of their leases already is not available, and is theirs.
            ours = sum(
                min(entry.own_memory_bytes(), part.memory_bytes)
                for entry in holders
                for part in entry.parts
                if part.uuid == name
            )
            most[name] = max(0, available - reserve_of(total, reserve_bytes) + ours)
        for name, freed_bytes in _not_taken(holders):
            most[name] += freed_bytes
        return tuple(Card(name, capacity) for name, capacity in sorted(most.items()))


def reserve_of(total_bytes: int, reserve_bytes: int | None) -> int:
    """Return the main memory that is never leased: the given size, else a part of it."""
    return int(RESERVED_PART * total_bytes) if reserve_bytes is None else reserve_bytes


def measure() -> HostMeasured:
    """Measure the host."""
    cores = {CORES: 1000 * control_group.all_cores()}
    quota = control_group.cores_limit()
    if quota is not None and (allowed := int(1000 * quota.cores)) < cores[CORES]:
        cores[of_group(CORES, quota.group)] = allowed
    available, total = control_group.host_memory()
    memory = {MEMORY: (available, total)}
    limit = control_group.memory_limit()
    if limit is not None and limit.total_bytes < total:  # without a limit it is a huge number
        memory[of_group(MEMORY, limit.group)] = limit.available_bytes, limit.total_bytes
    return HostMeasured(cores, memory)


@dataclass(frozen=True)
class CallMemory:
    """A call's need of main memory, by the measurements of its task. It may change while the call waits."""

    footprints: Footprints
    key: Key  # of its task; the model of GPU does not matter
    on_gpu: bool
    reserve_bytes: int | None  # of main memory, never leased
    # Whether it asks for all that leases can have, since it ran out of memory
    asks_for_all: bool = False

    def need(self) -> HostNeed | None:
        """Return what it asks for; None: nothing."""
        if self.asks_for_all:  # more than there is: then it is alone with all of that
            _, total = control_group.host_memory()
            return HostNeed(MEMORY, total, least=total)
        known = self.footprints.get(self._key)
        if known is not None:
            needed = needed_bytes(known)
            return HostNeed(MEMORY, needed, least=needed)
        # The first call of a task on a GPU is alone there, or its user has said how many run at a time.
        if self.on_gpu:
            return None
        # Only calls of this task wait for each other, however much memory others have.
        task = of_task(os.getuid(), zlib.crc32(repr(self._key).encode()))
        _, total = control_group.available_memory()
        guess = cautious_bytes(total)
        most = total - reserve_of(total, self.reserve_bytes)
        return HostNeed(task, guess, least=guess, capacity=max(1, most))

    def learn(self, taken_bytes: int, *, is_done: bool = True) -> None:
        """Keep the call's peak; 0: not known, as its worker stays.

        A value close to the known one is not kept: each writing takes as long as a short call. The peak of a
        call that is not done (``is_done``) is the least that it needs, so it is kept only if it is higher.
        """
        known = self.footprints.get(self._key)
        is_news = known is None or taken_bytes > known or (is_done and taken_bytes < known / _MUCH)
        if taken_bytes and is_news:
            self.footprints.learn(self._key, taken_bytes)

    @property
    def _key(self) -> Key:
        return self.key.on(BESIDE_GPU if self.on_gpu else ON_CPU)


def _not_taken(holders: Sequence[Entry]) -> Iterator[tuple[str, int]]:
    """Return by card the unused rest of the assumed memory of calls without measurements.

    So calls of one task begin one after the other also where none ends: they may wait for each other.
    """
    for entry in holders:
        for part in entry.parts:
            if kind_of(part.uuid) == UNKNOWN_MEMORY and time.time() > entry.since + SETTLED_S:
                yield part.uuid, max(0, part.memory_bytes - entry.own_memory_bytes())
