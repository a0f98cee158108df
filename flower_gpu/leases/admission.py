"""Decides the grants of GPUs, cores and main memory: one pure function over all claims and cards.

Every process of a host runs it for itself and must come to the same result: it depends on its arguments only.

Cores and main memory are cards like GPUs, with a name in the place of a uuid. A claim names what it needs of
them beside its GPUs, and gets all of it together or nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

#: Of what is free on a GPU, the part that shares divide: other programs' use goes up and down a little.
SHARED_PART = 0.99

#: A share smaller than this could hardly hold a CUDA context; the GPU counts as full.
LEAST_SHARE_BYTES = 640 << 20

#: The cores of the host, as a card; amounts are in thousandths of a core.
CORES = "cores"
#: The main memory of the host, as a card; amounts are in bytes.
MEMORY = "memory"

#: What calls of one task are taken to need of main memory before it is measured; a card for each task of an
#: account.
UNKNOWN_MEMORY = "unknown-memory"

_TASK_BITS = 32
_OF_GROUP = ":"  # between one of these names and a control group, whose limit is a card of its own
_SAME_BUDGET = 0.05  # a new lease that comes this near to the budget of present leases shares that budget


@dataclass(frozen=True)
class Card:
    """A GPU as admission sees it; or :data:`CORES`, or :data:`MEMORY`, of the host or of a control group."""

    uuid: str
    # What leases may take of it: its memory, without the reserve and what other programs use
    capacity_bytes: int
    # Part of other programs' use that may belong to workers with a lease: they have not reported it yet
    untold_bytes: int = 0


@dataclass(frozen=True)
class GPUNeed:
    """What a claim asks for on one GPU."""

    uuid: str
    memory_bytes: int | None = None  # so much memory, or ...
    share: float | None = None  # ... this part of what the GPU has left for leases
    alone: bool = False  # nobody else may have a lease on the GPU at the same time


@dataclass(frozen=True)
class HostNeed:
    """What a claim needs of cores or main memory, whichever GPUs it gets.

    If it asks for more than there is, it gets all that there is, and is alone with that.
    """

    resource: str  # a card's name, see :func:`of_group`
    amount: int
    # With so much of it, the claim goes on, and gets what is free. The same as ``amount``: all or nothing
    least: int
    # What there is in all, where only the asker can tell: in its control group, or for its task
    capacity: int = 0


@dataclass(frozen=True)
class Part:
    """A granted share of one GPU, or of cores or main memory."""

    uuid: str
    memory_bytes: int  # memory granted; of cores: thousandths of a core
    budget_bytes: int  # what shares of this GPU were parts of, when it was granted
    alone: bool = False  # whether nobody else gets a lease there meanwhile

    @property
    def is_gpu(self) -> bool:
        """Whether it is of a GPU."""
        return kind_of(self.uuid) is None


@dataclass(frozen=True)
class Claim:
    """A place in the line: with parts it is a lease, without them it waits."""

    id: str  # its ticket
    order: int  # its place in the line; smaller ones came first
    gpu_needs: tuple[GPUNeed, ...] = ()  # one for each GPU it may be on
    count: int = 1  # how many of these GPUs it needs, all at once; 0: none
    pack: bool = False  # prefer the GPU with the least room that is enough, and not the one with the most
    host_needs: tuple[HostNeed, ...] = ()  # what it needs besides, at the same time
    parts: tuple[Part, ...] = ()  # what it holds


def of_group(resource: str, group: int) -> str:
    """Return the name of the card that stands for the limit of a control group or a task."""
    return f"{resource}{_OF_GROUP}{group}"


def of_task(user: int, task: int) -> str:
    """Return the name of :data:`UNKNOWN_MEMORY` of a task, a number of 32 bits, of an account."""
    return of_group(UNKNOWN_MEMORY, user << _TASK_BITS | task)


def is_of_account(group: int, user: int) -> bool:
    """Tell whether a number in a name of :func:`of_task` is of an account's tasks."""
    return group >> _TASK_BITS == user


def kind_of(uuid: str) -> str | None:
    """Return the kind of a card that is not a GPU, also of a control group or a task; None for a GPU."""
    kind = uuid.partition(_OF_GROUP)[0]
    return kind if kind in (CORES, MEMORY, UNKNOWN_MEMORY) else None


