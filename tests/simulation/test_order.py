"""The longest message of a round goes out first: what is expected of messages, and what follows from that."""

from __future__ import annotations

import itertools
import json
import math
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp import Grid, ServerApp
from grid_handlers import RUN_ID, GridUnderTest, until
from hypothesis import given, settings
from hypothesis import strategies as st

import flower_gpu
from flower_gpu.errors import ConfigError
from flower_gpu.simulation import grid as grid_module
from flower_gpu.simulation.duration_file import DurationFile, Known
from flower_gpu.simulation.durations import CPU, Durations, Figures, device_text, fit
from flower_gpu.simulation.run import _identity, simulate

pytestmark = pytest.mark.timeout(120)

SECONDS = st.floats(0.001, 1e4)
EXAMPLES = st.integers(0, 10**6)
CLIENTS = st.integers(0, 12)


# What is expected


@given(st.lists(st.tuples(EXAMPLES, SECONDS), min_size=1))
def test_a_line_is_never_below_zero_and_never_falls(points: list[tuple[int, float]]) -> None:
    line = fit(points)
    assert line is not None
    assert line.start_s >= 0 and line.per_example_s >= 0
    # With least squares the mean is on the line, unless a part of it would have to be below zero.
    error = sum((y - line.seconds(x)) ** 2 for x, y in points)
    mean = math.fsum(y for _, y in points) / len(points)
    proportion = sum(x * y for x, y in points) / (sum(x * x for x, _ in points) or 1)
    assert (
        error <= sum((y - mean) ** 2 for _, y in points) * (1 + 1e-6) + 1e-6
        or len({x for x, _ in points}) == 1
    )
    assert error <= sum((y - proportion * x) ** 2 for x, y in points) * (1 + 1e-6) + 1e-6


@given(st.floats(0, 100), st.floats(0.001, 1), st.sets(st.integers(0, 10_000), min_size=2), st.randoms())
def test_points_of_a_line_give_the_line(
    start_s: float, per_example_s: float, xs: set[int], order: Any
) -> None:
    points = [(float(x), start_s + per_example_s * x) for x in xs]
    order.shuffle(points)
    line = fit(points)
    assert line is not None
    for x, y in points:
        assert line.seconds(x) == pytest.approx(y, rel=1e-6, abs=1e-6)


def test_lines_through_few_points() -> None:
    assert fit([]) is None
    assert fit([(10, 5.0)]) == fit([(10, 4.0), (10, 6.0)])
    line = fit([(10, 5.0)])
    assert line is not None and line.seconds(20) == 10  # of one size only: in proportion
    line = fit([(0, 5.0), (0, 7.0)])
    assert line is not None and line.seconds(20) == 6


@given(
    st.dictionaries(CLIENTS, SECONDS),
    st.lists(st.tuples(CLIENTS, SECONDS, st.booleans())),
)
def test_sums_are_those_of_all_clients(
    before: dict[int, float], calls: list[tuple[int, float, bool]]
) -> None:
    figures = Figures(before)
    for client, seconds, is_usual in calls:
        figures.learn(client, seconds, is_usual=is_usual)
    found = figures.all()
    assert len(figures) == len(found)
    assert all(figures.get(client) == pytest.approx(seconds) for client, seconds in found.items())
    assert figures.mean_s == pytest.approx(math.fsum(found.values()) / len(found) if found else 0.0, rel=1e-6)
    lowest = min([*before.values(), *(seconds for _, seconds, _ in calls)], default=0.0)
    assert all(seconds > 0 for seconds in found.values()) and (not found or lowest > 0)


@given(st.dictionaries(CLIENTS, SECONDS, min_size=2), st.floats(0.1, 100))
def test_figures_of_a_run_that_trained_longer_are_scaled(before: dict[int, float], factor: float) -> None:
    """Else those that were called in this run would all be taken for longer than the others."""
    figures = Figures(before)
    first = next(iter(before))
    figures.learn(first, before[first] * factor)
    for client, seconds in before.items():
        assert figures.get(client) == pytest.approx(seconds * factor, rel=1e-6)


def test_what_is_expected_of_a_client() -> None:
    durations = Durations()
    assert durations.is_empty and durations.expected_s([("train", 1), ("train", None)]) == [0, 0]
    durations.learn("query", 1, 0.1, examples=10)
    durations.learn("query", 3, 0.1, examples=30)
    # No call of this kind is done: the number of examples tells the order.
    assert durations.expected_s([("train", 1), ("train", 3), ("train", 4)]) == [10, 30, 20]
    durations.learn("train", 1, 2.0)
    durations.learn("train", 2, 7.0)
    expected = durations.expected_s([("train", number) for number in (1, 2, 3, 4)])
    assert expected == [2.0, 7.0, pytest.approx(6.0), pytest.approx(4.5)]
    durations.learn("train", 1, 4.0)
    assert durations.expected_s([("train", 1)]) == [3.0]  # the last calls count most
    durations.learn("train", 1, 100.0, is_usual=False)
    durations.learn("train", 5, 100.0, is_usual=False)
    assert durations.expected_s([("train", 1), ("train", 5)]) == [3.0, 100.0]


