"""FedBuff on a grid whose replies arrive in random order: arithmetic, failures and refused arguments."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from streaming_grid import PlainTestGrid, content_of, train

from flower_gpu import FedBuff, resumable
from flower_gpu.errors import ClientsFailedError, ConfigError, InvalidResultError
from flower_gpu.programs.serverapp import GridTime, record
from flower_gpu.strategies.recording.strategies import recorded_rounds
from flower_gpu.strategies.rounds import RoundState

BAD = 13  # id of the node that always fails


class AsynchronousGrid(PlainTestGrid):
    """A grid whose nodes finish in random order, a few at each poll. It records messages and replies."""

    def __init__(self, nodes: Iterable[int], seed: int = 0) -> None:
        super().__init__(nodes)
        self._chance = random.Random(seed)
        self._waiting: dict[str, Message] = {}
        self.asked_nodes: list[int] = []
        self.max_in_flight = 0
        self.versions: list[weakref.ref[ArrayRecord]] = []
        # The round and the model that were sent, and the content of the reply
        self.replies: list[tuple[int, dict[str, Any], RecordDict]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.asked_nodes)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            assert message.metadata.dst_node_id not in self.busy, "one message at a time"
            self.asked_nodes.append(message.metadata.dst_node_id)
            self._waiting[ids[-1]] = message
            if not any(version() is message.content["arrays"] for version in self.versions):
                self.versions.append(weakref.ref(message.content["arrays"]))
        self.max_in_flight = max(self.max_in_flight, len(self._waiting))
        return ids

    @property
    def busy(self) -> list[int]:
        return [message.metadata.dst_node_id for message in self._waiting.values()]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = sorted(message_ids)
        replies = []
        for message_id in self._chance.sample(ids, self._chance.randint(0, min(3, len(ids)))):
            message = self._waiting.pop(message_id)
            content = train(message)
            if isinstance(content, RecordDict):
                sent = {name: array.numpy() for name, array in message.content["arrays"].items()}
                self.replies.append((message.content["config"]["server-round"], sent, content))
            replies.append(Message(content, reply_to=message))
        alive = sum(version() is not None for version in self.versions)
        assert alive <= len(self._waiting) + len(replies) + 2, "models that no node trains are freed"
        return replies


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.ones((2, 3), np.float32)), "batches": Array(np.array(5, np.uint8))})


@pytest.fixture(autouse=True)
def _poll_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.strategies.under_way._WAIT_S", 0.0)


@pytest.mark.parametrize("seed", range(6))
def test_each_version_of_the_model_follows_the_formula(seed: int) -> None:
    """A version is the previous one plus the mean update. A stale update has a smaller weight."""
    rng = random.Random(seed)
    size, concurrency, rate = rng.randint(1, 6), rng.randint(1, 9), rng.choice([1.0, 0.5, 2.0])
    staleness = rng.choice([{}, {"staleness": lambda behind: 1 / (1 + behind)}])
    strategy = FedBuff(size, concurrency, server_learning_rate=rate, **staleness)
    grid = AsynchronousGrid(range(1, 12), seed)
    random.seed(seed)
    result = strategy.start(grid, initial(), num_rounds=8)
    assert grid.max_in_flight == concurrency

    model = {name: array.numpy() for name, array in initial().items()}
    max_behind = 0
    for server_round in range(1, 9):
        updates = grid.replies[(server_round - 1) * size : server_round * size]
        weights = [reply["metrics"]["num-examples"] for *_, reply in updates]
        for name, previous in model.items():
            total = np.zeros(previous.shape)
            for weight, (round_sent, sent, reply) in zip(weights, updates, strict=True):
                behind = server_round - round_sent
                max_behind = max(behind, max_behind)
                factor = strategy.staleness(behind)
                if not staleness:
                    assert factor == pytest.approx((1 + behind) ** -0.5)
                total += weight * factor * (reply["arrays"][name].numpy().astype(float) - sent[name])
            new = previous + rate * total / sum(weights)
            model[name] = np.rint(new).astype(np.uint8) if name == "batches" else new.astype(np.float32)
        mean = sum(
            weight * reply["metrics"]["loss"] for weight, (*_, reply) in zip(weights, updates, strict=True)
        )
        assert result.train_metrics_clientapp[server_round]["loss"] == pytest.approx(mean / sum(weights))
    np.testing.assert_allclose(result.arrays["w"].numpy(), model["w"], rtol=1e-5)
    assert result.arrays["w"].dtype == "float32" and result.arrays["batches"].dtype == "uint8"
    assert concurrency <= size or max_behind > 0


def test_a_failing_client_is_asked_once_per_version() -> None:
    grid = AsynchronousGrid([1, 2, BAD])
    result = FedBuff(4, 2).start(grid, initial(), num_rounds=3)
    assert len(grid.replies) >= 3 * 4 and set(result.train_metrics_clientapp) == {1, 2, 3}
    assert 1 <= grid.asked_nodes.count(BAD) <= 4

    alone = AsynchronousGrid([BAD])
    with pytest.raises(ClientsFailedError, match=f"no client has sent an update .* node {BAD}: out of luck"):
        FedBuff(4, 1).start(alone, initial(), num_rounds=3)
    assert alone.asked_nodes == [BAD] * 3


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
def test_invalid_arguments_are_refused_by_the_constructor(wrong: Any, text: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=text):
        FedBuff(**wrong)


def test_a_strategy_that_wraps_fedbuff_is_refused() -> None:
    wrapper = DifferentialPrivacyServerSideFixedClipping(FedBuff(1, 1), 0.1, 1.0, 1)
    with pytest.raises(ConfigError, match=r"call its start\(\)"):
        wrapper.start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)


def test_a_reply_with_missing_arrays_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(message: Message) -> RecordDict:
        return content_of({"w": np.ones((2, 3), np.float32)}, {"num-examples": 1})

    monkeypatch.setattr("test_fedbuff.train", part)
    with pytest.raises(InconsistentMessageReplies, match="other arrays than the client was sent"):
        FedBuff(1, 1).start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)


@pytest.mark.parametrize("shape", [(1, 3), ()])
def test_a_reply_with_another_shape_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """That includes shapes that numpy could broadcast to the shape that was sent."""

    def smaller(message: Message) -> RecordDict:
        sent = next(iter(message.content.array_records.values()))
        arrays = {name: np.ones(shape, np.float32) for name in sent}
        return content_of(arrays, {"num-examples": 1})

    monkeypatch.setattr("test_fedbuff.train", smaller)
    with pytest.raises(InvalidResultError, match="in the model that was sent: do all clients train the same"):
        FedBuff(1, 1).start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)


@pytest.mark.parametrize("examples", [-1.0, math.nan])
def test_an_invalid_number_of_examples_ends_the_run(monkeypatch: pytest.MonkeyPatch, examples: float) -> None:
    def reply(message: Message) -> RecordDict:
        return RecordDict({**message.content, "metrics": MetricRecord({"num-examples": examples})})

    monkeypatch.setattr("test_fedbuff.train", reply)
    with pytest.raises(InconsistentMessageReplies, match="must be 0 or more"):
        FedBuff(1, 1).start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)


def test_an_update_with_zero_examples_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(message: Message) -> RecordDict:
        arrays = {name: array.numpy() + 1 for name, array in message.content["arrays"].items()}
        is_empty = message.metadata.dst_node_id == 2
        metrics = {"num-examples": 0, "loss": math.nan} if is_empty else {"num-examples": 5, "loss": 2.0}
        arrays["w"] = arrays["w"] * (np.inf if is_empty else 1)
        return content_of(arrays, metrics)

    monkeypatch.setattr("test_fedbuff.train", reply)
    alone = FedBuff(1, 1).start(AsynchronousGrid([2]), initial(), num_rounds=3)
    assert_same(alone.arrays, initial())
    assert list(alone.train_metrics_clientapp) == [1, 2, 3]
    strategy = FedBuff(2, 2, staleness=lambda _: 1, exact_order=True)  # one update per client
    both = strategy.start(AsynchronousGrid([1, 2]), initial(), num_rounds=1)
    assert both.arrays["w"].numpy().tolist() == [[2.0] * 3] * 2
    assert both.train_metrics_clientapp[1]["loss"] == 2.0


def test_unchanged_entries_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention mask contains -inf, and a counter may be too large for a 64-bit float."""
    model = {
        "w": np.zeros(3, np.float32),
        "mask": np.array([0.0, -np.inf, np.inf, np.nan], np.float32),
        "small": np.array([0.1, -np.inf], np.float16),
        "counter": np.array([2**60 + 1, 7]),
        "is_frozen": np.array([True, False]),
        "of another machine": np.array([0.3], ">f4"),
    }
    first = ArrayRecord({name: Array(array) for name, array in model.items()})

    def reply(message: Message) -> RecordDict:
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        return content_of({**arrays, "w": arrays["w"] + 1}, {"num-examples": 3})

    monkeypatch.setattr("test_fedbuff.train", reply)
    result = FedBuff(2, 4, staleness=lambda _: 1).start(AsynchronousGrid(range(1, 7)), first, num_rounds=4)
    assert result.arrays["w"].numpy().tolist() == [4.0] * 3
    del result.arrays["w"], first["w"]
    assert_same(result.arrays, first)


