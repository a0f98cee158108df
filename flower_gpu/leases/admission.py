"""Admission: a pure function that decides which claims get GPUs, cores and main memory.

No daemon decides. Every process of a host runs :func:`plan` for itself, and all must come to the same result.
So the result depends on the arguments only: no clock, no randomness, no I/O.

Cores and main memory are cards like GPUs, with a name instead of a UUID. A claim lists its needs of them
beside its GPUs, and gets all parts at once or waits.

``plan`` walks the queue once, in the order of arrival. A claim that fits takes its parts. A claim that does
not fit reserves the cards that become free for it soonest, so that smaller claims behind it cannot starve it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

#: Fraction of a GPU's free memory that shares divide. The rest absorbs small changes in other programs' use.
SHARED_PART = 0.99

#: Smallest share of a GPU. A CUDA context alone needs nearly this much.
LEAST_SHARE_BYTES = 640 << 20

#: Name of the card that stands for the host's cores. Amounts are in thousandths of a core.
CORES = "cores"
#: Name of the card that stands for the host's main memory. Amounts are in bytes.
MEMORY = "memory"

#: Prefix of the cards that limit calls before their main memory has been measured. Each task of an account
#: has its own card.
UNKNOWN_MEMORY = "unknown-memory"

_TASK_BITS = 32
# Separates one of the names above from a control group. The limit of a control group is a card of its own.
_GROUP_SEPARATOR = ":"
# A new lease joins the budget of the present leases if the two differ by less than this fraction.
_SAME_BUDGET = 0.05


@dataclass(frozen=True)
class Card:
    """A GPU as admission sees it, or :data:`CORES` or :data:`MEMORY` of the host or of a control group."""

    uuid: str
    # Memory for leases: all of it, less the reserve and the use of other programs
    capacity_bytes: int
    # Part of the other programs' use that may belong to leased workers, because they have not reported it yet
    unreported_bytes: int = 0


@dataclass(frozen=True)
class GPUNeed:
    """The request of a claim on one GPU: an amount of memory, or a share of the memory for leases."""

    uuid: str
    memory_bytes: int | None = None
    share: float | None = None  # fraction of the GPU's memory for leases, up to 1
    alone: bool = False  # no other lease may be on the GPU at the same time


@dataclass(frozen=True)
class HostNeed:
    """The request of a claim for cores or main memory, whichever GPUs it gets.

    A request for more than the host has gets everything, and no other claim has a part meanwhile.
    """

    resource: str  # name of the card, see :func:`card_of_group`
    amount: int
    # Smallest acceptable amount. The claim gets all free memory between ``least`` and ``amount``
    least: int
    # Size of the card, for a card that only the claimant can measure: of its control group or task
    capacity: int = 0


@dataclass(frozen=True)
class Part:
    """The grant of a claim on one card."""

    uuid: str
    memory_bytes: int  # granted memory; on the card of cores, thousandths of a core
    budget_bytes: int  # memory divided by shares at the time of the grant
    alone: bool = False  # no other lease may be on the card at the same time

    @property
    def is_gpu(self) -> bool:
        """True if the card is a GPU."""
        return kind_of(self.uuid) is None


@dataclass(frozen=True)
class Claim:
    """A place in the queue. A claim with parts is a lease, a claim without parts waits."""

    id: str  # name of its ticket
    order: int  # place in the queue, smallest first
    gpu_needs: tuple[GPUNeed, ...] = ()  # one entry for each acceptable GPU
    count: int = 1  # number of GPUs needed at the same time; 0 for none
    pack: bool = False  # prefer the fullest GPU with enough room, instead of the emptiest
    host_needs: tuple[HostNeed, ...] = ()  # needed at the same time as the GPUs
    parts: tuple[Part, ...] = ()  # granted parts


def card_of_group(resource: str, group: int) -> str:
    """Return the name of the card that stands for a control group's limit of a resource."""
    return f"{resource}{_GROUP_SEPARATOR}{group}"


def card_of_task(user: int, task: int) -> str:
    """Return the name of the card of :data:`UNKNOWN_MEMORY` for a task of an account.

    ``task``: a number of 32 bits.
    """
    return card_of_group(UNKNOWN_MEMORY, user << _TASK_BITS | task)


def belongs_to_account(group: int, user: int) -> bool:
    """Return True if the number in a name from :func:`card_of_task` belongs to a task of the account."""
    return group >> _TASK_BITS == user


