"""Who gets which share of which GPU: one pure function over everything that is known.

All processes of a host decide by it, each for itself, so it depends on nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Of what is free on a GPU, the part that shares divide: other programs' use goes up and down a little.
SHARED_PART = 0.99

#: A share smaller than this could hardly hold a CUDA context; the GPU counts as full.
LEAST_SHARE_BYTES = 640 << 20

_SAME_BUDGET = 0.05  # so near to the budget of present leases a new one divides theirs


@dataclass(frozen=True)
class Card:
    """A GPU as admission sees it.

    Parameters
    ----------
    uuid : str
        The GPU.
    capacity_bytes : int
        What leases may take of it: its memory, without the reserve and what other programs use.
    """

    uuid: str
    capacity_bytes: int


@dataclass(frozen=True)
class Option:
    """What a claim wants if it is to be on one certain GPU.

    Parameters
    ----------
    uuid : str
        The GPU.
    memory_bytes : int, optional
        So much memory, or ...
    share : float, optional
        ... this part of what the GPU has left for leases.
    alone : bool
        Nobody else may have a lease on the GPU at the same time.
    """

    uuid: str
    memory_bytes: int | None = None
    share: float | None = None
    alone: bool = False


@dataclass(frozen=True)
class Claim:
    """A request that waits.

    Parameters
    ----------
    id : str
        Its ticket.
    order : int
        Its place in the line; smaller ones came first.
    options : tuple of Option
        One for each GPU it may be on.
    count : int
        How many of these GPUs it needs, all at once.
    pack : bool
        Prefer the GPU with the least room that is enough, and not the one with the most.
    """

    id: str
    order: int
    options: tuple[Option, ...]
    count: int = 1
    pack: bool = False


@dataclass(frozen=True)
class Part:
    """A granted share of one GPU.

    Parameters
    ----------
    uuid : str
        The GPU.
    memory_bytes : int
        Memory granted.
    budget_bytes : int
        What shares of this GPU were parts of, when it was granted.
    alone : bool
        Whether nobody else gets a lease there meanwhile.
    """

    uuid: str
    memory_bytes: int
    budget_bytes: int
    alone: bool = False


@dataclass(frozen=True)
class Holding:
    """A lease that somebody holds: its place in the line that it came from, and its parts."""

    id: str
    order: int
    parts: tuple[Part, ...]


def plan(
    cards: Iterable[Card], holdings: Iterable[Holding], claims: Iterable[Claim]
) -> dict[str, tuple[Part, ...]]:
    """Decide which claims can be granted now.

    First come, first served. A claim that cannot be granted yet reserves the GPUs that it will have soonest:
    those after it get there only what it cannot use. Which ones it reserves depends on nothing but the leases
    of those who came before it, and these become ever fewer; so it is not starved by smaller claims, however
    many come after it.

    Parameters
    ----------
    cards : iterable of Card
        The usable GPUs.
    holdings : iterable of Holding
        The leases that are held.
    claims : iterable of Claim
        The requests that wait, in any order.

    Returns
    -------
    dict
        By claim the parts that it can have, all of them at once; the others have to wait.
    """
    room = _Room(cards, holdings)
    granted: dict[str, tuple[Part, ...]] = {}
    for claim in sorted(claims, key=lambda claim: claim.order):
        parts = room.grant(claim)
        if parts is None:
            room.reserve(claim)
        else:
            room.take(Holding(claim.id, claim.order, parts))
            granted[claim.id] = parts
    return granted


@dataclass(frozen=True)
class _Reservation:
    order: int
    memory_bytes: int


class _Room:
    """What is left of each GPU while claims are gone through."""

    def __init__(self, cards: Iterable[Card], holdings: Iterable[Holding]) -> None:
        self._capacity = {card.uuid: card.capacity_bytes for card in cards}
        self._held: dict[str, list[tuple[int, Part]]] = {uuid: [] for uuid in self._capacity}
        self._reserved: dict[str, list[_Reservation]] = {uuid: [] for uuid in self._capacity}
        for holding in holdings:
            self.take(holding)

    def take(self, holding: Holding) -> None:
        for part in holding.parts:
            if part.uuid in self._held:
                self._held[part.uuid].append((holding.order, part))

    def grant(self, claim: Claim) -> tuple[Part, ...] | None:
        """Return what the claim can have now, or None."""
        fitting = []
        for option in claim.options:
            part = self._part(option)
            if part is not None and self._fits(part, claim.order):
                fitting.append(part)
        if len(fitting) < claim.count:
            return None
        left = {part.uuid: self._capacity[part.uuid] - self._sum(part.uuid) for part in fitting}
        fitting.sort(key=lambda part: left[part.uuid], reverse=not claim.pack)
        return tuple(fitting[: claim.count])

    def reserve(self, claim: Claim) -> None:
        """Keep for a claim that has to wait the GPUs that it will have soonest."""
        parts = [part for option in claim.options if (part := self._part(option)) is not None]
        # Where other programs are in its way, keeping our own leases away would not help it.
        parts = [part for part in parts if part.memory_bytes <= self._capacity[part.uuid]]
        if len(parts) < claim.count:
            return
        parts.sort(key=lambda part: (len(self._reserved[part.uuid]), self._elder(part.uuid, claim.order)))
        for part in parts[: claim.count]:
            # Whoever wants to be alone needs all of it, whatever it was counted as.
            needs = self._capacity[part.uuid] if part.alone else part.memory_bytes
            self._reserved[part.uuid].append(_Reservation(claim.order, needs))

    def _part(self, option: Option) -> Part | None:
        """Return what an option comes to on its GPU; None where that is not usable, or is full."""
        capacity = self._capacity.get(option.uuid)
        if capacity is None:
            return None
        budget = self._budget(option.uuid)
        if option.memory_bytes is not None:
            return Part(option.uuid, option.memory_bytes, budget, option.alone)
        memory_bytes = int(budget * (1.0 if option.share is None else option.share))
        if memory_bytes < LEAST_SHARE_BYTES:
            return None
        return Part(option.uuid, memory_bytes, budget, option.alone)

    def _budget(self, uuid: str) -> int:
        """Return what shares of a GPU are parts of: the same for all that hold one at a time."""
        budget = int(self._capacity[uuid] * SHARED_PART)
        for _, part in sorted(self._held[uuid], key=lambda held: held[0]):
            if abs(part.budget_bytes - budget) <= _SAME_BUDGET * budget:
                return part.budget_bytes
        return budget

    def _fits(self, part: Part, order: int) -> bool:
        held = self._held[part.uuid]
        if any(other.alone for _, other in held) or (part.alone and held):
            return False
        capacity = self._capacity[part.uuid]
        if self._sum(part.uuid) + part.memory_bytes > capacity:
            return False
        for reservation in self._reserved[part.uuid]:
            # Those who came after the one that waits may together have only what it leaves.
            younger = sum(other.memory_bytes for at, other in held if at > reservation.order)
            if younger + part.memory_bytes + reservation.memory_bytes > capacity:
                return False
        return True

    def _sum(self, uuid: str) -> int:
        return sum(part.memory_bytes for _, part in self._held[uuid])

    def _elder(self, uuid: str, order: int) -> int:
        return sum(part.memory_bytes for at, part in self._held[uuid] if at < order)


def possible(sizes: Mapping[str, int], options: Sequence[Option]) -> list[Option]:
    """Return the options that some day could be granted, other programs and leases aside.

    Parameters
    ----------
    sizes : mapping
        Memory of each GPU without the reserve, in bytes.
    options : sequence of Option
        Those of one request.
    """
    return [
        option
        for option in options
        if option.uuid in sizes
        and (
            option.memory_bytes <= sizes[option.uuid]
            if option.memory_bytes is not None
            else sizes[option.uuid] * SHARED_PART * (option.share or 1.0) >= LEAST_SHARE_BYTES
        )
    ]
