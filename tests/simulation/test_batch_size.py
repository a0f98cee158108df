"""The size of a batch depends on the duration of earlier batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from grid_handlers import RUN_ID, GridUnderTest, Handling

from flower_gpu.flower import message_call
from flower_gpu.simulation.batch_size import Batches, BatchSize
from flower_gpu.simulation.host import AssignedMessage, MessageOutcome


def sizes_chosen(
    sizes: BatchSize, messages: int, message_s: Callable[[int], float], available: int = 1000
) -> list[int]:
    """Handle messages in batches with this duration per message. Return the sizes of the batches."""
    chosen: list[int] = []
    while messages:
        chosen.append(sizes.choose(min(messages, available)))
        sizes.learn(chosen[-1], chosen[-1] * message_s(chosen[-1]))
        messages -= chosen[-1]
    return chosen


# Seconds per message by batch size: always faster with more messages, fastest at 4, or never faster.
CURVES = {
    64: lambda size: 1 / size + 0.1,
    4: lambda size: {1: 14.7, 4: 12.9, 16: 15.0, 64: 22.4}.get(size, 20.0),
    1: lambda size: 1.0 + size / 100,
}


@pytest.mark.parametrize("fastest", CURVES)
def test_each_size_is_tried_and_the_fastest_is_chosen(fastest: int) -> None:
    sizes = BatchSize(64, workers=2)
    chosen = sizes_chosen(sizes, 6000, CURVES[fastest])
    assert list(dict.fromkeys(chosen))[:4] == [1, 4, 16, 64]
    assert set(chosen[chosen.index(64) + 30 : -1]) == {fastest} == {sizes.fastest}
    # Each worker's first batch of a size is for warming up. Then at least three batches and 16 messages
    # count.
    if fastest < 16:
        assert (chosen.count(16), chosen.count(64)) == (5, 5)
    assert sum(chosen[: chosen.index(64)]) < 200, "the trials are short"


def test_a_slow_start_of_a_run_is_no_advantage_for_larger_sizes() -> None:
    """The first messages take ten times as long, whatever their size."""
    sizes, handled = BatchSize(64, workers=2), 0

    def message_s(size: int) -> float:
        nonlocal handled
        handled += size
        return (10.0 if handled < 60 else 1.0) * (1 + size / 20)

    sizes_chosen(sizes, 2000, message_s)
    assert sizes.fastest == 1


def test_the_first_batches_of_each_size_do_not_count() -> None:
    sizes, seen = BatchSize(64, workers=3), Counter[int]()

    def message_s(size: int) -> float:
        seen[size] += 1
        # A worker prepares itself for each size.
        is_new = size in (1, 4, 16, 64) and seen[size] <= 3
        return 1000.0 if is_new else 1 / size

    sizes_chosen(sizes, 3000, message_s)
    assert sizes.fastest == 64


@pytest.mark.parametrize(
    ("max_messages", "expected"),
    [(1, [1]), (2, [1, 2]), (10, [1, 4, 10]), (32, [1, 4, 16, 32]), (100, [1, 4, 16, 64, 100])],
)
def test_no_batch_is_larger_than_the_handler_takes(max_messages: int, expected: list[int]) -> None:
    sizes = BatchSize(max_messages, workers=1)
    assert sizes.largest == max_messages
    chosen = sizes_chosen(sizes, 3000, lambda size: 1 / size)
    assert list(dict.fromkeys(chosen))[: len(expected)] == expected
    assert max(chosen) == max_messages == sizes.fastest


def test_a_size_is_tried_with_half_as_many_messages_and_not_with_fewer() -> None:
    """A run with few clients never has a batch of the largest size."""
    sizes = BatchSize(64, workers=2)
    chosen = sizes_chosen(sizes, 2000, lambda size: 1 / size, available=50)
    assert max(chosen) == 50 and chosen.count(50) > 20, "50 messages are a trial of 64"
    few = BatchSize(64, workers=2)
    chosen = sizes_chosen(few, 2000, lambda size: 1 / size, available=8)
    assert set(chosen[:-1]) == {1, 4}, "8 messages are too few for a trial of 16"
    assert few.fastest == 4


def test_clients_of_different_sizes_do_not_decide_by_chance() -> None:
    """A message in 16 takes 100 times as long.

    The mean of several messages counts, not the shortest message.
    """
    sizes = BatchSize(4, workers=1)
    long = iter(range(10**6))

    def seconds(size: int) -> float:
        return sum(100.0 if next(long) % 16 == 5 else 1.0 for _ in range(size)) * (0.5 if size > 1 else 1.0)

    for _ in range(200):
        size = sizes.choose(1000)
        sizes.learn(size, seconds(size))
    assert sizes.fastest == 4


def test_larger_sizes_are_not_tried_after_a_hopeless_one() -> None:
    """Larger trials would take more time, and memory that the GPU may not have."""
    sizes = BatchSize(256, workers=1)
    chosen = sizes_chosen(sizes, 2000, lambda size: {1: 34.0, 4: 36.0, 16: 72.0}.get(size, 84.0))
    assert (max(chosen), sizes.fastest) == (16, 1)
    assert 4 in chosen and 16 in chosen and chosen[-1] == 1


def test_a_batch_that_ran_out_of_memory_is_the_end_of_its_size() -> None:
    sizes = BatchSize(64, workers=1)
    sizes_chosen(sizes, 1000, lambda size: 1 / size)
    assert sizes.refuse(50) == 16
    assert (sizes.largest, sizes.fastest) == (16, 16)
    assert max(sizes_chosen(sizes, 500, lambda size: 1 / size)) == 16
    assert [sizes.refuse(16), sizes.refuse(4), sizes.refuse(2)] == [4, 1, 1]
    assert sizes.choose(100) == 1


class HandlesBatches(Handling):
    """Takes several messages at once, and records how many."""

    def __init__(self, max_messages: int) -> None:
        super().__init__()
        self.batches = Batches(1)
        self.batches.learn("train", max_messages, 1, None)
        self.sizes: list[int] = []

    def may_share(self, first: AssignedMessage, other: AssignedMessage) -> bool:
        return True

    def __call__(self, *visits: AssignedMessage) -> list[MessageOutcome]:
        self.sizes.append(len(visits))
        answers = [answer for visit in visits for answer in super(HandlesBatches, self).__call__(visit)]
        # A batch takes as long as a single message.
        self.batches.learn("train", 64, len(visits), 1.0)
        return answers


def test_a_strategy_that_reads_replies_one_by_one_gets_batches_of_all_sizes() -> None:
    """Only a few unread replies are allowed, but at least as many as a batch has."""
    message_call.assume({"_run_id": RUN_ID, "_node_id": 1, "_task_id": 1})
    tested = GridUnderTest(1, handling=HandlesBatches(64))
    try:
        replies = list(tested.grid.stream(tested.messages(1000)))
    finally:
        tested.close()
    assert len(replies) == 1000
    assert max(tested.handling.sizes) > 32