def kind_of(uuid: str) -> str | None:
    """Return CORES, MEMORY or UNKNOWN_MEMORY for a card of that resource, or None for a GPU."""
    kind = uuid.partition(_GROUP_SEPARATOR)[0]
    return kind if kind in (CORES, MEMORY, UNKNOWN_MEMORY) else None


def plan(
    cards: Iterable[Card], leases: Iterable[Claim], waiting: Iterable[Claim]
) -> dict[str, tuple[Part, ...]]:
    """Decide which claims can be granted now.

    First come, first served. A claim that cannot be granted yet reserves the GPUs that become free for it
    soonest, and its cores and memory. Later claims get only what the reservation leaves. As long as
    the use of other programs does not change, a claim waits for earlier claims only. So later, smaller claims
    never starve it.

    ``cards``: the usable GPUs, cores and main memory.
    ``leases``: the claims that hold their parts.
    ``waiting``: the waiting claims, in any order.
    Returns the parts of each granted claim by the claim's id. The other claims go on waiting.
    """
    host = _HostState(cards, leases)
    granted: dict[str, tuple[Part, ...]] = {}
    # The id decides between claims with the same order, which a broken ticket may cause. Otherwise processes
    # could come to different results.
    queue = sorted(waiting, key=lambda claim: (claim.order, claim.id))
    smallest_bytes = min((_smallest_bytes(need) for claim in queue for need in claim.gpu_needs), default=0)
    all_need_gpus = all(claim.count for claim in queue)
    for claim in queue:
        # A shortcut for long queues: no later claim can fit either.
        if all_need_gpus and host.largest_free_bytes() < smallest_bytes:
            break
        parts = host.parts_for(claim)
        if parts is None:
            host.reserve(claim)
        else:
            host.add(claim.order, parts)
            granted[claim.id] = parts
    return granted


class _CardState:
    """One card while ``plan`` goes through the queue."""

    def __init__(self, card: Card) -> None:
        # At least 1 for cores and main memory: a claim of all memory is granted when no other lease holds
        # memory, even if other programs use all of it.
        self.capacity = card.capacity_bytes if kind_of(card.uuid) is None else max(1, card.capacity_bytes)
        # The capacity once all workers have reported their use
        self.reported_capacity = card.capacity_bytes + card.unreported_bytes
        self.held: list[tuple[int, Part]] = []  # sorted by the order of the holders
        self.held_bytes = 0
        self.reservations = 0
        # Free memory for claims behind every reservation on this card
        self._unreserved_bytes = self.capacity

    def add(self, order: int, part: Part) -> None:
        """Record a part that a claim holds."""
        insort(self.held, (order, part), key=itemgetter(0))
        self.held_bytes += part.memory_bytes
        self._unreserved_bytes -= part.memory_bytes

    @property
    def free_bytes(self) -> int:
        """Memory that the next claim can get."""
        free = self.capacity - self.held_bytes
        return min(free, self._unreserved_bytes) if self.reservations else free

    def part_for_gpu(self, need: GPUNeed, order: int) -> Part | None:
        """Return the part for a need on this GPU, or None if the part would be too small to be useful."""
        budget = self._budget(order)
        if need.memory_bytes is not None:
            return Part(need.uuid, need.memory_bytes, budget, need.alone)
        memory_bytes = int(budget * (1.0 if need.share is None else need.share))
        if memory_bytes < LEAST_SHARE_BYTES:
            return None
        return Part(need.uuid, memory_bytes, budget, need.alone)

    def part_for_host(self, need: HostNeed) -> Part | None:
        """Return the part of cores or memory that a need gets now, or None if too little is free."""
        amount = self.limited_amount(need)
        free = max(0, self.free_bytes)
        if free < min(need.least, amount):
            return None
        return Part(need.resource, min(amount, free), self.capacity)

    def limited_amount(self, need: HostNeed) -> int:
        """Return the amount of a need, limited to the whole card. A larger amount could never be granted."""
        return min(need.amount, self.capacity)

    def fits(self, part: Part) -> bool:
        """Return True if a part fits beside the leases and the reservations of earlier claims."""
        if part.alone and (self.held or self.reservations):
            return False
        if any(other.alone for _, other in self.held):
            return False
        return part.memory_bytes <= self.free_bytes

    def reserved_bytes(self, part: Part) -> int:
        """Return the bytes to reserve for a part: the whole GPU if the claim must be alone there."""
        return max(self.capacity, part.memory_bytes) if part.alone else part.memory_bytes

    def blocking_bytes(self, part: Part, order: int) -> tuple[int, int]:
        """Return the bytes leased to earlier claims, and the bytes by which later claims block the part."""
        earlier = sum(other.memory_bytes for at, other in self.held if at < order)
        later = self.held_bytes - earlier
        if any(other.alone for at, other in self.held if at > order):
            later = self.capacity
        return earlier, max(0, later + self.reserved_bytes(part) - self.reported_capacity)

    def reserve(self, part: Part, order: int) -> None:
        """Deny memory to later claims until the part fits."""
        later = sum(other.memory_bytes for at, other in self.held if at > order)
        unreserved_bytes = self.capacity - self.reserved_bytes(part) - later
        if self.reservations:
            unreserved_bytes = min(self._unreserved_bytes, unreserved_bytes)
        self._unreserved_bytes = unreserved_bytes
        self.reservations += 1

    def _budget(self, order: int) -> int:
        """Return the memory that shares divide. All shares held at one time have the same budget.

        Only earlier leases count. Otherwise the need of a claim would change with each later lease, and its
        reservation would be wrong.
        """
        # Includes unreported use, which may belong to our own workers. Without it, shares would be too
        # small.
        budget = int(self.reported_capacity * SHARED_PART)
        for at, part in self.held:
            if at >= order:
                break
            is_near = abs(part.budget_bytes - budget) <= _SAME_BUDGET * budget
            if is_near and part.budget_bytes <= self.reported_capacity:
                return part.budget_bytes
        return budget


