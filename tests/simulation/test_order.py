"""The longest message of a round goes out first: what is expected of messages, and what follows from that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from grid_handlers import RUN_ID, GridUnderTest, until

import flower_gpu
from flower_gpu.errors import ConfigError
from flower_gpu.simulation import grid as grid_module
from flower_gpu.simulation.dispatcher import Durations
from flower_gpu.simulation.run import _identity, simulate

# What is expected


def test_what_is_expected_of_a_client() -> None:
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
    assert durations.expected_s([("train", 1)]) == [4.0]  # the last calls count most


# What follows for a round


@pytest.fixture
def identity() -> Iterator[None]:
    """Flower lets only the SuperLink's side of a run make messages."""
    with _identity(RUN_ID):
        yield


@pytest.fixture
def new_grid(identity: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GridUnderTest]]:
    monkeypatch.setattr(grid_module, "_GATHER_S", 60.0)  # a busy machine sends few messages in the usual time
    made: list[GridUnderTest] = []

    def new(threads: int, nodes: int, known: Mapping[int, float]) -> GridUnderTest:
        durations = Durations()
        for client, seconds in known.items():
            durations.learn("train", client, seconds)
        made.append(GridUnderTest(threads, nodes, durations))
        return made[-1]

    yield new
    for one in made:
        one.close()


def clients(one: GridUnderTest, ids: Sequence[str], sent: Sequence[Message]) -> list[int]:
    by_id = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    return [one.nodes.partition_of(by_id[message_id]) for message_id in ids]


@pytest.mark.parametrize("way", ["send_and_receive", "stream", "push_messages", "in_order"])
def test_messages_are_handled_from_the_longest_to_the_shortest(
    way: str, new_grid: Callable[..., GridUnderTest]
) -> None:
    numbers = np.random.default_rng(3)
    for count in (1, 2, 7, 20):
        known = {client: float(numbers.lognormal()) for client in range(count) if client % 5}
        one = new_grid(1, count, known)
        sent = one.messages(count)
        if way == "push_messages":
            ids = list(one.grid.push_messages(sent))
            assert ids == [message.metadata.message_id for message in sent]
            assert until(lambda one=one, count=count: len(one.handling.done) == count)
        elif way == "in_order":
            one.sums(sent)
        else:
            list(getattr(one.grid, way)(sent))
        mean = sum(known.values()) / len(known) if known else 0.0
        expected = sorted(range(count), key=lambda client: -known.get(client, mean))
        assert clients(one, one.handling.begun, sent) == (
            list(range(count)) if way == "in_order" else expected
        )


def test_messages_that_are_made_slowly_keep_no_worker_waiting(
    new_grid: Callable[..., GridUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_module, "_GATHER_S", 0.0)
    one = new_grid(2, 4, dict.fromkeys(range(4), 1.0))

    def made() -> Iterator[Message]:
        for number, message in enumerate(one.messages(4)):
            assert until(lambda number=number: len(one.handling.done) == number)
            yield message

    assert len(list(one.grid.send_and_receive(made()))) == 4


# Whole runs, whose clients are in this process


class Noting:
    """An app that notes who was asked, in which order."""

    def __init__(self) -> None:
        self.handled: list[tuple[int, int]] = []  # threads and clients
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
    """What the run has learned in rounds before."""
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
    # Two threads take messages in turn, and one of them may be held up: each has its own in order.
    threads = {thread for thread, _ in noting.handled}
    of_threads = [[TAKES_S[client] for who, client in noting.handled if who == thread] for thread in threads]
    is_longest_first = all(seconds == sorted(seconds, reverse=True) for seconds in of_threads)
    assert is_longest_first == (order == "longest"), of_threads
    # And it has learned what its calls take, which is less.
    calls = [("train", client) for client in range(COUNT)]
    for client, seconds in enumerate(known.expected_s(calls)):
        assert TAKES_S[client] / 2 <= seconds < TAKES_S[client]


def test_an_order_that_is_none() -> None:
    with pytest.raises(ConfigError, match="order='shortest' is not one of longest, sent"):
        simulate(Noting().app, 2, order="shortest")