def plan(
    cards: Iterable[Card], leases: Iterable[Claim], waiting: Iterable[Claim]
) -> dict[str, tuple[Part, ...]]:
    """Decide which claims can be granted now.

    First come, first served. A claim that cannot be granted yet reserves the GPUs that become free for it
    soonest, and what it needs of cores and memory: later claims get there only what it cannot use. While the
    use of other programs does not change, a claim waits for earlier claims only. So later, smaller claims
    never starve it, however many they are.

    ``cards``: the usable GPUs, cores and main memory.
    ``leases``: the claims that hold their parts.
    ``waiting``: the others, in any order.
    Returns the parts of each claim that is granted, all at once. The other claims wait.
    """
    room = _Room(cards, leases)
    granted: dict[str, tuple[Part, ...]] = {}
    # All processes must use the same order, also if a broken ticket repeats an order.
    line = sorted(waiting, key=lambda claim: (claim.order, claim.id))
    least_bytes = min((_least_bytes(need) for claim in line for need in claim.gpu_needs), default=0)
    all_want_gpus = all(claim.count for claim in line)
    for claim in line:
        # Saves time with a long line: nothing after this fits.
        if all_want_gpus and room.most_bytes() < least_bytes:
            break
        parts = room.grant(claim)
        if parts is None:
            room.reserve(claim)
        else:
            room.take(claim.order, parts)
            granted[claim.id] = parts
    return granted


class _Spot:
    """One GPU while ``plan`` goes through the claims."""

    def __init__(self, card: Card) -> None:
        # Something, so that whoever is alone with memory that others have all of can have it, and go on
        self.capacity = card.capacity_bytes if kind_of(card.uuid) is None else max(1, card.capacity_bytes)
        self.most = card.capacity_bytes + card.untold_bytes  # once all workers have told what they use
        self.held: list[tuple[int, Part]] = []  # by the order of their holders
        self.held_bytes = 0
        self.reservations = 0
        # Memory for claims that are later than every reservation here
        self._open_bytes = self.capacity

    def take(self, order: int, part: Part) -> None:
        insort(self.held, (order, part), key=itemgetter(0))
        self.held_bytes += part.memory_bytes
        self._open_bytes -= part.memory_bytes

    @property
    def free_bytes(self) -> int:
        """Memory that the next claim can get."""
        left = self.capacity - self.held_bytes
        return min(left, self._open_bytes) if self.reservations else left

    def part(self, need: GPUNeed, order: int) -> Part | None:
        """Return the share that a need comes to on this GPU; None if it is too small to be of use."""
        budget = self._budget(order)
        if need.memory_bytes is not None:
            return Part(need.uuid, need.memory_bytes, budget, need.alone)
        memory_bytes = int(budget * (1.0 if need.share is None else need.share))
        if memory_bytes < LEAST_SHARE_BYTES:
            return None
        return Part(need.uuid, memory_bytes, budget, need.alone)

    def part_for(self, need: HostNeed) -> Part | None:
        """Return the part that a need gets now; None if that is too little."""
        amount = self.most_for(need)
        free = max(0, self.free_bytes)
        if free < min(need.least, amount):
            return None
        return Part(need.resource, min(amount, free), self.capacity)

    def most_for(self, need: HostNeed) -> int:
        """Return a need limited to all of the card, so that it can be met some day."""
        return min(need.amount, self.capacity)

    def fits(self, part: Part) -> bool:
        """Tell whether a part fits beside the leases and the reservations of earlier claims."""
        if part.alone and (self.held or self.reservations):
            return False
        if any(other.alone for _, other in self.held):
            return False
        return part.memory_bytes <= self.free_bytes

    def needs(self, part: Part) -> int:
        """Return how much to reserve for a part: the whole GPU if its claim must be alone there."""
        return max(self.capacity, part.memory_bytes) if part.alone else part.memory_bytes

    def in_the_way(self, part: Part, order: int) -> tuple[int, int]:
        """Return the bytes leased by earlier claims, and by later claims beyond their share."""
        before = sum(other.memory_bytes for at, other in self.held if at < order)
        after = self.held_bytes - before
        if any(other.alone for at, other in self.held if at > order):
            after = self.capacity
        return before, max(0, after + self.needs(part) - self.most)

    def reserve(self, part: Part, order: int) -> None:
        after = sum(other.memory_bytes for at, other in self.held if at > order)
        open_bytes = self.capacity - self.needs(part) - after
        self._open_bytes = min(self._open_bytes, open_bytes) if self.reservations else open_bytes
        self.reservations += 1

    def _budget(self, order: int) -> int:
        """Return the bytes that shares are parts of: the same for all shares held at one time.

        Only earlier leases count. If later ones did, what a claim needs would change with them, and its
        reservation would be wrong.
        """
        # What may be our workers' use is not another program's: a share would stay too small by that.
        budget = int(self.most * SHARED_PART)
        for at, part in self.held:
            if at >= order:
                break
            near = abs(part.budget_bytes - budget) <= _SAME_BUDGET * budget
            if near and part.budget_bytes <= self.most:
                return part.budget_bytes
        return budget


