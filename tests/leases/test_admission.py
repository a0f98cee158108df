"""Who gets what: the pure function that everybody decides by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from flower_gpu.leases.admission import (
    CORES,
    LEAST_SHARE_BYTES,
    MEMORY,
    SHARED_PART,
    Card,
    Claim,
    GPUNeed,
    HostNeed,
    Part,
    card_of_group,
    plan,
    satisfiable,
)

GIB = 1 << 30
MIB = 1 << 20
A, B, C = "GPU-a", "GPU-b", "GPU-c"
WHOLE_SHARE = int(16 * GIB * SHARED_PART)


def cards(*sizes_gib: float) -> list[Card]:
    return [Card(uuid, int(size * GIB)) for uuid, size in zip((A, B, C), sizes_gib, strict=False)]


def memory(order: int, gib: float, uuids: Iterable[str] = (A, B, C), **fields: object) -> Claim:
    alone = bool(fields.pop("alone", False))
    options = tuple(GPUNeed(uuid, memory_bytes=int(gib * GIB), alone=alone) for uuid in uuids)
    return Claim(f"t{order}", order, options, **fields)  # type: ignore[arg-type]


def share(order: int, part: float | None, uuids: Iterable[str] = (A,), **fields: object) -> Claim:
    alone = bool(fields.pop("alone", False))
    options = tuple(GPUNeed(uuid, share=part, alone=alone) for uuid in uuids)
    return Claim(f"t{order}", order, options, **fields)  # type: ignore[arg-type]


def held(order: int, gib: float, *uuids: str, alone: bool = False) -> Claim:
    parts = tuple(Part(uuid, int(gib * GIB), 16 * GIB, alone) for uuid in uuids or (A,))
    return Claim(f"t{order}", order, parts=parts)


def cores(
    order: int, amount: int, least: int | None = None, *, memory_gib: float = 0, **fields: object
) -> Claim:
    """A claim for thousandths of a core, and for main memory."""
    needs = (HostNeed(CORES, amount, amount if least is None else least),)
    if memory_gib:
        needs += (HostNeed(MEMORY, int(memory_gib * GIB), int(memory_gib * GIB)),)
    return Claim(f"t{order}", order, **{"gpu_needs": (), "count": 0, **fields}, host_needs=needs)  # type: ignore[arg-type]


def computing(order: int, amount: int, memory_gib: float = 0) -> Claim:
    parts = (Part(CORES, amount, 4000), Part(MEMORY, int(memory_gib * GIB), 16 * GIB))
    return Claim(f"t{order}", order, parts=parts)


HOST = [Card(CORES, 4000), Card(MEMORY, 16 * GIB)]


def amounts(granted: dict[str, tuple[Part, ...]]) -> dict[str, list[int]]:
    return {id_: [part.memory_bytes for part in parts] for id_, parts in granted.items()}


def where(granted: dict[str, tuple[Part, ...]]) -> dict[str, list[str]]:
    return {id_: [part.uuid for part in parts] for id_, parts in granted.items()}


def in_turn(all_cards: list[Card], claims: Iterable[Claim], holdings: Iterable[Claim] = ()) -> list[Claim]:
    """Let claims come one after the other; return all holdings."""
    present = list(holdings)
    for claim in claims:
        for parts in plan(all_cards, present, [claim]).values():
            present.append(replace(claim, parts=parts))
    return present


@pytest.mark.parametrize(
    ("sizes", "holdings", "claim", "expected"),
    [
        ((16, 16), [held(1, 4, A)], memory(2, 4), [B]),  # the emptiest
        ((16, 16), [held(1, 4, A)], memory(2, 4, pack=True), [A]),  # the fullest that is enough
        ((16, 16), [held(1, 14, A)], memory(2, 4, pack=True), [B]),
        ((16, 16), [], memory(1, 4, uuids=[B]), [B]),  # named
        ((16, 16), [held(1, 14, B)], memory(2, 4, uuids=[B]), None),
        ((3, 16), [], memory(1, 4), [B]),  # A is full of somebody else's work
        ((3, 16), [], share(1, 0.5, [A, B]), [B]),
        ((0.5, 16), [], share(1, 1.0, [A, B], pack=True), [B]),  # too little is none
        ((16, 16), [], memory(1, 4, uuids=["GPU-elsewhere"]), None),
        ((16, 16), [], memory(1, 4, uuids=["GPU-elsewhere", B]), [B]),
        ((16, 16), [], memory(1, 12, count=2), [A, B]),
        ((16, 16), [held(1, 8, A)], memory(2, 12, count=2), None),  # together or not at all
        ((16, 16, 16), [held(1, 8, B)], memory(2, 12, count=2), [A, C]),
        ((16, 16), [], memory(1, 4, count=3), None),
        ((16,), [], memory(1, 16), [A]),  # to the byte
        ((16,), [held(1, 1)], memory(2, 15), [A]),
        ((16,), [held(1, 1)], memory(2, 15 + 1 / GIB), None),
        ((16, 16), [held(1, 1, A)], memory(2, 4, uuids=[A], alone=True), None),
        ((16, 16), [held(1, 1, A)], memory(2, 4, alone=True), [B]),
        ((16,), [held(1, 1, alone=True)], memory(2, 4), None),
        ((16,), [held(1, 4, "GPU-lost")], memory(2, 16), [A]),  # what is held elsewhere takes nothing here
        ((), [], memory(1, 1), None),
    ],
)
def test_a_claim_gets_the_right_gpu(
    sizes: tuple[float, ...], holdings: list[Claim], claim: Claim, expected: list[str] | None
) -> None:
    found = where(plan(cards(*sizes), holdings, [claim])).get(claim.id)
    assert (sorted(found) if found else found) == expected


@pytest.mark.parametrize("part", [1.0, 0.5, 0.25, 0.125, 1 / 3, 0.2, 0.1])
@pytest.mark.parametrize("others_gib", [0.0, 0.7, 3.3])
def test_as_many_shares_fit_as_there_are(part: float, others_gib: float) -> None:
    """Also beside a desktop session."""
    count = int(1 / part + 1e-9)
    claims = [share(order, part) for order in range(1, count + 2)]
    for holdings in (
        in_turn(cards(16 - others_gib), claims),
        [Claim(id_, 1, parts=parts) for id_, parts in plan(cards(16 - others_gib), [], claims).items()],
    ):
        assert len(holdings) == count
        assert len({holding.parts[0].memory_bytes for holding in holdings}) == 1


@pytest.mark.parametrize("count", [4, 8])
def test_shares_fit_while_other_programs_use_a_little_more_or_less(count: int) -> None:
    sizes = [15, 15.05, 14.93, 15.1, 14.95, 15.02, 14.99, 15.07]
    present: list[Claim] = []
    for order in range(1, count + 1):
        granted = plan(cards(sizes[order - 1]), present, [share(order, 1 / count)])
        present.append(Claim(f"t{order}", order, parts=granted[f"t{order}"]))
    assert len({holding.parts[0].memory_bytes for holding in present}) == 1


def test_a_share_is_of_all_that_is_left_also_of_what_workers_have_not_told_yet() -> None:
    assert plan(cards(16), [], [share(1, None)])["t1"][0].memory_bytes == WHOLE_SHARE
    card = Card(A, 12 * GIB, unreported_bytes=4 * GIB)
    [part] = plan([card], [], [share(1, 0.25)])["t1"]
    assert part.memory_bytes == int(WHOLE_SHARE * 0.25)


def test_shares_are_not_cut_below_what_cuda_needs() -> None:
    least = LEAST_SHARE_BYTES / GIB / SHARED_PART * 1.001
    assert plan(cards(4 * least), [], [share(1, 0.25)])
    assert not plan(cards(4 * least * 0.99), [], [share(1, 0.25)])


ONE, TWO = cards(16), cards(16, 16)
HALF = [held(1, 8, A)]
BOTH = memory(2, 12, count=2)
EIGHTH = Claim("t1", 1, parts=(Part(A, WHOLE_SHARE // 8, WHOLE_SHARE),))


@pytest.mark.parametrize(
    ("all_cards", "holdings", "claims", "expected"),
    [
        # First come, first served.
        (ONE, [], [memory(order, 6, [A]) for order in (5, 3, 4, 1, 2)], {"t1": [A], "t2": [A]}),
        # Small claims do not pass a large one that waits, and use what it cannot.
        (ONE, HALF, [memory(2, 12, [A]), memory(3, 8, [A])], {}),
        (ONE, HALF, [memory(2, 12, [A]), memory(3, 4, [A]), memory(4, 1, [A])], {"t3": [A]}),
        # Large claims that wait reserve different GPUs.
        (TWO, [*HALF, held(2, 9, B)], [memory(3, 12), memory(4, 12), memory(5, 6)], {}),
        # A claim for several GPUs reserves them together.
        (TWO, HALF, [BOTH, memory(3, 8)], {}),
        (TWO, HALF, [BOTH, memory(3, 8), memory(4, 4)], {"t4": [B]}),
        # Who wants to be alone reserves the whole GPU.
        (ONE, [held(1, 1)], [memory(2, 2, [A], alone=True), memory(3, 1, [A])], {}),
        # Nor does it pass one that waits for two GPUs, however little that one needs: it could not be beside.
        (TWO, [held(1, 16, A)], [memory(2, 1, count=2), memory(3, 2, [B], alone=True)], {}),
        # Other programs in the way of a claim do not idle a GPU.
        (cards(10), [], [memory(1, 12, [A]), memory(2, 8, [A])], {"t2": [A]}),
        # Each new small worker looks like another program until it has told its use; none may pass meanwhile.
        ([Card(A, int(15.5 * GIB), GIB)], [held(1, 2)], [memory(2, 16, [A]), memory(3, 2, [A])], {}),
        # Shares that were granted when there was more count the budget of before: the whole is more than now.
        (cards(15.7), [EIGHTH], [share(2, 1.0), share(3, 0.125)], {}),
    ],
)
def test_who_goes_on_and_who_waits(
    all_cards: list[Card], holdings: list[Claim], claims: list[Claim], expected: dict[str, list[str]]
) -> None:
    assert where(plan(all_cards, holdings, claims)) == expected


def test_cores_are_never_leased_twice_and_first_come_is_first_served() -> None:
    claims = [cores(order, 1500) for order in (3, 1, 2)] + [cores(4, 500)]
    assert amounts(plan(HOST, [], claims)) == {"t1": [1500], "t2": [1500], "t4": [500]}
    assert not plan(HOST, [computing(0, 3000)], [cores(1, 2000), cores(2, 1500)])  # it would pass the first
    assert amounts(plan(HOST, [computing(0, 1500)], [cores(1, 3000), cores(2, 1000)])) == {"t2": [1000]}


def test_who_would_take_all_cores_takes_what_is_free_and_goes_on() -> None:
    lone = cores(2, 4000, least=0)
    assert amounts(plan(HOST, [], [lone])) == {"t2": [4000]}
    assert amounts(plan(HOST, [computing(1, 1500)], [lone])) == {"t2": [2500]}
    assert amounts(plan(HOST, [computing(1, 4000)], [lone])) == {"t2": [0]}
    # Nor does it take what an earlier request waits for.
    assert amounts(plan(HOST, [computing(0, 1500)], [cores(1, 3000), lone])) == {"t2": [1000]}


def test_more_than_there_is_means_all_of_it_alone() -> None:
    """Main memory comes and goes: what was learned on an empty host must not wait for ever."""
    now = [Card(MEMORY, 3 * GIB), Card(CORES, 4000)]
    large = cores(2, 100, memory_gib=5)
    assert amounts(plan(now, [], [large])) == {"t2": [100, 3 * GIB]}
    assert not plan(now, [computing(1, 100, 0.5)], [large])
    assert amounts(plan([Card(MEMORY, 0), Card(CORES, 4000)], [], [large])) == {"t2": [100, 1]}


def test_gpus_cores_and_memory_are_granted_together_or_not_at_all() -> None:
    both = replace(memory(2, 4, [A]), host_needs=(HostNeed(CORES, 2000, 2000), HostNeed(MEMORY, GIB, GIB)))
    assert amounts(plan([*cards(16), *HOST], [], [both])) == {"t2": [4 * GIB, 2000, GIB]}
    assert not plan([*cards(16), *HOST], [computing(1, 3000)], [both])
    # What it waits with is reserved: the GPU for which later ones would come, and the cores.
    assert not plan([*cards(16), *HOST], [computing(1, 3000)], [both, memory(3, 13, [A])])
    assert not plan([*cards(16), *HOST], [held(1, 14)], [both, cores(4, 2500)])
    assert where(plan([*cards(16), *HOST], [held(1, 14)], [both, cores(4, 2000)])) == {"t4": [CORES]}


def test_a_control_group_has_limits_of_its_own() -> None:
    group = card_of_group(CORES, 77)

    def inside(order: int) -> Claim:
        return replace(
            cores(order, 1000), host_needs=(HostNeed(CORES, 1000, 1000), HostNeed(group, 1000, 1000, 2000))
        )

    granted = plan([*HOST, Card(group, 2000)], [], [inside(1), inside(2), inside(3), cores(4, 1000)])
    assert sorted(granted) == ["t1", "t2", "t4"]


def test_options_that_can_never_be_granted_are_left_out() -> None:
    sizes = {A: 16 * GIB, B: 2 * GIB}
    options = [
        GPUNeed(A, memory_bytes=16 * GIB),
        GPUNeed(B, memory_bytes=16 * GIB),
        GPUNeed(A, share=0.25),
        GPUNeed(B, share=0.25),
        GPUNeed(B),
        GPUNeed(C, memory_bytes=1),
    ]
    assert satisfiable(sizes, options) == [options[0], options[2], options[4]]


# --- properties ---

UUIDS = (A, B, C)
memories = st.integers(1, 16 * 4).map(lambda quarters: quarters * GIB // 4)
shares = st.sampled_from([1.0, 0.5, 0.25, 0.125, 1 / 3, None])


@st.composite
def needs_of(draw: st.DrawFn) -> tuple[HostNeed, ...]:
    """What is needed beside GPUs: none, or cores, some of them or as many as are free; and memory."""
    found = []
    if draw(st.booleans()):
        amount = draw(st.integers(1, 5000))
        found.append(HostNeed(CORES, amount, draw(st.sampled_from([amount, amount, 0]))))
    if draw(st.booleans()):
        amount = draw(memories)
        found.append(HostNeed(MEMORY, amount, amount))
    return tuple(found)


@st.composite
def claims_of(draw: st.DrawFn, order: int) -> Claim:
    needs = draw(needs_of())
    if needs and draw(st.booleans()):
        return Claim(f"t{order}", order, (), 0, host_needs=needs)
    uuids = draw(st.lists(st.sampled_from(UUIDS), min_size=1, max_size=3, unique=True))
    alone = draw(st.sampled_from([False, False, False, True]))
    if draw(st.booleans()):
        nbytes = draw(memories)
        options = tuple(GPUNeed(uuid, memory_bytes=nbytes, alone=alone) for uuid in uuids)
    else:
        part = draw(shares)
        options = tuple(GPUNeed(uuid, share=part, alone=alone) for uuid in uuids)
    count, pack = draw(st.integers(1, len(uuids))), draw(st.booleans())
    return Claim(f"t{order}", order, options, count, pack, needs)


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[Card], list[Claim], list[Claim]]:
    """Draw any state: also one in which other programs have come since leases were granted."""
    all_cards = [Card(uuid, draw(st.integers(0, 64)) * GIB // 4) for uuid in UUIDS[: draw(st.integers(1, 3))]]
    all_cards += [Card(CORES, 4000), Card(MEMORY, draw(st.integers(0, 64)) * GIB // 4)]
    orders = draw(st.permutations(range(1, 13)))
    holders = draw(st.integers(0, 5))
    holdings = []
    for order in orders[:holders]:
        uuids = draw(st.lists(st.sampled_from(UUIDS), min_size=1, max_size=2, unique=True))
        budget = draw(st.integers(1, 64)) * GIB // 4
        parts = tuple(Part(uuid, draw(memories), budget, draw(st.booleans())) for uuid in uuids)
        parts += tuple(Part(need.resource, need.amount, budget) for need in draw(needs_of()))
        holdings.append(Claim(f"t{order}", order, parts=parts))
    waiting = [draw(claims_of(order)) for order in orders[holders : holders + draw(st.integers(0, 6))]]
    return all_cards, holdings, waiting


def check_grants(
    all_cards: list[Card], holdings: list[Claim], waiting: list[Claim], granted: dict[str, tuple[Part, ...]]
) -> None:
    capacity = {card.uuid: card.capacity_bytes for card in all_cards}
    by_id = {claim.id: claim for claim in waiting}
    for id_, parts in granted.items():
        claim = by_id[id_]
        offered = {option.uuid: option for option in claim.gpu_needs}
        assert len(parts) == len({part.uuid for part in parts}) == claim.count + len(claim.host_needs)
        for need, part in zip(claim.host_needs, parts[claim.count :], strict=True):
            most = min(need.amount, max(1, capacity[need.resource]))
            assert part.uuid == need.resource
            assert min(need.least, most) <= part.memory_bytes <= most
        for part in parts[: claim.count]:
            option = offered[part.uuid]
            assert part.alone == option.alone
            if option.memory_bytes is not None:
                assert part.memory_bytes == option.memory_bytes
            else:
                assert LEAST_SHARE_BYTES <= part.memory_bytes <= capacity[part.uuid] * (option.share or 1.0)
    for uuid, capacity_bytes in capacity.items():
        old = [part for holding in holdings for part in holding.parts if part.uuid == uuid]
        new = [part for parts in granted.values() for part in parts if part.uuid == uuid]
        new = [part for part in new if part.memory_bytes]  # who goes on without cores has none
        if new:
            assert sum(part.memory_bytes for part in (*old, *new)) <= max(1, capacity_bytes)
            if uuid in (CORES, MEMORY):
                continue
            assert len(old) + len(new) == 1 or not any(part.alone for part in (*old, *new))


@given(lines())
@settings(max_examples=examples(60))
def test_grants_are_offered_whole_and_never_more_than_there_is(
    line: tuple[list[Card], list[Claim], list[Claim]],
) -> None:
    check_grants(*line, plan(*line))


@given(lines())
@settings(max_examples=examples(60))
def test_the_first_that_can_be_met_is_met_and_nothing_depends_on_the_order_of_arguments(
    line: tuple[list[Card], list[Claim], list[Claim]],
) -> None:
    all_cards, holdings, waiting = line
    granted = plan(*line)
    assert plan(all_cards, holdings[::-1], waiting[::-1]) == granted
    waiting = sorted(waiting, key=lambda claim: claim.order)
    if waiting:
        alone = plan(all_cards, holdings, waiting[:1])
        assert alone.items() <= granted.items()
        for index, claim in enumerate(waiting):  # what comes after a claim does not change what it gets
            assert plan(all_cards, holdings, waiting[: index + 1]).get(claim.id) == granted.get(claim.id)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Card], list[Claim | int]]:
    """Draw GPUs, and what happens: claims that come (which could be met), and numbers: who goes."""
    all_cards = [
        Card(uuid, draw(st.integers(12, 64)) * GIB // 4) for uuid in UUIDS[: draw(st.integers(1, 3))]
    ]
    all_cards += HOST
    sizes = {card.uuid: card.capacity_bytes for card in all_cards}
    events: list[Claim | int] = []
    for order in range(1, draw(st.integers(2, 30))):
        claim = draw(claims_of(order))
        options = tuple(satisfiable(sizes, claim.gpu_needs))
        if len(options) >= claim.count:
            events.append(replace(claim, gpu_needs=options))
        events += draw(st.lists(st.integers(0, 1000), max_size=2))
    return all_cards, events


class Host:
    """What holds and waits while claims come and holders go."""

    def __init__(self, all_cards: list[Card]) -> None:
        self.cards = all_cards
        self.present: list[Claim] = []
        self.waiting: list[Claim] = []

    def settle(self, now: list[Card] | None = None) -> None:
        granted = plan(now or self.cards, self.present, self.waiting)
        check_grants(now or self.cards, self.present, self.waiting, granted)
        orders = {claim.id: claim.order for claim in self.waiting}
        self.present += [Claim(id_, orders[id_], parts=parts) for id_, parts in granted.items()]
        self.waiting = [claim for claim in self.waiting if claim.id not in granted]

    def check(self) -> None:
        """However many come later: when all who came before are gone, a claim is met at once."""
        assert not plan(self.cards, self.present, self.waiting)  # nothing was left undone
        if self.waiting:
            first = min(claim.order for claim in self.waiting)
            assert any(holding.order < first for holding in self.present)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_waits_for_one_who_came_later(seed: int) -> None:
    """Reservations that move from one GPU to another go wrong in some of a hundred of these, if at all."""
    random = Random(seed)
    for _ in range(60):
        uuids = UUIDS[: random.randint(1, 3)]
        host = Host([*cards(*[16.0] * len(uuids)), *HOST])
        for order in range(1, 40):
            mine = uuids if random.random() < 0.7 else random.sample(uuids, random.randint(1, len(uuids)))
            count = random.randint(1, len(mine)) if random.random() < 0.2 else 1
            alone, pack = random.random() < 0.05, random.random() < 0.3
            gib = random.choice([1, 2, 4, 6, 8, 10, 12, 16])
            options = {"count": count, "alone": alone, "pack": pack}
            claim = memory(order, gib, mine, **options)
            if random.random() < 0.2:
                claim = share(order, random.choice([1.0, 0.5, 0.25, 0.125, 1 / 3, None]), mine, **options)
            if random.random() < 0.3:
                thousandths = random.choice([333, 1000, 2000, 4000, 9000])
                claim = replace(
                    claim, host_needs=(HostNeed(CORES, thousandths, random.choice([0, thousandths])),)
                )
            if random.random() < 0.3:
                claim = replace(claim, host_needs=(*claim.host_needs, HostNeed(MEMORY, gib * GIB, gib * GIB)))
            if claim.host_needs and random.random() < 0.4:
                claim = replace(claim, gpu_needs=(), count=0)
            host.waiting.append(claim)
            host.settle()
            host.check()
            if random.random() < 0.8 and host.present:
                host.present.pop(random.randrange(len(host.present)))
            elif random.random() < 0.1 and host.waiting:
                host.waiting.pop(random.randrange(len(host.waiting)))
            host.settle()
            host.check()


@given(histories(), st.integers(0, 10**6))
@settings(max_examples=examples(30))
def test_other_programs_that_come_and_go_starve_nobody(
    history: tuple[list[Card], list[Claim | int]], seed: int
) -> None:
    """Once they stay as they are, everybody is met although ever more small claims come."""
    all_cards, events = history
    host = Host(all_cards)
    order = 100
    for index, event in enumerate(events):
        if isinstance(event, Claim):
            host.waiting.append(event)
        elif host.present:
            host.present.pop(event % len(host.present))
        left = 4 - (seed >> index) % 4
        host.settle([replace(card, capacity_bytes=card.capacity_bytes * left // 4) for card in all_cards])
    old = {claim.id for claim in host.waiting}
    uuids = [card.uuid for card in all_cards if card not in HOST]
    for _ in range(len(old)):
        if not (left := [claim for claim in host.waiting if claim.id in old]):
            break
        first = min(left, key=lambda claim: claim.order)
        for _ in range(len(host.present) + 1):  # until all are gone that hold something now
            while len(host.waiting) < len(old) + 6:  # more small ones than there is room for
                order += 1
                host.waiting.append(memory(order, 0.5 + seed % 3, uuids))
                order += 1
                host.waiting.append(cores(order, 500 + seed % 1000, memory_gib=0.5 + seed % 3))
            host.settle()
            if first not in host.waiting:
                break
            assert host.present, "somebody waits while nobody holds anything"
            host.present.pop(0)  # who has held longest
        assert first not in host.waiting
