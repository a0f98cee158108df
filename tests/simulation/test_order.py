"""The longest message of a round is sent first: expected durations, and the order that follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from grid_handlers import GridUnderTest
from waiting import until

import flower_gpu
from flower_gpu.errors import ConfigError
from flower_gpu.simulation import grid as grid_module
from flower_gpu.simulation.dispatcher import Durations
from flower_gpu.simulation.run import simulate

# Expected durations


def test_the_expected_duration_of_a_client() -> None:
    durations = Durations()
    assert durations.is_empty and durations.expected_s([("train", 1), ("train", 9)]) == [0, 0]
    durations.learn("train", 1, 2.0)
    durations.learn("train", 2, 7.0)
    assert durations.expected_s([("train", 1), ("train", 2), ("train", 3), ("train", 9)]) == [
        2,
        7,
        4.5,
        4.5,
    ]
    assert durations.expected_s([("evaluate", 1)]) == [0.0]
    durations.learn("train", 1, 4.0)
    durations.learn("train", 1, 5.0)
    # The last calls count most.
    assert durations.expected_s([("train", 1)]) == [4.0]


# Order within a round


@pytest.fixture
def new_timed_grid(
    new_grid: Callable[..., GridUnderTest], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., GridUnderTest]:
    # A busy machine sends few messages within the usual time.
    monkeypatch.setattr(grid_module, "_GATHER_S", 60.0)

    def new(threads: int, nodes: int, known: Mapping[int, float]) -> GridUnderTest:
        durations = Durations()
        for client, seconds in known.items():
            durations.learn("train", client, seconds)
        return new_grid(threads, nodes, durations)

    return new


def clients(harness: GridUnderTest, ids: Sequence[str], sent: Sequence[Message]) -> list[int]:
    by_id = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    return [harness.nodes.partition_of(by_id[message_id]) for message_id in ids]


@pytest.mark.parametrize("way", ["send_and_receive", "stream", "push_messages", "in_order"])
def test_messages_are_handled_from_the_longest_to_the_shortest(
    way: str, new_timed_grid: Callable[..., GridUnderTest]
) -> None:
    numbers = np.random.default_rng(3)
    for count in (1, 2, 7, 20):
        known = {client: float(numbers.lognormal()) for client in range(count) if client % 5}
        harness = new_timed_grid(1, count, known)
        sent = harness.messages(count)
        if way == "push_messages":
            ids = list(harness.grid.push_messages(sent))
            assert ids == [message.metadata.message_id for message in sent]
            until(lambda harness=harness, count=count: len(harness.handling.done) == count)
        elif way == "in_order":
            harness.sums(sent)
        else:
            list(getattr(harness.grid, way)(sent))
        mean = sum(known.values()) / len(known) if known else 0.0
        expected = sorted(range(count), key=lambda client: -known.get(client, mean))
        assert clients(harness, harness.handling.begun, sent) == (
            list(range(count)) if way == "in_order" else expected
        )


def test_messages_that_are_created_slowly_do_not_delay_workers(
    new_timed_grid: Callable[..., GridUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_module, "_GATHER_S", 0.0)
    harness = new_timed_grid(2, 4, dict.fromkeys(range(4), 1.0))

    def slow_messages() -> Iterator[Message]:
        for number, message in enumerate(harness.messages(4)):
            until(lambda number=number: len(harness.handling.done) == number)
            yield message

    assert len(list(harness.grid.send_and_receive(slow_messages()))) == 4


# Whole runs with clients in this process


class Noting:
    """An app that records which clients were asked, and in which order."""

    def __init__(self) -> None:
        # Pairs of thread and client
        self.handled: list[tuple[int, int]] = []
        self.app = ServerApp(), ClientApp()
        self.app[0].main()(self._main)
        self.app[1].train()(self._train)

    def _main(self, grid: Grid, context: Context) -> None:
        flower_gpu.FedAvg().start(grid, ArrayRecord({"w": Array(np.zeros(2, np.float32))}), num_rounds=1)

    def _train(self, message: Message, context: Context) -> Message:
        self.handled.append((threading.get_ident(), int(context.node_config["partition-id"])))
        metrics = MetricRecord({"num-examples": 10})
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message
        )


COUNT = 12
TAKES_S = {client: float(1 + client * 7 % COUNT) for client in range(COUNT)}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Durations:
    """Durations that the run has learned in earlier rounds."""
    durations = Durations()
    for client, seconds in TAKES_S.items():
        durations.learn("train", client, seconds)
    monkeypatch.setattr("flower_gpu.simulation.run.Durations", lambda: durations)
    monkeypatch.setattr(grid_module, "_GATHER_S", 60.0)
    return durations


@pytest.mark.parametrize("order", ["longest", "sent"])
def test_a_run_sends_the_longest_first(order: str, known: Durations) -> None:
    noting = Noting()
    options: dict[str, Any] = {"max_workers": 2, "start_method": "in-process", "gpu": "never"}
    simulate(noting.app, COUNT, order=order, log_dir=None, progress=False, seed=1, **options)
    assert sorted(client for _, client in noting.handled) == list(range(COUNT))
    # Two threads take messages in turn, and either may be delayed, so only the order within a thread is
    # certain.
    threads = {thread for thread, _ in noting.handled}
    of_threads = [[TAKES_S[client] for who, client in noting.handled if who == thread] for thread in threads]
    is_longest_first = all(seconds == sorted(seconds, reverse=True) for seconds in of_threads)
    assert is_longest_first == (order == "longest"), of_threads
    # The run has also learned the actual durations of its calls, which are shorter.
    calls = [("train", client) for client in range(COUNT)]
    for client, seconds in enumerate(known.expected_s(calls)):
        assert TAKES_S[client] / 2 <= seconds < TAKES_S[client]


def test_an_unknown_order_is_an_error() -> None:
    with pytest.raises(ConfigError, match="order='shortest' is not one of longest, sent"):
        simulate(Noting().app, 2, order="shortest")
