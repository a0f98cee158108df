"""Rounds on a grid that yields replies as they arrive: the same results as in Flower, and resumable."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flower_tasks
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from streaming_grid import PlainTestGrid, StreamingTestGrid, shuffled

from flower_gpu import FedAvg, gpu_evaluate
from flower_gpu.errors import InvalidResultError
from flower_gpu.strategies import rounds

NODES = range(1, 13)


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros((2, 2), np.float32)), "batches": Array(np.array(5, np.int64))})


def evaluate(num_rounds: int | None = None) -> Any:
    return gpu_evaluate(flower_tasks.evaluate_message, num_rounds=num_rounds, start_method="in-process")


def run(strategy: Any, grid: Any, num_rounds: int = 4, evaluate_fn: Any = None, seed: int = 7) -> Result:
    random.seed(seed)
    np.random.seed(seed)
    return strategy.start(grid, initial(), num_rounds=num_rounds, evaluate_fn=evaluate_fn)


def assert_same(actual: Result, expected: Result) -> None:
    assert actual == expected
    assert list(actual.arrays) == ["w", "batches"]


@pytest.mark.parametrize("has_evaluation", [True, False])
def test_results_and_log_equal_those_of_flowers_loop(
    has_evaluation: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def outcome(grid: PlainTestGrid) -> tuple[Result, list[str]]:
        caplog.clear()
        result = run(
            FedAvg(fraction_train=0.5, exact_order=True), grid, 3, evaluate() if has_evaluation else None
        )
        return result, [re.sub(r"\d+\.\d+ ?s$", "", record.getMessage()) for record in caplog.records]

    plain, streaming = PlainTestGrid([*NODES, 13]), StreamingTestGrid([*NODES, 13], order=shuffled(1))
    (expected, expected_lines), (actual, lines) = outcome(plain), outcome(streaming)
    assert_same(actual, expected)
    assert lines == expected_lines and "[ROUND 3/3]" in lines
    assert (plain.lists, streaming.lists) == (3, 0)


def test_log_lines_equal_those_of_flowers_strategy(caplog: pytest.LogCaptureFixture) -> None:
    def lines(strategy: Any, grid: PlainTestGrid) -> list[str]:
        caplog.clear()
        run(strategy, grid, 2, evaluate(2))
        # Flower computes the mean in 32 bits, so its last digits differ.
        return [re.sub(r"\d+\.\d+(e-\d+)?", "#", record.getMessage()) for record in caplog.records]

    flowers = FlowerFedAvg(fraction_evaluate=0.0)
    assert lines(FedAvg(), StreamingTestGrid(NODES)) == lines(flowers, PlainTestGrid(NODES))


def test_failing_clients_do_not_stop_a_round() -> None:
    grid = StreamingTestGrid([1, 13])
    result = run(FedAvg(), grid, num_rounds=1)
    alone = run(FedAvg(min_train_nodes=1, min_available_nodes=1), StreamingTestGrid([1]), num_rounds=1)
    assert np.array_equal(result.arrays["w"].numpy(), alone.arrays["w"].numpy())


def test_a_round_without_replies_leaves_the_model_unchanged() -> None:
    grid = StreamingTestGrid([13], order=lambda messages: [])
    result = run(FedAvg(min_train_nodes=1, min_available_nodes=1), grid, num_rounds=2)
    assert result.arrays == {} and result.train_metrics_clientapp == {}
    assert [state.arrays for state in grid.finished] == [initial()] * 3


def test_the_state_of_a_finished_round_contains_all_earlier_metrics() -> None:
    grid = StreamingTestGrid(NODES)
    result = run(FedAvg(), grid, 3, evaluate())
    assert [state.server_round for state in grid.finished] == [0, 1, 2, 3]
    assert [list(state.train_metrics) for state in grid.finished] == [[], [1], [1, 2], [1, 2, 3]]
    assert [list(state.evaluate_metrics) for state in grid.finished] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert grid.finished[0].arrays == initial() and grid.finished[3].arrays == result.arrays


@pytest.mark.parametrize("order", [list, shuffled(5)])
@pytest.mark.parametrize("ends_in", [1, 3, 4])
def test_a_resumed_run_gives_the_same_result_as_an_uninterrupted_run(ends_in: int, order: Any) -> None:
    def strategy() -> FedAvg:
        return FedAvg(fraction_train=0.4, min_train_nodes=3, exact_order=True)

    expected = run(strategy(), StreamingTestGrid(NODES), evaluate_fn=evaluate())
    interrupted = StreamingTestGrid(NODES, ends_in=ends_in, order=order)
    with pytest.raises(KeyboardInterrupt):
        run(strategy(), interrupted, evaluate_fn=evaluate())
    assert interrupted.finished[-1].server_round == ends_in - 1
    resumed = StreamingTestGrid(NODES, state=interrupted.finished[-1], order=order)
    evaluated: list[int] = []
    assert_same(run(strategy(), resumed, evaluate_fn=_recording_evaluate(evaluated), seed=99), expected)
    assert evaluated == list(range(ends_in, 5))
    assert [state.server_round for state in resumed.finished] == evaluated


def _recording_evaluate(rounds_seen: list[int]) -> Any:
    def evaluate_and_record(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        rounds_seen.append(server_round)
        return flower_tasks.evaluate_message(server_round, arrays)

    return gpu_evaluate(evaluate_and_record, start_method="in-process")


def test_a_finished_run_returns_its_result_again() -> None:
    grid = StreamingTestGrid(NODES)
    expected = run(FedAvg(), grid, 2, evaluate())
    again = StreamingTestGrid(NODES, state=grid.finished[-1])
    assert_same(run(FedAvg(), again, 2, evaluate()), expected)
    assert again.finished == []


@pytest.mark.parametrize("bit_generator", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_the_random_state_survives_json(bit_generator: str) -> None:
    previous = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, bit_generator)(3))
        random.gauss(0, 1)  # computes two numbers and keeps the second for the next call
        np.random.randn()
        state = json.loads(json.dumps(rounds.capture_random_state()))
        expected = [random.gauss(0, 1), random.random(), *np.random.randn(3)]
        assert [random.gauss(0, 1), random.random(), *np.random.randn(3)] != expected
        rounds.restore_random_state(state)
        assert [random.gauss(0, 1), random.random(), *np.random.randn(3)] == expected
    finally:
        np.random.set_bit_generator(previous)


def test_the_state_of_pytorchs_generator_survives_json() -> None:
    torch = pytest.importorskip("torch")
    torch.randn(3)
    state = json.loads(json.dumps(rounds.capture_random_state()))
    expected = torch.randn(20)
    rounds.restore_random_state(state)
    assert torch.equal(torch.randn(20), expected)


class Listing(FedAvg):
    """A user's strategy that inspects the replies before FedAvg aggregates them."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        assert isinstance(replies, list)
        self.norms = [float(np.linalg.norm(reply.content["arrays"]["w"].numpy())) for reply in replies]
        result = super().aggregate_train(server_round, replies)
        assert len(replies) == len([reply.content["arrays"]["w"].numpy() for reply in replies])
        return result


