"""Who held how much of a GPU, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flower_gpu.monitor.report.clock import Clock
from flower_gpu.monitor.report.recorded import RunHistory

# A release is written down just after it: in between the next one may have been granted. And who is killed
# writes nothing down at all.
_LATE_S: Final = 5.0


@dataclass(frozen=True)
class Holding:
    """A lease's part of one GPU, in seconds of the run."""

    client: str
    begin_s: float
    end_s: float
    memory_bytes: int


@dataclass(frozen=True)
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


def holdings_of(history: RunHistory, clock: Clock, uuid: str) -> list[Holding]:
    """Return who held a part of a GPU, in the order in which they got it.

    The ledger gives memory away only when it is free. So where a lease needs what another one has, the other
    one was over by then, whenever that was written down.
    """
    gpu = history.gpus.get(uuid)
    capacity = gpu.capacity_bytes if gpu is not None else None
    every = [
        _held(history, clock, lease.client, lease.granted_at, lease.released_at, lease.memory_bytes[uuid])
        for lease in history.leases
        if lease.granted_at is not None and uuid in lease.memory_bytes
    ]
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


def _held(
    history: RunHistory, clock: Clock, client: str, granted: float, released: float | None, nbytes: int
) -> _Held:
    end = released if released is not None else history.over_at(granted, clock.end)
    return _Held(client, granted, nbytes, max(end, granted), released is not None)


def _make_room(active: list[_Held], new: _Held, capacity: int) -> None:
    over = sum(one.memory_bytes for one in active) + new.memory_bytes - capacity
    late = [one for one in active if not one.is_released or one.end - new.granted_at <= _LATE_S]
    for one in sorted(late, key=lambda one: (not one.is_released, one.end, one.granted_at)):
        if over <= 0:
            return
        one.end = new.granted_at
        over -= one.memory_bytes
        active.remove(one)


def leased_steps(holdings: Sequence[Holding]) -> tuple[list[float], list[int]]:
    """Return when the sum of leases changed, and what it was from then on."""
    changes: dict[float, int] = {}
    for one in holdings:
        changes[one.begin_s] = changes.get(one.begin_s, 0) + one.memory_bytes
        changes[one.end_s] = changes.get(one.end_s, 0) - one.memory_bytes
    seconds, sums, held = [], [], 0
    for at in sorted(changes):
        held += changes[at]
        seconds.append(at)
        sums.append(held)
    return seconds, sums


def occupied_s(holdings: Sequence[Holding]) -> float:
    """Return for how long there was a lease at all."""
    total, free_from = 0.0, 0.0
    for one in sorted(holdings, key=lambda one: one.begin_s):
        begin = max(one.begin_s, free_from)
        total += max(0.0, one.end_s - begin)
        free_from = max(free_from, one.end_s)
    return total


def bands(holdings: Sequence[Holding], place: Callable[[str], int], most: int) -> list[Band]:
    """Put leases one on top of the other, as they were held.

    Parameters
    ----------
    holdings : sequence of Holding
        On one GPU.
    place : callable
        Says where in the stack a client's leases are: the lowest number at the bottom.
    most : int
        How many moments are looked at, at most. With more changes what is shorter than one is left out.

    Returns
    -------
    list of Band
        Pieces of rectangles, without overlaps.
    """
    at_s, _ = leased_steps(holdings)
    if len(at_s) > most:
        first, span = at_s[0], at_s[-1] - at_s[0]
        at_s = [first + span * number / most for number in range(most)] + [at_s[-1]]
    todo = sorted(holdings, key=lambda one: one.begin_s, reverse=True)
    active: list[tuple[int, float, int, Holding]] = []  # in the order of the stack
    open_bands: dict[int, Band] = {}
    done: list[Band] = []
    for begin, end in itertools.pairwise(at_s):
        active = [entry for entry in active if entry[3].end_s > begin]
        while todo and todo[-1].begin_s <= begin:
            one = todo.pop()
            if one.end_s > begin:
                active.append((place(one.client), one.begin_s, id(one), one))
        active.sort(key=lambda entry: entry[:3])
        bottom, still = 0, {}
        for _, _, key, one in active:
            top = bottom + one.memory_bytes
            last = open_bands.pop(key, None)
            if last is not None and last.bottom_bytes == bottom:
                still[key] = Band(one.client, last.begin_s, end, bottom, top)
            else:
                if last is not None:
                    done.append(last)
                still[key] = Band(one.client, begin, end, bottom, top)
            bottom = top
        done += open_bands.values()
        open_bands = still
    return [*done, *open_bands.values()]
