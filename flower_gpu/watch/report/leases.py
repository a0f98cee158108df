"""Which client held how much of a GPU, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flower_gpu.watch.history import History
from flower_gpu.watch.report.clock import Clock

# A release is written down just after it: in between another call may have got a lease. A killed process
# writes nothing down at all.
_LATE_S: Final = 5.0


@dataclass(frozen=True)
class Holding:
    """A lease's part of one GPU, in seconds of the run."""

    client: str
    begin_s: float
    end_s: float
    memory_bytes: int


@dataclass
class Band:
    """A piece of a picture of leases, one on top of the other: from when to when, and from where to where."""

    client: str
    begin_s: float
    end_s: float
    bottom_bytes: int
    top_bytes: int


@dataclass
class _Held:
    client: str
    granted_at: float
    memory_bytes: int
    end: float
    is_released: bool


def holdings_of(history: History, clock: Clock, uuid: str) -> list[Holding]:
    """Return who held a part of a GPU, in the order in which they got it.

    The ledger gives memory away only when it is free. So where a lease needs memory of an earlier lease, the
    earlier one was over by then, whenever that was written down.
    """
    gpu = history.gpus.get(uuid)
    capacity = gpu.capacity_bytes if gpu is not None else None
    every = []
    for lease in history.leases:
        if lease.granted_at is not None and uuid in lease.memory_bytes:
            is_released = lease.released_at is not None
            end = lease.released_at if is_released else history.over_at(lease.granted_at, clock.end)
            end = max(end or 0.0, lease.granted_at)
            every.append(_Held(lease.client, lease.granted_at, lease.memory_bytes[uuid], end, is_released))
    every.sort(key=lambda held: held.granted_at)
    active: list[_Held] = []
    for held in every:
        active = [one for one in active if one.end > held.granted_at]
        if capacity is not None and held.memory_bytes <= capacity:
            _make_room(active, held, capacity)
        active.append(held)
    return [
        Holding(held.client, clock.seconds(held.granted_at), clock.seconds(held.end), held.memory_bytes)
        for held in every
    ]


def _make_room(active: list[_Held], new: _Held, capacity: int) -> None:
    over = sum(one.memory_bytes for one in active) + new.memory_bytes - capacity
    late = [one for one in active if not one.is_released or one.end - new.granted_at <= _LATE_S]
    for one in sorted(late, key=lambda one: (not one.is_released, one.end, one.granted_at)):
        if over <= 0:
            return
        one.end = new.granted_at
        over -= one.memory_bytes
        active.remove(one)


def steps(spans: Iterable[tuple[float, float, int]]) -> tuple[list[float], list[int]]:
    """Return when the sum over spans (begin, end, amount) changes, and what the sum is from then on."""
    changes: dict[float, int] = {}
    for begin, end, amount in spans:
        changes[begin] = changes.get(begin, 0) + amount
        changes[end] = changes.get(end, 0) - amount
    seconds = sorted(changes)
    return seconds, list(itertools.accumulate(changes[at] for at in seconds))


def leased_steps(holdings: Sequence[Holding]) -> tuple[list[float], list[int]]:
    """Return when the sum of leases changed, and what it was from then on."""
    return steps((one.begin_s, one.end_s, one.memory_bytes) for one in holdings)


def occupied_s(holdings: Sequence[Holding]) -> float:
    """Return for how long there was a lease at all."""
    seconds, counts = steps((one.begin_s, one.end_s, 1) for one in holdings)
    return sum(
        (end - at for (at, end), count in zip(itertools.pairwise(seconds), counts, strict=False) if count),
        0.0,
    )


def bands(holdings: Sequence[Holding], place: Callable[[str], int], most: int) -> list[Band]:
    """Put leases one on top of the other, as they were held, in pieces of rectangles without overlaps.

    ``place`` says where in the stack a client's leases are: the lowest number at the bottom. At most so many
    moments are looked at: with more changes, what is shorter than the time between two moments is left out.
    """
    at_s, _ = leased_steps(holdings)
    if len(at_s) > most:
        first, span = at_s[0], at_s[-1] - at_s[0]
        at_s = [first + span * number / most for number in range(most)] + [at_s[-1]]
    todo = sorted(holdings, key=lambda one: one.begin_s, reverse=True)
    stack: list[tuple[int, float, int, Holding]] = []  # in its order
    last: dict[int, Band] = {}  # by the place in the list of holdings
    found: list[Band] = []
    for begin, end in itertools.pairwise(at_s):
        while todo and todo[-1].begin_s <= begin:
            one = todo.pop()
            stack.append((place(one.client), one.begin_s, len(todo), one))
        stack = sorted(entry for entry in stack if entry[3].end_s > begin)
        bottom = 0
        for _, _, key, one in stack:
            band = last.get(key)
            if band is None or band.bottom_bytes != bottom:
                band = last[key] = Band(one.client, begin, end, bottom, bottom + one.memory_bytes)
                found.append(band)
            band.end_s, bottom = end, band.top_bytes
    return found