def test_the_estimate_is_for_each_model_of_gpu() -> None:
    fast, slow = "NVIDIA H100", "NVIDIA T4"
    durations = Durations([fast, slow])
    durations.learn("train", 0, 10.0, slow, examples=100)  # on the fast one this would be the shortest
    durations.learn("train", 1, 4.0, fast, examples=400)
    durations.learn("train", 2, 2.0, fast, examples=200)
    durations.learn("train", 3, 30.0, slow, examples=300)
    expected = durations.expected_s([("train", number) for number in range(4)])
    assert sorted(range(4), key=lambda number: -expected[number]) == [1, 3, 2, 0]
    # On each model a line through its own calls.
    assert expected == [pytest.approx((a + b) / 2) for a, b in [(1, 10), (4, 40), (2, 20), (3, 30)]]
    only_fast = Durations([fast])
    for client, seconds, device in [(0, 10.0, slow), (1, 20.0, slow), (2, 4.0, fast)]:
        only_fast.learn("train", client, seconds, device)
    # No numbers of examples: the other GPU's seconds, by what the two take on the average.
    assert only_fast.expected_s([("train", 0), ("train", 1)]) == [10 * 4 / 15, 20 * 4 / 15]
    assert device_text([slow]) == slow and device_text([slow, fast, slow]) == "NVIDIA H100, 2 x NVIDIA T4"


# What follows for a round


def round_s(seconds: Sequence[float], workers: int) -> float:
    """Return how long calls take in this order, each with the first worker that is free."""
    free = [0.0] * workers
    for one in seconds:
        first = free.index(min(free))
        free[first] += one
    return max(free)


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_a_round_takes_at_most_a_third_longer_than_the_best(seconds: list[float], workers: int) -> None:
    """Graham's bound, by all assignments of calls to workers."""
    durations = Durations()
    for client, one in enumerate(seconds):
        durations.learn("train", client, one)
    expected = durations.expected_s([("train", client) for client in range(len(seconds))])
    order = sorted(range(len(seconds)), key=lambda client: -expected[client])
    found = round_s([seconds[client] for client in order], workers)
    best = math.inf
    for choice in itertools.product(range(workers), repeat=len(seconds)):
        loads = [0.0] * workers
        for one, worker in zip(seconds, choice, strict=True):
            loads[worker] += one
        best = min(best, max(loads))
    assert best <= found * (1 + 1e-9) and found <= (4 / 3 - 1 / (3 * workers)) * best * (1 + 1e-9)


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
            list(one.grid.stream(sent, in_order=True))
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


def test_a_stream_that_is_read_slowly_ends(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2, 30, {client: float(client) for client in range(0, 30, 2)})
    stream = one.grid.stream(one.messages(30))
    for number in range(1, 31):
        next(stream)
        assert until(lambda: one.handling.running == 0)
        assert len(one.handling.begun) <= number + 2 * 2
    assert list(stream) == []


# What is kept


NUMBERS = st.dictionaries(st.integers(0, 50), st.floats(0, 1e9), max_size=5)
KNOWN = st.builds(
    Known,
    st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3),
    st.dictionaries(
        st.text(max_size=5), st.dictionaries(st.text(max_size=5), NUMBERS, max_size=2), max_size=3
    ),
)


@settings(max_examples=30)
@given(KNOWN, KNOWN)
def test_runs_add_to_what_others_have_learned(
    tmp_path_factory: pytest.TempPathFactory, first: Known, second: Known
) -> None:
    file = DurationFile("app", 4, tmp_path_factory.getbasetemp())
    file.path.unlink(missing_ok=True)
    file.write(first)
    file.write(second)
    found = file.read()
    for ours, read in ((second.examples, found.examples), *_pairs(second, found)):
        for name, numbers in ours.items():
            for client, number in numbers.items():
                assert read[name][client] == pytest.approx(number, rel=1e-3)
    for kind, numbers in first.examples.items():
        assert set(numbers) <= set(found.examples[kind])


def _pairs(one: Known, other: Known) -> Iterator[tuple[Any, Any]]:
    for kind, devices in one.seconds.items():
        yield devices, other.seconds[kind]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ANY_FILE = st.binary(max_size=40) | st.builds(
    lambda examples, seconds: json.dumps({"v": 1, "examples": examples, "seconds": seconds}).encode(),
    JSON,
    JSON,
)