LARGE = {
    "int64": [2**60 + 1, -(2**62) - 3, 2**63 - 8, -(2**63), 5, 2**53 + 1, 2**63 - 1],
    "uint64": [2**63 + 1, 2**64 - 9, 2**53 + 1, 3, 0],
}


@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("step", [1, 2, -1, 3, 2**40 + 1, -(2**52) - 1])
def test_large_integers_are_updated_exactly(monkeypatch: pytest.MonkeyPatch, dtype: str, step: int) -> None:
    """A 64-bit float cannot hold them. The results stay in the range of their dtype."""
    limits = np.iinfo(dtype)
    other = "uint64" if dtype == "int64" else "int64"

    def added(entry: int) -> int:
        return min(max(entry + step, limits.min), limits.max)

    def reply(message: Message) -> RecordDict:
        sent = {name: array.numpy().tolist() for name, array in message.content["arrays"].items()}
        entries = np.array([added(entry) for entry in sent["entries"]], dtype)
        return content_of(
            {"entries": entries, "one": np.array(added(sent["one"]), other)}, {"num-examples": 3}
        )

    monkeypatch.setattr("test_fedbuff.train", reply)
    first = {"entries": np.array(LARGE[dtype], dtype), "one": np.array(2**60 + 1, dtype)}
    model = ArrayRecord({name: Array(array) for name, array in first.items()})
    strategy = FedBuff(2, 2, staleness=lambda _: 1, exact_order=True)  # one update per client
    result = strategy.start(AsynchronousGrid([1, 2]), model, num_rounds=1)
    arrays = {name: array.numpy() for name, array in result.arrays.items()}
    assert {array.dtype.name for array in arrays.values()} == {dtype}
    assert arrays["entries"].tolist() == [added(entry) for entry in LARGE[dtype]]
    assert arrays["one"].tolist() == added(2**60 + 1)