class _HostState:
    """All cards of the host while ``plan`` goes through the queue."""

    def __init__(self, cards: Iterable[Card], leases: Iterable[Claim]) -> None:
        self._cards = {card.uuid: _CardState(card) for card in cards}
        for lease in leases:
            self.add(lease.order, lease.parts)

    def largest_free_bytes(self) -> int:
        """Return the largest amount of memory that a claim could still get on one GPU."""
        gpus = (card.free_bytes for uuid, card in self._cards.items() if kind_of(uuid) is None)
        return max(gpus, default=-1)

    def add(self, order: int, parts: Iterable[Part]) -> None:
        """Record the parts that a claim holds."""
        for part in parts:
            if part.uuid in self._cards:
                self._cards[part.uuid].add(order, part)

    def parts_for(self, claim: Claim) -> tuple[Part, ...] | None:
        """Return the parts that the claim can have now, or None."""
        fitting = [(card, part) for card, part in self._gpu_parts(claim) if card.fits(part)]
        if len(fitting) < claim.count:
            return None
        fitting.sort(key=lambda pair: pair[0].capacity - pair[0].held_bytes, reverse=not claim.pack)
        parts = [part for _, part in fitting[: claim.count]]
        for need in claim.host_needs:
            card = self._cards.get(need.resource)
            part = card.part_for_host(need) if card else None
            if part is None:
                return None
            parts.append(part)
        return tuple(parts)

    def reserve(self, claim: Claim) -> None:
        """Reserve cards for a waiting claim: the GPUs that become free for it soonest, cores and memory.

        GPUs blocked by earlier claims only come first. The GPU reserved in the previous plan is always among
        them, so the claim never waits for a later claim.
        """
        candidates = []
        for card, part in self._gpu_parts(claim):
            # A reservation does not help against other programs.
            if part.memory_bytes <= card.reported_capacity:
                earlier, later = card.blocking_bytes(part, claim.order)
                candidates.append(((later > 0, card.reservations, earlier + later), card, part))
        if len(candidates) < claim.count:
            return
        candidates.sort(key=itemgetter(0))
        for _, card, part in candidates[: claim.count]:
            card.reserve(part, claim.order)
        for need in claim.host_needs:
            if need.least and need.resource in self._cards:
                card = self._cards[need.resource]
                amount = min(need.least, card.limited_amount(need))
                card.reserve(Part(need.resource, amount, card.capacity), claim.order)

    def _gpu_parts(self, claim: Claim) -> list[tuple[_CardState, Part]]:
        """Return the GPUs that the claim may use, each with the part for the claim."""
        pairs = []
        for need in claim.gpu_needs:
            card = self._cards.get(need.uuid)
            part = card.part_for_gpu(need, claim.order) if card else None
            if card and part:
                pairs.append((card, part))
        return pairs


def _smallest_bytes(need: GPUNeed) -> int:
    return LEAST_SHARE_BYTES if need.memory_bytes is None else need.memory_bytes


def satisfiable(sizes: Mapping[str, int], needs: Sequence[GPUNeed]) -> list[GPUNeed]:
    """Return the needs of a claim that an otherwise empty host could meet.

    ``sizes``: memory of each GPU in bytes, without the reserve, by UUID.
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