@given(ANY_FILE)
def test_a_file_that_is_none_of_ours_is_learned_anew(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = DurationFile("torn", 4, tmp_path_factory.getbasetemp())
    file.path.write_bytes(content)
    durations = Durations(file=file)
    durations.learn("train", 3, 2.5)
    durations.save()
    assert Durations(file=file).expected_s([("train", 3)]) == [2.5]


def test_files_are_this_users_and_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "durations"
    monkeypatch.setattr("flower_gpu.simulation.duration_file._MOST_FILES", 2)
    for number in range(4):
        DurationFile("app", 4 + number, folder).write(Known({"train": {0: float(number)}}))
        time.sleep(0.01)  # so that they differ in their time
    assert DurationFile("app", 7, folder).read().examples == {"train": {0: 3.0}}
    assert DurationFile("app", 4, folder).read() == Known()
    assert len(list(folder.glob("*.json"))) == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(DurationFile("app", 7, folder).path.stat().st_mode) == 0o600


def test_what_cannot_be_kept_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "durations").write_text("in the way")
    durations = Durations(file=DurationFile("app", 4, tmp_path / "durations"))
    durations.save()  # nothing was learned
    durations.learn("train", 3, 2.5)
    with pytest.warns(RuntimeWarning, match="cannot be kept in"):
        durations.save()


# Whole runs, whose clients are in this process


class Noting:
    """An app that notes who was asked, in which order."""

    def __init__(self, strategy: str) -> None:
        self.handled: list[tuple[int, int]] = []  # threads and clients
        client = ClientApp() if strategy != "legacy" else ClientApp(client_fn=self._client)
        server = ServerApp() if strategy != "legacy" else ServerApp(server_fn=self._server)
        if strategy != "legacy":
            client.train()(self._train)
            server.main()(self._main)
        self.app = server, client
        self._strategy = strategy

    def _main(self, grid: Grid, context: Context) -> None:
        model = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
        flower_gpu.FedAvg(exact_order=self._strategy == "exact order").start(grid, model, num_rounds=1)

    def _note(self, context: Context) -> int:
        client = int(context.node_config["partition-id"])
        self.handled.append((threading.get_ident(), client))
        return client

    def _train(self, message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10 * (1 + self._note(context))})
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message
        )

    def _server(self, context: Context) -> ServerAppComponents:
        model = ndarrays_to_parameters([np.zeros(2, np.float32)])
        strategy = LegacyFedAvg(fraction_evaluate=0.0, initial_parameters=model)
        return ServerAppComponents(config=ServerConfig(num_rounds=1), strategy=strategy)

    def _client(self, context: Context) -> Any:
        note = self._note

        class Fitting(NumPyClient):
            def fit(self, parameters: Any, config: Any) -> Any:
                return parameters, 10 * (1 + note(context)), {}

        return Fitting().to_client()


COUNT = 12
TAKES_S = {client: float(1 + client * 7 % COUNT) for client in range(COUNT)}


def test_durations_that_another_account_could_have_written_are_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    file = DurationFile("app", 4)
    file.write(Known({"train": {0: 3.0}}))
    assert file.read().examples
    file.path.parent.parent.chmod(0o777)
    assert file.read() == Known()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DurationFile:
    """What earlier runs have learned of apps without a folder."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(grid_module, "_GATHER_S", 60.0)
    file = DurationFile("app", COUNT)
    file.write(Known({}, {"train": {CPU: TAKES_S}}))
    return file


@pytest.mark.parametrize(
    ("strategy", "order"),
    [("streamed", "longest"), ("streamed", "sent"), ("exact order", "longest"), ("legacy", "longest")],
)
def test_a_run_sends_the_longest_first(strategy: str, order: str, known: DurationFile) -> None:
    noting = Noting(strategy)
    options: dict[str, Any] = {"max_workers": 2, "start_method": "in-process", "gpu": "never"}
    simulate(noting.app, COUNT, order=order, log_dir=None, progress=False, seed=1, **options)
    assert sorted(client for _, client in noting.handled) == list(range(COUNT))
    # Two threads take messages in turn, and one of them may be held up: each has its own in order.
    threads = {thread for thread, _ in noting.handled}
    of_threads = [[TAKES_S[client] for who, client in noting.handled if who == thread] for thread in threads]
    is_longest_first = all(seconds == sorted(seconds, reverse=True) for seconds in of_threads)
    assert is_longest_first == (order == "longest" and strategy != "exact order"), of_threads
    # And it has learned what its calls take, which is less.
    found = known.read()
    assert found.seconds["train"][CPU].keys() == TAKES_S.keys()
    assert max(found.seconds["train"][CPU].values()) < min(TAKES_S.values())
    assert found.examples["train"] == {client: 10 * (1 + client) for client in range(COUNT)}


def test_an_order_that_is_none() -> None:
    with pytest.raises(ConfigError, match="order='shortest' is not one of longest, sent"):
        simulate(Noting("streamed").app, 2, order="shortest")