def test_an_infinite_entry_of_an_update_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(message: Message) -> RecordDict:
        return content_of({"w": np.array([np.inf, 1.0]), "batches": np.uint8(5)}, {"num-examples": 3})

    monkeypatch.setattr("test_fedbuff.train", reply)
    first = ArrayRecord({"w": Array(np.zeros(2)), "batches": Array(np.array(5, np.uint8))})
    result = FedBuff(1, 1).start(AsynchronousGrid([1]), first, num_rounds=2)
    assert result.arrays["w"].numpy().tolist() == [np.inf, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_the_model_keeps_its_dtype_if_clients_send_other_dtypes(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def reply(message: Message) -> RecordDict:
        kind = dtype if message.metadata.dst_node_id % 2 else "float32"
        arrays = {name: array.numpy().astype(kind) + 2 for name, array in message.content["arrays"].items()}
        return content_of(arrays, {"num-examples": 3})

    monkeypatch.setattr("test_fedbuff.train", reply)
    result = FedBuff(3, 3, staleness=lambda _: 1).start(AsynchronousGrid([1, 2, 3]), initial(), num_rounds=2)
    assert {name: array.dtype for name, array in result.arrays.items()} == {
        "w": "float32",
        "batches": "uint8",
    }
    assert result.arrays["w"].numpy().tolist() == [[5.0] * 3] * 2 and result.arrays["batches"].numpy() == 9


class RefusingGrid(AsynchronousGrid):
    """A grid that refuses the messages to some nodes, as Flower does if they are too large or malformed."""

    def __init__(self, nodes: Iterable[int], refused: Iterable[int], form: str) -> None:
        super().__init__(nodes)
        self._refused, self._form = set(refused), form

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        taken = [message for message in messages if message.metadata.dst_node_id not in self._refused]
        ids = iter(super().push_messages(taken))
        all_ids = [next(ids) if message in taken else None for message in messages]
        return all_ids if self._form == "none in its place" else [id_ for id_ in all_ids if id_ is not None]


@pytest.mark.parametrize("form", ["none in its place", "left out"])
def test_messages_that_the_grid_refuses_count_as_failures(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    grid = RefusingGrid([1, 2, 3], [2], form)
    result = FedBuff(3, 3).start(grid, initial(), num_rounds=3)
    assert set(grid.asked_nodes) == {1, 3} and list(result.train_metrics_clientapp) == [1, 2, 3]
    lines = [record.getMessage() for record in caplog.records if "error in reply" in record.getMessage()]
    assert len(lines) >= 1 and all("node 2: the message could not be sent" in text for text in lines)


def test_refused_messages_are_recorded() -> None:
    events: list[Any] = []
    grid = RefusingGrid([1, 2, 3], [2], "left out")
    with recorded_rounds(events.append) as recorder:
        record(grid, recorder, GridTime())  # like the ServerApp of `launch`
        FedBuff(3, 3).start(grid, initial(), num_rounds=3)
    replies = [event for event in events if event["event"] == "reply"]
    failed = [(event["node"], event["error"]) for event in replies if event["error"]]
    assert set(failed) == {(2, "the message could not be sent")}
    finished = [event for event in events if event["event"] == "round_finished"]
    assert [event["round"] for event in finished] == [1, 2, 3]
    assert sum(event["messages"] for event in finished) == len(replies)
    assert sum(event["failed"] for event in finished) == len(failed)


@pytest.mark.parametrize("form", ["none in its place", "left out"])
def test_a_version_that_no_client_received_ends_the_run(form: str) -> None:
    with pytest.raises(ClientsFailedError, match="model of round 1: the grid took none of its 3 messages"):
        FedBuff(2, 3).start(RefusingGrid([1, 2, 3], [1, 2, 3], form), initial(), num_rounds=3)


class LimitedGrid(AsynchronousGrid):
    """A grid with its own clock. The silent nodes never reply."""

    def __init__(self, nodes: Iterable[int], silent: Iterable[int], times: Iterable[float]) -> None:
        super().__init__(nodes)
        self._silent = set(silent)
        self._times = itertools.chain(times, itertools.repeat(1e9))

    def clock(self) -> float:
        return next(self._times)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = [id_ for id_ in message_ids if self._waiting[id_].metadata.dst_node_id not in self._silent]
        return super().pull_messages(ids)


def test_the_timeout_of_a_message_follows_the_clock_of_the_grid(caplog: pytest.LogCaptureFixture) -> None:
    """That clock may stand still, for example while a simulation waits for leases."""
    grid = LimitedGrid([1, 2], silent=[2], times=[7.0] * 50)
    FedBuff(1, 2).start(grid, initial(), num_rounds=3, timeout=5.0)
    assert "no reply within" not in caplog.text and grid.busy.count(2) == 1

    late = LimitedGrid([1, 2], silent=[1, 2], times=[7.0] * 50 + [12.0])
    with pytest.raises(ClientsFailedError, match=r"no client has sent an update .*no reply within 5 s"):
        FedBuff(1, 2).start(late, initial(), num_rounds=1, timeout=5.0)


def assert_same(actual: ArrayRecord, expected: ArrayRecord) -> None:
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].numpy().tobytes() == array.numpy().tobytes(), name


class WatchedGrid(AsynchronousGrid):
    """A grid that records the model files of the checkpoint after each round."""

    def __init__(self, nodes: Iterable[int], folder: Path) -> None:
        super().__init__(nodes)
        self._folder = folder
        self.model_files: list[dict[str, int]] = []

    def resumed(self) -> None:
        return None

    def finished_round(self, state: RoundState) -> None:
        files = {path.name: path.stat().st_size for path in self._folder.glob("*.model")}
        self.model_files.append(files)


def test_a_checkpoint_writes_each_version_once(tmp_path: Path) -> None:
    """The file is deleted when no message in flight needs that version, also in a resumed run."""
    first = ArrayRecord({"w": Array(np.zeros((100, 100), np.float32))})
    sent = 40_000
    for rounds in (6, 12):
        grid = WatchedGrid(range(1, 9), tmp_path)
        result = resumable(FedBuff(1, 6), tmp_path).start(grid, first, num_rounds=rounds)
        assert list(result.train_metrics_clientapp) == list(range(1, rounds + 1))
        for previous, after in itertools.pairwise(grid.model_files):
            assert all(sent < size < 1.2 * sent for size in after.values())
            assert len(after.keys() - previous.keys()) <= 1
            assert len(after) <= 6 + 1
    assert len(grid.model_files) == 6 and grid.model_files[0], "the run was resumed"
