"""The rounds on a grid that hands over replies as they come: the same as in Flower, and they can go on."""

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
from flower_gpu.flower import rounds

NODES = range(1, 13)


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros((2, 2), np.float32)), "batches": Array(np.array(5, np.int64))})


def evaluate(num_rounds: int | None = None) -> Any:
    return gpu_evaluate(flower_tasks.evaluate_message, num_rounds=num_rounds, start_method="in-process")


def run(strategy: Any, grid: Any, num_rounds: int = 4, evaluate_fn: Any = None, seed: int = 7) -> Result:
    random.seed(seed)
    np.random.seed(seed)
    return strategy.start(grid, initial(), num_rounds=num_rounds, evaluate_fn=evaluate_fn)


def assert_same(found: Result, wanted: Result) -> None:
    assert found == wanted
    assert list(found.arrays) == ["w", "batches"]


@pytest.mark.parametrize("has_evaluation", [True, False])
def test_results_and_log_are_those_of_flowers_own_loop(
    has_evaluation: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def outcome(grid: PlainTestGrid) -> tuple[Result, list[str]]:
        caplog.clear()
        found = run(
            FedAvg(fraction_train=0.5, exact_order=True), grid, 3, evaluate() if has_evaluation else None
        )
        return found, [re.sub(r"\d+\.\d+ ?s$", "", record.getMessage()) for record in caplog.records]

    plain, streaming = PlainTestGrid([*NODES, 13]), StreamingTestGrid([*NODES, 13], order=shuffled(1))
    (wanted, wanted_lines), (found, lines) = outcome(plain), outcome(streaming)
    assert_same(found, wanted)
    assert lines == wanted_lines and "[ROUND 3/3]" in lines
    assert (plain.lists, streaming.lists) == (3, 0)


def test_log_lines_are_those_of_flowers_strategy(caplog: pytest.LogCaptureFixture) -> None:
    def lines(strategy: Any, grid: PlainTestGrid) -> list[str]:
        caplog.clear()
        run(strategy, grid, 2, evaluate(2))
        # Flower's mean in 32 bits differs in the last digits.
        return [re.sub(r"\d+\.\d+(e-\d+)?", "#", record.getMessage()) for record in caplog.records]

    flowers = FlowerFedAvg(fraction_evaluate=0.0)
    found, wanted = lines(FedAvg(), StreamingTestGrid(NODES)), lines(flowers, PlainTestGrid(NODES))
    assert found == wanted


def test_failing_clients_do_not_stop_a_round() -> None:
    grid = StreamingTestGrid([1, 13])
    result = run(FedAvg(), grid, num_rounds=1)
    alone = run(FedAvg(min_train_nodes=1, min_available_nodes=1), StreamingTestGrid([1]), num_rounds=1)
    assert np.array_equal(result.arrays["w"].numpy(), alone.arrays["w"].numpy())


def test_a_round_without_replies_leaves_the_model_as_it_is() -> None:
    grid = StreamingTestGrid([13], order=lambda messages: [])
    result = run(FedAvg(min_train_nodes=1, min_available_nodes=1), grid, num_rounds=2)
    assert result.arrays == {} and result.train_metrics_clientapp == {}
    assert [state.arrays for state in grid.finished] == [initial()] * 3


def test_each_finished_round_is_noted_with_all_that_came_before() -> None:
    grid = StreamingTestGrid(NODES)
    result = run(FedAvg(), grid, 3, evaluate())
    assert [state.server_round for state in grid.finished] == [0, 1, 2, 3]
    assert [list(state.train_metrics) for state in grid.finished] == [[], [1], [1, 2], [1, 2, 3]]
    assert [list(state.evaluate_metrics) for state in grid.finished] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert grid.finished[0].arrays == initial() and grid.finished[3].arrays == result.arrays


@pytest.mark.parametrize("order", [list, shuffled(5)])
@pytest.mark.parametrize("ends_in", [1, 3, 4])
def test_a_run_that_goes_on_gives_what_one_without_a_break_gives(ends_in: int, order: Any) -> None:
    def strategy() -> FedAvg:
        return FedAvg(fraction_train=0.4, min_train_nodes=3, exact_order=True)

    wanted = run(strategy(), StreamingTestGrid(NODES), evaluate_fn=evaluate())
    ended = StreamingTestGrid(NODES, ends_in=ends_in, order=order)
    with pytest.raises(KeyboardInterrupt):
        run(strategy(), ended, evaluate_fn=evaluate())
    assert ended.finished[-1].server_round == ends_in - 1
    other = StreamingTestGrid(NODES, state=ended.finished[-1], order=order)
    evaluated: list[int] = []
    assert_same(run(strategy(), other, evaluate_fn=_remembered(evaluated), seed=99), wanted)
    assert evaluated == list(range(ends_in, 5))
    assert [state.server_round for state in other.finished] == evaluated


def _remembered(rounds_seen: list[int]) -> Any:
    def evaluate_and_remember(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        rounds_seen.append(server_round)
        return flower_tasks.evaluate_message(server_round, arrays)

    return gpu_evaluate(evaluate_and_remember, start_method="in-process")


def test_a_run_that_is_over_gives_its_result_again() -> None:
    grid = StreamingTestGrid(NODES)
    wanted = run(FedAvg(), grid, 2, evaluate())
    again = StreamingTestGrid(NODES, state=grid.finished[-1])
    assert_same(run(FedAvg(), again, 2, evaluate()), wanted)
    assert again.finished == []


@pytest.mark.parametrize("bit_generator", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_random_state_survives_json(bit_generator: str) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, bit_generator)(3))
        random.gauss(0, 1)  # keeps a second number for later
        np.random.randn()
        state = json.loads(json.dumps(rounds.capture_random_state()))
        wanted = [random.gauss(0, 1), random.random(), *np.random.randn(3)]
        assert [random.gauss(0, 1), random.random(), *np.random.randn(3)] != wanted
        rounds.restore_random_state(state)
        assert [random.gauss(0, 1), random.random(), *np.random.randn(3)] == wanted
    finally:
        np.random.set_bit_generator(before)


def test_the_state_of_pytorchs_generator_survives_json() -> None:
    torch = pytest.importorskip("torch")
    torch.randn(3)
    state = json.loads(json.dumps(rounds.capture_random_state()))
    wanted = torch.randn(20)
    rounds.restore_random_state(state)
    assert torch.equal(torch.randn(20), wanted)


class Listing(FedAvg):
    """What a user may write: looks at the replies, then leaves the rest to FedAvg."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        assert isinstance(replies, list)
        self.norms = [float(np.linalg.norm(reply.content["arrays"]["w"].numpy())) for reply in replies]
        found = super().aggregate_train(server_round, replies)
        assert len(replies) == len([reply.content["arrays"]["w"].numpy() for reply in replies])
        return found


class Configuring(FedAvg):
    """Yields messages, to odd nodes only."""

    def configure_train(self, *args: Any) -> Iterator[Message]:
        for message in super().configure_train(*args):
            if message.metadata.dst_node_id % 2:
                yield message


class Evaluating(FedAvg):
    """Has clients evaluate after all."""

    def configure_evaluate(self, *args: Any) -> Iterable[Message]:
        return super().configure_train(*args)


@pytest.mark.parametrize("exact_order", [False, True])
@pytest.mark.parametrize("kind", [Listing, Configuring, Evaluating])
def test_classes_derived_from_it_work_on_both_kinds_of_grid(
    kind: Callable[..., FedAvg], exact_order: bool
) -> None:
    grids = PlainTestGrid(NODES), StreamingTestGrid(NODES)
    wanted, found = (run(kind(exact_order=exact_order), grid, num_rounds=2) for grid in grids)
    assert_same(found, wanted)
    assert bool(found.evaluate_metrics_clientapp) == (kind is Evaluating)
    assert grids[1].lists == (0 if kind is Configuring else 2)


def test_metrics_of_clients_that_evaluate_survive_a_break() -> None:
    grid = StreamingTestGrid(NODES)
    wanted = run(Evaluating(), grid, num_rounds=3)
    other = StreamingTestGrid(NODES, state=grid.finished[1])
    assert_same(run(Evaluating(), other, num_rounds=3, seed=99), wanted)


def test_a_method_of_one_object_counts_as_overridden() -> None:
    strategy, grid = FedAvg(), StreamingTestGrid(NODES)
    strategy.aggregate_train = lambda server_round, replies: (None, None)  # type: ignore[method-assign]
    run(strategy, grid, num_rounds=1)
    assert grid.lists == 1


@pytest.mark.parametrize("exact_order", [False, True])
def test_after_an_error_no_more_replies_are_waited_for(exact_order: bool) -> None:
    asked: list[int] = []
    given_up: list[bool] = []

    class Grid(StreamingTestGrid):
        def stream(self, messages: Iterable[Message], **options: Any) -> Iterator[Message]:
            try:
                for reply in super().stream(messages, **options):
                    asked.append(reply.metadata.src_node_id)
                    if reply.metadata.src_node_id == 3:
                        reply.content["arrays"]["w"] = Array(np.zeros(7, np.float32))
                    yield reply
            finally:
                given_up.append(True)

    with pytest.raises(InvalidResultError, match="'w' of node 3 has shape") as caught:
        run(FedAvg(exact_order=exact_order), Grid(NODES))
    assert given_up and caught.value  # while the error, and with it every frame, is still there
    assert asked[-1] == 3