class _Room:
    """What is left of all GPUs while ``plan`` goes through the claims."""

    def __init__(self, cards: Iterable[Card], leases: Iterable[Claim]) -> None:
        self._spots = {card.uuid: _Spot(card) for card in cards}
        for lease in leases:
            self.take(lease.order, lease.parts)

    def most_bytes(self) -> int:
        """Return the most that a claim could still get of one GPU."""
        gpus = (spot.free_bytes for uuid, spot in self._spots.items() if kind_of(uuid) is None)
        return max(gpus, default=-1)

    def take(self, order: int, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.uuid in self._spots:
                self._spots[part.uuid].take(order, part)

    def grant(self, claim: Claim) -> tuple[Part, ...] | None:
        """Return the parts that the claim can have now, or None."""
        fitting = [(spot, part) for spot, part in self._parts(claim) if spot.fits(part)]
        if len(fitting) < claim.count:
            return None
        fitting.sort(key=lambda found: found[0].capacity - found[0].held_bytes, reverse=not claim.pack)
        parts = [part for _, part in fitting[: claim.count]]
        for need in claim.host_needs:
            spot = self._spots.get(need.resource)
            part = spot.part_for(need) if spot else None
            if part is None:
                return None
            parts.append(part)
        return tuple(parts)

    def reserve(self, claim: Claim) -> None:
        """Reserve for a claim that has to wait the GPUs that become free for it soonest, and its needs.

        GPUs where only earlier claims are in its way come first. The GPU that it reserved in the last plan is
        always one of them, so the claim never waits for a later one.
        """
        found = []
        for spot, part in self._parts(claim):
            # Where other programs are in the way, a reservation would not help.
            if part.memory_bytes <= spot.most:
                before, after = spot.in_the_way(part, claim.order)
                found.append(((after > 0, spot.reservations, before + after), spot, part))
        if len(found) < claim.count:
            return
        found.sort(key=itemgetter(0))
        for _, spot, part in found[: claim.count]:
            spot.reserve(part, claim.order)
        for need in claim.host_needs:
            if need.least and need.resource in self._spots:
                spot = self._spots[need.resource]
                amount = min(need.least, spot.most_for(need))
                spot.reserve(Part(need.resource, amount, spot.capacity), claim.order)

    def _parts(self, claim: Claim) -> list[tuple[_Spot, Part]]:
        found = []
        for need in claim.gpu_needs:
            spot = self._spots.get(need.uuid)
            part = spot.part(need, claim.order) if spot else None
            if spot and part:
                found.append((spot, part))
        return found


def _least_bytes(need: GPUNeed) -> int:
    return LEAST_SHARE_BYTES if need.memory_bytes is None else need.memory_bytes


def possible(sizes: Mapping[str, int], needs: Sequence[GPUNeed]) -> list[GPUNeed]:
    """Return the needs of one claim that could be met on an otherwise empty host.

    ``sizes``: memory of each GPU without the reserve, in bytes.
    """
    return [
        need
        for need in needs
        if need.uuid in sizes
        and (
            need.memory_bytes <= sizes[need.uuid]
            if need.memory_bytes is not None
            else sizes[need.uuid] * SHARED_PART * (need.share or 1.0) >= LEAST_SHARE_BYTES
        )
    ]
