"""The rules for merging the results of ranks, and for choosing the failed rank to name, without processes."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.errors import (
    InvalidResultError,
    RankError,
    WorkerDiedError,
    WorkerTaskError,
    WorkerTimeoutError,
)
from flower_gpu.ranks import results
from flower_gpu.ranks.results import End
from flower_gpu.workers.call_end import WorkerStoppedError

NUMBERS = st.floats(-1e6, 1e6) | st.integers(-1000, 1000)
METRICS = st.dictionaries(st.sampled_from("abcd"), NUMBERS | st.text(max_size=3) | st.booleans())


@given(st.lists(METRICS, min_size=1, max_size=4), st.integers(0, 10**9))
def test_numeric_metrics_are_averaged_and_other_values_come_from_rank_0(
    metrics_by_rank: list[dict[str, Any]], count: int
) -> None:
    first, *others = [("weights", count, metrics) for metrics in metrics_by_rank]
    weights, num_examples, metrics = results.merged([first, *map(results.part_of, others)])
    assert (weights, num_examples) == ("weights", count)
    assert metrics.keys() == metrics_by_rank[0].keys()
    for name, value in metrics.items():
        values = [of_rank.get(name) for of_rank in metrics_by_rank]
        if all(type(number) in (int, float) for number in values):
            assert value == pytest.approx(sum(values) / len(values), abs=1e-6)  # type: ignore[arg-type]
        else:
            assert value == metrics_by_rank[0][name]


@given(METRICS, st.integers(2, 5))
def test_values_that_are_equal_in_all_ranks_are_unchanged(metrics: dict[str, Any], count: int) -> None:
    """Their type is kept, too. An integer stays an integer if the function has already reduced it."""
    parts = [results.part_of((0.5, 7, metrics)) for _ in range(count - 1)]
    merged = results.merged([(0.5, 7, metrics), *parts])
    assert merged == (0.5, 7, metrics)
    assert [type(value) for value in merged[2].values()] == [type(value) for value in metrics.values()]


def test_other_results_than_flowers_come_from_rank_0() -> None:
    for value in (None, 5, "text", [1, 2], (1, 2, 3), {"a": 1}):
        assert results.merged([value, results.part_of(value)]) is value


def test_numpy_scalars_and_the_loss_are_averaged() -> None:
    first = (np.float32(1.0), np.int64(8), {"accuracy": np.float64(0.5)})
    other = results.part_of((np.float32(2.0), np.int64(8), {"accuracy": np.float64(1.0)}))
    assert results.merged([first, other]) == (1.5, 8, {"accuracy": 0.75})
    loss, _, _ = results.merged([(math.nan, 8, {}), results.part_of((1.0, 8, {}))])
    assert math.isnan(loss)
    with pytest.raises(InvalidResultError, match="rank 0 8, rank 1 9"):
        results.merged([first, results.part_of((1.0, 9, {}))])


def test_values_of_numpy_that_are_not_numbers_come_from_rank_0() -> None:
    metrics = {"text": np.str_("a"), "complex": np.complex64(1j), "day": np.datetime64("2020-01-01")}
    others = results.part_of((0.5, 8, metrics | {"yes": np.True_}))
    assert others.metrics == {None: 0.5}
    assert results.merged([(0.5, 8, metrics), others]) == (0.5, 8, metrics)


LABELS = ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
STACK = 'Thread 0x1 (most recent call first):\n      File "/app/task.py", line 31 in train'


def end(rank: int, error: BaseException | None, at: float, blames_others: bool = False) -> End:
    return End(rank, LABELS[rank], None, error, at, blames_others)


@given(st.permutations([0, 1, 2]), st.sampled_from([ValueError("odd"), WorkerDiedError("rank died", -9)]))
def test_the_rank_that_caused_the_failure_is_named_whatever_the_order(
    order: list[int], error: Exception
) -> None:
    first, second, third = order
    ends = [
        end(first, LOST, 1.0, True),
        end(second, error, 2.0),
        end(third, WorkerStoppedError("ended"), 3.0),
    ]
    combined = results.combined_error(ends)
    assert isinstance(combined, RankError)
    assert combined.rank == second
    assert combined.__cause__ is error
    assert pickle.loads(pickle.dumps(combined)).rank == second


def test_the_first_of_several_failed_ranks_is_named() -> None:
    combined = results.combined_error([end(0, ValueError("later"), 2.0), end(1, KeyError("first"), 1.0)])
    assert str(combined) == "rank 1 of 3: KeyError: 'first'"


def test_the_rank_for_which_the_others_waited_is_named() -> None:
    hung = WorkerStoppedError(
        f"rank 2 of 3: the worker (pid 7) was ended. The last lines it wrote:\n    {STACK}"
    )
    combined = results.combined_error([end(0, LOST, 1.0, True), end(1, LOST, 1.1, True), end(2, hung, 2.0)])
    assert isinstance(combined, RankError)
    assert combined.rank == 2
    assert str(combined).startswith(
        "rank 2 of 3 (at /app/task.py:31 in train) did not answer: rank 0 of 3 waited for it in vain"
    )


def test_rank_0_is_named_if_all_ranks_lost_their_connections() -> None:
    combined = results.combined_error([end(0, LOST, 1.0, True), end(1, LOST, 1.1, True)])
    assert isinstance(combined, RankError)
    assert combined.rank == 0
    assert "Connection closed by peer. No other rank failed before. Ranks must all take" in str(combined)


def test_the_rank_is_named_only_once() -> None:
    error = WorkerTaskError("rank 0 of 3 raised app.Odd: 5")
    assert str(results.combined_error([end(0, error, 1.0)])) == str(error)


@pytest.mark.parametrize(
    "text",
    [
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
        "[PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: WorkNCCL(Seq",
        "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono",
    ],
)
def test_a_rank_that_nccl_ended_did_not_cause_the_failure(text: str) -> None:
    ended = WorkerDiedError("rank 0 of 3: was killed by SIGABRT", -6, text)
    assert end(0, ended, 1.0).is_of_others
    hung = WorkerStoppedError(f"was ended. {STACK}")
    combined = results.combined_error([end(0, ended, 1.0), end(1, hung, 2.0)])
    assert isinstance(combined, RankError)
    assert combined.rank == 1


def test_the_error_for_a_timeout_names_the_line_of_each_rank() -> None:
    late = WorkerTimeoutError(f"no result. The last lines it wrote:\n    {STACK}")
    combined = results.combined_error([end(1, late, 1.0), end(0, WorkerStoppedError("was ended."), 2.0)])
    assert isinstance(combined, WorkerTimeoutError)
    assert "rank 0 of 3 was where it could not say; rank 1 of 3 was at /app/task.py:31 in train" in str(
        combined
    )