class Configuring(FedAvg):
    """A strategy that yields its messages, and only those to odd nodes."""

    def configure_train(self, *args: Any) -> Iterator[Message]:
        for message in super().configure_train(*args):
            if message.metadata.dst_node_id % 2:
                yield message


class Evaluating(FedAvg):
    """A strategy that also asks clients to evaluate."""

    def configure_evaluate(self, *args: Any) -> Iterable[Message]:
        return super().configure_train(*args)


@pytest.mark.parametrize("exact_order", [False, True])
@pytest.mark.parametrize("kind", [Listing, Configuring, Evaluating])
def test_subclasses_work_on_both_kinds_of_grid(kind: Callable[..., FedAvg], exact_order: bool) -> None:
    grids = PlainTestGrid(NODES), StreamingTestGrid(NODES)
    expected, actual = (run(kind(exact_order=exact_order), grid, num_rounds=2) for grid in grids)
    assert_same(actual, expected)
    assert bool(actual.evaluate_metrics_clientapp) == (kind is Evaluating)
    assert grids[1].lists == (0 if kind is Configuring else 2)


def test_evaluation_metrics_of_clients_survive_a_resume() -> None:
    grid = StreamingTestGrid(NODES)
    expected = run(Evaluating(), grid, num_rounds=3)
    resumed = StreamingTestGrid(NODES, state=grid.finished[1])
    assert_same(run(Evaluating(), resumed, num_rounds=3, seed=99), expected)


def test_a_method_set_on_an_instance_counts_as_overridden() -> None:
    strategy, grid = FedAvg(), StreamingTestGrid(NODES)
    strategy.aggregate_train = lambda server_round, replies: (None, None)  # type: ignore[method-assign]
    run(strategy, grid, num_rounds=1)
    assert grid.lists == 1


@pytest.mark.parametrize("exact_order", [False, True])
def test_an_error_closes_the_stream_of_replies(exact_order: bool) -> None:
    received_nodes: list[int] = []
    closed: list[bool] = []

    class Grid(StreamingTestGrid):
        def stream(self, messages: Iterable[Message], **options: Any) -> Iterator[Message]:
            try:
                for reply in super().stream(messages, **options):
                    received_nodes.append(reply.metadata.src_node_id)
                    if reply.metadata.src_node_id == 3:
                        reply.content["arrays"]["w"] = Array(np.zeros(7, np.float32))
                    yield reply
            finally:
                closed.append(True)

    with pytest.raises(InvalidResultError, match="'w' of node 3 has shape") as caught:
        run(FedAvg(exact_order=exact_order), Grid(NODES))
    # The stream is closed even though the error keeps every frame alive.
    assert closed and caught.value
    assert received_nodes[-1] == 3
