"""FedBuff on a grid whose replies come in an order of chance: arithmetic, failures, what is refused."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from streaming_grid import PlainTestGrid, content_of, train

from flower_gpu import FedBuff
from flower_gpu.errors import ConfigError

BAD = 13  # the node that fails


class AsynchronousGrid(PlainTestGrid):
    """Nodes that are done in an order of chance, a few at each question; notes who trained what."""

    def __init__(self, nodes: Iterable[int], seed: int = 0) -> None:
        super().__init__(nodes)
        self._chance = random.Random(seed)
        self._waiting: dict[str, Message] = {}
        self.asked: list[int] = []
        self.most_waiting = 0
        self.versions: list[weakref.ref[ArrayRecord]] = []
        self.replies: list[tuple[int, dict[str, Any], RecordDict]] = []  # rounds and models sent, and replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.asked)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            assert message.metadata.dst_node_id not in self.busy, "one message at a time"
            self.asked.append(message.metadata.dst_node_id)
            self._waiting[ids[-1]] = message
            if not any(found() is message.content["arrays"] for found in self.versions):
                self.versions.append(weakref.ref(message.content["arrays"]))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return ids

    @property
    def busy(self) -> list[int]:
        return [message.metadata.dst_node_id for message in self._waiting.values()]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = sorted(message_ids)
        found = []
        for message_id in self._chance.sample(ids, self._chance.randint(0, min(3, len(ids)))):
            message = self._waiting.pop(message_id)
            content = train(message)
            if isinstance(content, RecordDict):
                sent = {name: array.numpy() for name, array in message.content["arrays"].items()}
                self.replies.append((message.content["config"]["server-round"], sent, content))
            found.append(Message(content, reply_to=message))
        alive = sum(version() is not None for version in self.versions)
        assert alive <= len(self._waiting) + len(found) + 2, "models that nobody trains are freed"
        return found


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.ones((2, 3), np.float32)), "batches": Array(np.array(5, np.uint8))})


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.flower.under_way._WAIT_S", 0.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_model_is_that_of_the_formula(seed: int) -> None:
    """Each version is the one before and the mean of what clients changed; the later, the less it counts."""
    chance = random.Random(seed)
    size, concurrency, rate = chance.randint(1, 6), chance.randint(1, 9), chance.choice([1.0, 0.5, 2.0])
    staleness = chance.choice([{}, {"staleness": lambda behind: 1 / (1 + behind)}])
    strategy = FedBuff(size, concurrency, server_learning_rate=rate, **staleness)
    grid = AsynchronousGrid(range(1, 12), seed)
    random.seed(seed)
    result = strategy.start(grid, initial(), num_rounds=8)
    assert grid.most_waiting == concurrency

    model = {name: array.numpy() for name, array in initial().items()}
    behind_most = 0
    for server_round in range(1, 9):
        updates = grid.replies[(server_round - 1) * size : server_round * size]
        weights = [reply["metrics"]["num-examples"] for *_, reply in updates]
        for name, before in model.items():
            total = np.zeros(before.shape)
            for weight, (sent_in, sent, reply) in zip(weights, updates, strict=True):
                behind = server_round - sent_in
                behind_most = max(behind, behind_most)
                counts = strategy.staleness(behind)
                if not staleness:
                    assert counts == pytest.approx((1 + behind) ** -0.5)
                total += weight * counts * (reply["arrays"][name].numpy().astype(float) - sent[name])
            new = before + rate * total / sum(weights)
            model[name] = np.rint(new).astype(np.uint8) if name == "batches" else new.astype(np.float32)
        mean = sum(
            weight * reply["metrics"]["loss"] for weight, (*_, reply) in zip(weights, updates, strict=True)
        )
        assert result.train_metrics_clientapp[server_round]["loss"] == pytest.approx(mean / sum(weights))
    np.testing.assert_allclose(result.arrays["w"].numpy(), model["w"], rtol=1e-5)
    assert result.arrays["w"].dtype == "float32" and result.arrays["batches"].dtype == "uint8"
    assert concurrency <= size or behind_most > 0


def test_a_client_that_fails_is_asked_once_for_each_version() -> None:
    grid = AsynchronousGrid([1, 2, BAD])
    result = FedBuff(4, 2).start(grid, initial(), num_rounds=3)
    assert len(grid.replies) >= 3 * 4 and set(result.train_metrics_clientapp) == {1, 2, 3}
    assert 1 <= grid.asked.count(BAD) <= 4

    alone = AsynchronousGrid([BAD])
    result = FedBuff(4, 1).start(alone, initial(), num_rounds=3)
    assert result.arrays == {} and alone.asked == [BAD] * 3


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"buffer_size": 0}, "buffer_size must be a whole number, 1 or more"),
        ({"concurrency": 2.5}, "concurrency must be a whole number, 1 or more"),
        ({"server_learning_rate": 0}, "server_learning_rate must be a number above 0"),
        ({"staleness": 0.5}, "staleness must be a function"),
        ({"staleness": lambda behind: -1.0}, "for 0 there is -1.0"),
    ],
)
def test_values_that_cannot_be_used_are_refused_at_once(wrong: Any, text: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=text):
        FedBuff(**wrong)


def test_a_strategy_around_it_is_refused() -> None:
    around = DifferentialPrivacyServerSideFixedClipping(FedBuff(1, 1), 0.1, 1.0, 1)
    with pytest.raises(ConfigError, match=r"call its start\(\)"):
        around.start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)


def test_other_arrays_than_were_sent_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(message: Message) -> RecordDict:
        return content_of({"w": np.ones((2, 3), np.float32)}, {"num-examples": 1})

    monkeypatch.setattr("test_fedbuff.train", part)
    with pytest.raises(InconsistentMessageReplies, match="other arrays than it was sent"):
        FedBuff(1, 1).start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)


def test_weights_of_zero_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(message: Message) -> RecordDict:
        return RecordDict({**message.content, "metrics": MetricRecord({"num-examples": 0})})

    monkeypatch.setattr("test_fedbuff.train", nothing)
    with pytest.raises(ZeroDivisionError, match="how many examples"):
        FedBuff(1, 1).start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)
