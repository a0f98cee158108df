"""A grid of several hosts in threads of this process: which host handles a message, and how often."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_programs
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.run import Run
from grid_handlers import NoWorkers
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from shared_servers import SHARED_STATE
from waiting import until

from flower_gpu import FedAvg
from flower_gpu.errors import ConfigError, InvalidResultError, WorkerDiedError
from flower_gpu.flower import record_bytes
from flower_gpu.flower.arrays import view_of
from flower_gpu.simulation import determinism, dispatcher
from flower_gpu.simulation import run as runs
from flower_gpu.simulation.cluster import hosts as cluster_hosts
from flower_gpu.simulation.cluster.agent import News
from flower_gpu.simulation.cluster.hosts import HostLostError
from flower_gpu.simulation.cluster.models import FetchedModels, SentModels
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import AssignedMessage, HostInfo, HostReport, MessageOutcome, failed
from flower_gpu.simulation.local_host import QueueHost
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.strategies.resuming.states import StateStore
from flower_gpu.strategies.streaming import ComingReplies
from flower_gpu.trace import Event

RUN_ID, SEED = 5, 7


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    # Parse the headers once before threads start: Python 3.11 cannot always parse them in several threads.
    # Real hosts run in separate processes, so they are not affected.
    for shape in ((3, 4), (3,), (5, 7)):
        for array in ArrayRecord([np.zeros(shape, np.float32)]).values():
            view_of(array)
    with runs._identity(RUN_ID):
        yield


def records(states: StateStore, place: int) -> RecordDict:
    data = states.read(place)
    return record_bytes.decode(data) if data else RecordDict()


def client(message: Message, state: RecordDict) -> Message:
    """Train: the reply depends on the model, the node and its state. The state counts the calls."""
    calls = int(state.get("calls", {"count": 0})["count"]) + 1
    state["calls"] = MetricRecord({"count": calls})
    numbers = np.random.default_rng(message.metadata.dst_node_id % 1000 + calls)
    (weights,) = (view_of(array) for array in message.content["arrays"].values())
    arrays = [weights + numbers.normal(size=weights.shape).astype(np.float32)]
    metrics = MetricRecord({"num-examples": int(numbers.integers(1, 50)), "calls": calls})
    if message.metadata.group_id == "error":
        raise ValueError("of the app")
    if message.metadata.group_id == "misfit" and message.metadata.dst_node_id % 5 == 0:
        arrays = [np.zeros((5, 7), np.float32)]
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


class InThread(QueueHost):
    """A host whose agent is in this process. Everything that is sent or returned is pickled."""

    def __init__(self, name: str, concurrency: int, dies_at: int | None = None, dies_of: int = 0) -> None:
        super().__init__(HostInfo(name, concurrency, 1, {}, 1, []))
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.cancelled: set[str] = set()
        self.when_lost: Callable[[InThread], object] = lambda host: None
        self._left, self.dies_of = dies_at, dies_of
        self.says_full = False
        self._is_dead = False
        self._nodes = VirtualNodes(1, SEED, RUN_ID, {})
        self._dying = threading.Lock()
        self.models = SentModels(pickle.dumps), FetchedModels(pickle.loads)
        self.faults: list[BaseException] = []
        self.start(Client(self), concurrency)

    def live(self) -> None:
        """Die after a number of calls of any kind."""
        with self._dying:
            if self._left is not None:
                self._left -= 1
                self._is_dead = self._is_dead or self._left < 0
        if self._is_dead:
            raise HostLostError(f"{self.name} died")

    def die(self) -> None:
        self._is_dead = True
        self.live()

    def submit(self, visits: Sequence[AssignedMessage]) -> None:
        there, here = self.models
        packed = pickle.loads(pickle.dumps([there.packed(visit) for visit in visits]))
        here.receive(packed, super().submit, self.faults.append)

    def exchange(self, visits: Sequence[AssignedMessage]) -> HostReport:
        self.live()
        # This call submits the visits.
        answers = super().exchange(visits)
        assert not self.faults
        self.live()
        return pickle.loads(pickle.dumps(replace(answers, is_full=self.says_full)))

    def lost(self, error: Exception, left: int) -> None:
        self.when_lost(self)


class Client(NoWorkers):
    """Handles the messages of a host."""

    def __init__(self, host: InThread) -> None:
        self._host = host

    def __call__(self, visit: AssignedMessage) -> list[MessageOutcome]:
        host = self._host
        try:
            host.live()
            if visit.message.metadata.dst_node_id == host.dies_of:
                host.die()
            host.begun.set()
            until(lambda: host.gate.is_set() or visit.message_id in host.cancelled)
            if visit.message_id in host.cancelled:
                raise WorkerDiedError("it was cancelled")
            state = record_bytes.decode(visit.state) if visit.state else RecordDict()
            reply = client(visit.message, state)
            return [MessageOutcome(visit.message_id, reply, record_bytes.encode(state), call_s=0.0)]
        except Exception as error:
            return [MessageOutcome(visit.message_id, failed(visit.message, error))]

    def cancel(self, message_id: str) -> None:
        self._host.cancelled.add(message_id)

    def cancel_all(self) -> None:
        self._host.gate.set()


class SafeHost(InThread):
    """A host that cannot be lost, like the driver's machine."""

    can_be_lost = False


class Under:
    """A grid under test, with the states of its nodes. Each host that dies is replaced by another host."""

    def __init__(self, nodes: int, *hosts: InThread, is_followed: bool = True, **options: Any) -> None:
        self.states = StateStore()
        self.nodes = VirtualNodes(nodes, SEED, RUN_ID, {})
        self.dispatcher = Dispatcher(self.nodes, self.states, SEED, Durations())
        self.grid = SimulationGrid(Run.create_empty(RUN_ID), self.dispatcher, **options)
        self.hosts: list[InThread] = []
        self._is_followed = is_followed
        for host in hosts:
            self.join(host)

    def join(self, host: InThread) -> None:
        host.when_lost = self._follow
        self.hosts.append(host)
        self.dispatcher.joined(host)

    def _follow(self, host: InThread) -> None:
        if self._is_followed:
            self.join(InThread(f"{host.name}'", host.info.concurrency, dies_of=host.dies_of))

    def close(self) -> None:
        self.grid.close()
        for host in self.hosts:
            host.close()
        self.dispatcher.wait()

    def messages(self, arrays: ArrayRecord, chosen: list[int], group: str = "1") -> list[Message]:
        content = RecordDict({"arrays": arrays})
        return [Message(content, self.nodes.ids[place], "train", group_id=group) for place in chosen]

    def train(
        self, chosen: list[int], *, in_order: bool, rounds: int = 1, group: str = "1"
    ) -> tuple[list[np.ndarray], list[Any]]:
        """Return the model and the metrics after a few rounds."""
        arrays, metrics = ArrayRecord([np.zeros((3, 4), np.float32)]), []
        for _ in range(rounds):
            sums = partial(self.grid.sums, self.messages(arrays, chosen, group), None)
            new, averages = FedAvg(exact_order=in_order).aggregate_train(1, ComingReplies((), sums))
            assert new is not None and averages is not None
            arrays = new
            metrics.append(dict(averages))
        return arrays.to_numpy_ndarrays(), metrics

    def replies(
        self, count: int, *, in_order: bool, timeout: float | None = None, group: str = "1"
    ) -> list[Message]:
        """Return the replies of the first nodes that are not part of a sum."""
        messages = self.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(count)), group)
        return self.rest(messages, in_order=in_order, timeout=timeout)

    def rest(self, messages: list[Message], *, in_order: bool, timeout: float | None = None) -> list[Message]:
        sums = self.grid.sums(messages, timeout, "num-examples", True, in_order)
        return [item for item in sums if isinstance(item, Message)]

    def calls(self) -> list[int]:
        """Return the number of calls in each node's state."""
        return [
            int(records(self.states, place).get("calls", {"count": 0})["count"])
            for place in range(len(self.nodes.ids))
        ]


@contextmanager
def under(nodes: int, *hosts: InThread, **options: Any) -> Iterator[Under]:
    test = Under(nodes, *hosts, **options)
    try:
        yield test
    finally:
        test.close()


# Number of calls after which each of four hosts dies. At most two die, because a message that was on three
# lost hosts becomes an error.
DEATHS = st.tuples(st.integers(0, 150), st.none() | st.integers(0, 150)).flatmap(
    lambda calls: st.permutations([*calls, None, None])
)


def mortal(sizes: list[int], deaths: list[int | None]) -> list[InThread]:
    return [InThread(f"h{n}", size, dies) for n, (size, dies) in enumerate(zip(sizes, deaths, strict=False))]


@given(
    chosen=st.sets(st.integers(0, 69), min_size=2, max_size=70),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    deaths=DEATHS,
    rounds=st.integers(1, 2),
)
@settings(max_examples=examples(40))
def test_sums_in_order_are_bit_identical_to_those_of_a_single_machine(
    chosen: set[int], sizes: list[int], deaths: list[int | None], rounds: int
) -> None:
    places = sorted(chosen, key=lambda place: hash((place, rounds)))
    with under(70, SafeHost("here", 2)) as alone:
        expected = alone.train(places, in_order=True, rounds=rounds)
        expected_calls = alone.calls()
    with under(70, *mortal(sizes, deaths)) as test:
        result = test.train(places, in_order=True, rounds=rounds)
        assert result[0][0].tobytes() == expected[0][0].tobytes() and result[1] == expected[1]
        assert test.calls() == expected_calls, "each client's state advances by one call in each round"


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    deaths=DEATHS,
)
@settings(max_examples=examples(40))
def test_in_any_order_each_reply_counts_once(sizes: list[int], deaths: list[int | None]) -> None:
    chosen = list(range(0, 60, 2))
    with under(60, SafeHost("here", 2)) as alone:
        ((expected,), metrics), expected_calls = alone.train(chosen, in_order=True, rounds=2), alone.calls()
    with under(60, *mortal(sizes, deaths)) as test:
        (arrays,), averages = test.train(chosen, in_order=False, rounds=2)
        np.testing.assert_allclose(arrays, expected, rtol=1e-5, atol=1e-6)
        assert [entry["calls"] for entry in averages] == pytest.approx([entry["calls"] for entry in metrics])
        assert test.calls() == expected_calls
        assert all(not host._sums for host in test.hosts if not host.is_gone)


def test_replies_that_are_not_summed_are_unchanged() -> None:
    with under(20, InThread("a", 2, dies_at=9), InThread("b", 1)) as test:
        messages = test.messages(ArrayRecord([np.ones(3, np.float32)]), list(range(20)))
        replies = list(test.grid.send_and_receive(messages))
        assert [reply.metadata.src_node_id for reply in replies] == list(test.nodes.ids)
        assert test.calls() == [1] * 20


@pytest.mark.parametrize("in_order", [False, True])
def test_a_message_that_was_on_three_lost_hosts_is_an_error(in_order: bool) -> None:
    victim = VirtualNodes(20, SEED, RUN_ID, {}).ids[4]
    with under(20, InThread("a", 2, dies_of=victim), InThread("b", 2, dies_of=victim)) as test:
        rest = test.replies(20, in_order=in_order)
        (error,) = [reply for reply in rest if reply.has_error()]
        assert len(rest) == 20 and error.metadata.src_node_id == victim
        assert "3 hosts were lost while they handled a message to client 4" in error.error.reason
        assert test.calls() == [1] * 4 + [0] + [1] * 15


@pytest.mark.parametrize("in_order", [False, True])
def test_the_run_ends_when_no_host_remains(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_NO_HOST_S", 0.1)
    with under(20, InThread("a", 2, dies_at=5), is_followed=False) as test:
        rest = test.replies(20, in_order=in_order)
        assert len(rest) == 20
        assert {str(reply.error.ends_run) for reply in rest if reply.has_error()} == {
            "the cluster has had no host for 0 s"
        }


def test_a_full_host_gets_nothing_until_it_has_room() -> None:
    full, other = InThread("full", 4), InThread("other", 1)
    full.says_full = full.is_full = True
    with under(10, full, other) as test:
        test.train(list(range(10)), in_order=False)
        assert (full.messages, other.messages) == (0, 10)
        full.says_full, other.says_full = False, True
        until(lambda: other.is_full)
        test.train(list(range(10)), in_order=False)
        assert (full.messages, other.messages) == (10, 10)


def test_a_host_that_becomes_full_returns_messages_that_it_has_not_started() -> None:
    full, other = InThread("full", 1), InThread("other", 1)
    full.call_s = {"train": 0.01}
    # Short calls make the grid send messages ahead.
    other.call_s = {"train": 0.01}
    full.gate.clear()
    with under(40, full, other) as test:
        thread = threading.Thread(
            target=test.train, args=[list(range(40))], kwargs={"in_order": False}, daemon=True
        )
        thread.start()
        until(lambda: full.begun.is_set() and full._waiting)
        full.says_full = True
        # The agent does this when a message waits for a lease.
        full.return_queued()
        until(lambda: full.is_full and full.in_flight == 1)
        full.gate.set()
        thread.join(60)
        assert test.calls() == [1] * 40 and full.messages == 1


def test_long_messages_are_not_sent_ahead_after_short_ones() -> None:
    host = InThread("a", 1)
    with under(20, host) as test:
        test.train(list(range(20)), in_order=False)
        # This makes the calls short however busy this machine is.
        host.call_s["train"] = 0.01
        host.gate.clear()
        messages = [
            Message(message.content, message.metadata.dst_node_id, "query", group_id="1")
            for message in test.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(20)))
        ]
        ids = list(test.grid.push_messages(messages))
        until(lambda: host.in_flight)
        # More messages would arrive during this pause.
        time.sleep(0.2)
        assert host.in_flight == 1
        host.gate.set()
        replies: list[Message] = []
        until(lambda: replies.extend(test.grid.pull_messages(ids[len(replies) :])) or len(replies) == 20)


@pytest.mark.parametrize("mode", ["summed", "summed in order", "each reply"])
def test_an_expired_message_is_an_error(mode: str) -> None:
    host = InThread("a", 1)
    with under(20, host) as test:
        content = RecordDict({"arrays": ArrayRecord([np.zeros(3, np.float32)])})
        messages = [Message(content, node, "train", ttl=2.0, group_id="1") for node in test.nodes.ids[:4]]
        host.gate.clear()
        if mode == "each reply":
            replies = list(test.grid.send_and_receive(messages))
        else:
            replies = test.rest(messages, in_order="order" in mode)
        host.gate.set()
        assert [reply.error.code for reply in replies] == [ErrorCode.MESSAGE_UNAVAILABLE] * 4
        assert len(host.cancelled) == 1, "the others have not begun"
        until(lambda: not host.in_flight)
        # The host continues, and the expired messages are not in its sums.
        test.train(list(range(20)), in_order="order" in mode)
        assert test.calls() == [1] * 20


@pytest.mark.parametrize("method", ["take", "exchange"])
def test_a_faulty_host_is_lost_and_the_run_goes_on(method: str) -> None:
    faulty = InThread("faulty", 1)

    def fails(visits: Sequence[AssignedMessage]) -> HostReport:
        raise MemoryError("no room in the object store")

    setattr(faulty, method, fails)
    with under(20, faulty) as test:
        assert test.replies(20, in_order=False) and test.calls() == [1] * 20


def test_a_state_that_cannot_be_kept_is_an_error_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with under(4, InThread("a", 2)) as test:
        put = test.states.put

        def fails(partition: int, state: bytes) -> None:
            if partition == 2:
                raise OSError("no space left on device")
            put(partition, state)

        monkeypatch.setattr(test.states, "put", fails)
        messages = test.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(4)))
        replies = list(test.grid.send_and_receive(messages))
        assert [reply.has_error() for reply in replies] == [False, False, True, False]
        assert "no space left" in replies[2].error.reason


def test_cancelled_messages_are_not_sent() -> None:
    host = InThread("a", 1)
    host.gate.clear()
    with under(20, host) as test:
        sent = test.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(20)))
        assert not list(test.grid.send_and_receive(sent, timeout=0.3))
        host.gate.set()
        until(lambda: not host.in_flight)
        test.train([3], in_order=False)
        assert sum(test.calls()) == 1, "no call of the first messages was counted"
        used_dispatcher = test.dispatcher
        assert not used_dispatcher._seed_of and not used_dispatcher._losses and not used_dispatcher._jobs


def test_messages_that_share_hosts_with_a_deadly_message_do_not_fail() -> None:
    """They were on the same three lost hosts."""
    victim = VirtualNodes(30, SEED, RUN_ID, {}).ids[7]
    with under(30, InThread("a", 30, dies_of=victim)) as test:
        rest = test.replies(30, in_order=False)
        assert [reply.metadata.src_node_id for reply in rest if reply.has_error()] == [victim]


@pytest.mark.parametrize("in_order", [False, True])
def test_replies_of_different_shapes_are_an_error(in_order: bool) -> None:
    with under(40, InThread("a", 2), InThread("b", 2)) as test:
        with pytest.raises(InvalidResultError, match="do all clients train the same model"):
            test.train(list(range(40)), in_order=in_order, group="misfit")
        assert sum(test.calls()) <= 40
        # The grid still works.
        test.train([1], in_order=in_order)


def test_clients_that_fail_are_counted() -> None:
    with under(6, InThread("a", 2), InThread("b", 2)) as test:
        rest = test.replies(6, in_order=True, group="error")
        assert [reply.has_error() for reply in rest] == [True] * 6
        assert test.calls() == [0] * 6
        assert sum(host.failed for host in test.hosts) == 6


def test_the_model_of_a_round_is_sent_to_each_host_once() -> None:
    put: list[ArrayRecord] = []
    got: list[str] = []
    sent = SentModels(lambda record: put.append(record) or pickle.dumps(record))
    hosts = [InThread("a", 2), InThread("b", 2)]
    for host in hosts:
        get = FetchedModels(lambda where, name=host.name: got.append(name) or pickle.loads(where))
        host.models = sent, get
    with under(30, *hosts) as test:
        test.train(list(range(30)), in_order=False, rounds=3)
    assert len(put) == 3 and max(got.count("a"), got.count("b")) <= 3


@pytest.mark.parametrize(("slow", "handled_ids"), [("model", ["0", "1", "2"]), ("state", ["0", "2"])])
def test_an_agent_answers_while_it_fetches(slow: str, handled_ids: list[str], tmp_path: Path) -> None:
    """An agent's answers show the driver that it is alive, and messages whose data has arrived are handled.

    If a model cannot be fetched, the answer is an error, and the host is lost.
    """
    script = Path(__file__).parent / "slow_agent.py"
    env = {**os.environ, **SHARED_STATE}
    done = run_programs.run([sys.executable, script, tmp_path / "arrived", slow], env=env, timeout_s=100)
    assert done.returncode == 0, done.stderr
    # The app prints lines as well.
    answers = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert answers == ["['2']", str(handled_ids), "['the object is lost']"]


def test_models_are_cached_while_they_take_little_memory() -> None:
    """FedBuff has many versions in flight, and messages with them reach a host in any order."""
    models = [ArrayRecord([np.full(1000, number, np.float32)]) for number in range(30)]
    nodes = VirtualNodes(1, SEED, RUN_ID, {})
    size = sum(len(array.data) for array in models[0].values())
    for kept_bytes, fetched in ((30 * size, 30), (8 * size, 60), (0, 60)):
        put: list[bytes] = []
        got: list[bytes] = []
        sent = SentModels(lambda record, put=put: put.append(b"") or pickle.dumps(record), kept_bytes)
        fetched_models = FetchedModels(
            lambda where, got=got: got.append(where) or pickle.loads(where), kept_bytes
        )
        received: list[AssignedMessage] = []
        for model in [*models, *models]:
            visit = AssignedMessage(Message(RecordDict({"arrays": model}), nodes.ids[0], "train"), 0)
            fetched_models.receive([sent.packed(visit)], received.extend, pytest.fail)
        until(lambda received=received: len(received) == 60, "all visits have arrived")
        assert (len(put), len(got)) == (fetched, fetched)
        # The latest models are kept, however little memory is allowed.
        for model in models[-4:]:
            visit = AssignedMessage(Message(RecordDict({"arrays": model}), nodes.ids[0], "train"), 0)
            fetched_models.receive([sent.packed(visit)], received.extend, pytest.fail)
        until(lambda received=received: len(received) == 64, "all visits have arrived")
        assert (len(put), len(got)) == (fetched, fetched)
        fetched_models.close()


def test_a_model_in_use_is_kept_longer_than_others() -> None:
    models = [ArrayRecord([np.full(1000, number, np.float32)]) for number in range(30)]
    (node,) = VirtualNodes(1, SEED, RUN_ID, {}).ids
    put: list[ArrayRecord] = []
    got: list[bytes] = []
    sent = SentModels(lambda record: put.append(record) or pickle.dumps(record), kept_bytes=0)
    fetched_models = FetchedModels(lambda where: got.append(where) or pickle.loads(where), kept_bytes=0)
    received: list[AssignedMessage] = []
    for model in models:
        for sent_model in (model, models[0]):
            visit = AssignedMessage(Message(RecordDict({"arrays": sent_model}), node, "train"), 0)
            fetched_models.receive([sent.packed(visit)], received.extend, pytest.fail)
    until(lambda: len(received) == 60, "all visits have arrived")
    assert (len(put), len(got)) == (30, 30)
    fetched_models.close()


def test_large_data_is_not_an_argument_of_the_call() -> None:
    """Ray runs the calls of an agent in order, and a call waits for its arguments."""
    arrays = ArrayRecord([np.ones(100_000, np.float32)])
    content = RecordDict({"arrays": arrays, "data": ConfigRecord({"bytes": bytes(200_000), "small": 1})})
    (node,) = VirtualNodes(1, SEED, RUN_ID, {}).ids
    store: list[bytes] = []

    def put(item: Any) -> int:
        store.append(pickle.dumps(item))
        return len(store) - 1

    call = pickle.dumps(
        SentModels(put).packed(AssignedMessage(Message(content, node, "train"), 0, bytes(300_000)))
    )
    assert len(call) < 10_000
    received: list[AssignedMessage] = []
    fetched_models = FetchedModels(lambda place: pickle.loads(store[place]))
    fetched_models.receive([pickle.loads(call)], received.extend, pytest.fail)
    until(lambda: received, "the visit has arrived")
    assert received[0].message.content == content and received[0].state == bytes(300_000)
    fetched_models.close()


def test_a_model_that_cannot_be_fetched_is_a_fault(tmp_path: Path) -> None:
    def get(where: bytes) -> Any:
        raise OSError("the object is lost")

    faults: list[BaseException] = []
    nodes = VirtualNodes(1, SEED, RUN_ID, {})
    visit = AssignedMessage(
        Message(RecordDict({"arrays": ArrayRecord([np.zeros(3)])}), nodes.ids[0], "train"), 0
    )
    FetchedModels(get).receive([SentModels(pickle.dumps).packed(visit)], pytest.fail, faults.append)
    until(lambda: faults, "the fault is reported")
    assert str(faults[0]) == "the object is lost"


def test_an_agent_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes a stopped process for alive, but calls of its methods never end."""
    monkeypatch.setattr(cluster_hosts, "_is_ready", lambda coming, timeout_s=0: coming != "hangs")
    monkeypatch.setattr(cluster_hosts, "_get", lambda coming, timeout_s=None: coming)
    # Ray extends the path, and fork servers are distinguished by it.
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(HostLostError, match="has not answered for 60 s"):
        remote("hangs", exchange=lambda visits: "hangs").exchange([])
    reported: list[Event] = []
    news = News([{"event": "first", "time": 3.0}], [])
    host = remote("here", reported.extend, exchange=lambda visits: (HostReport(is_full=True), news))
    assert host.exchange([]).is_full and reported == [{"event": "first", "time": 1.0, "host": "here"}]


def remote(
    name: str, report: Callable[..., object] = lambda events: None, **methods: Callable[..., Any]
) -> cluster_hosts.RemoteHost:
    """Return a host whose agent has the given methods and a clock two seconds ahead."""
    agent = SimpleNamespace(**{key: SimpleNamespace(remote=method) for key, method in methods.items()})
    about = HostInfo(name, 1, 1, {}, 1, [])
    return cluster_hosts.RemoteHost(about, name, agent, 2.0, SentModels(pickle.dumps), report)


@pytest.mark.parametrize(
    ("change", "is_strict", "text"),
    [
        ({"versions": {"torch": "0.1"}}, False, "host there: torch 0.1 there and .+ Install the same on all"),
        ({"versions": {"flwr": "1.0"}}, False, "host there: flwr 1.0 there and .+"),
        ({"versions": {"numpy": "1.0"}}, True, "host there has other processors, GPUs or versions"),
        (
            {"cpu": "Z80"},
            True,
            "host there has other processors, GPUs or versions .+ --deterministic needs equal hosts",
        ),
    ],
)
def test_a_host_that_is_different_is_named(change: dict[str, Any], is_strict: bool, text: str) -> None:
    hosts = cluster_hosts.RayHosts.__new__(cluster_hosts.RayHosts)
    here = determinism.described([])
    hosts._work = SimpleNamespace(is_strict=is_strict)
    hosts._all = [SimpleNamespace(info=SimpleNamespace(described=here))]
    hosts._check(HostInfo("there", 1, 1, here, 1, []))
    described = {**here, **change, "versions": {**here["versions"], **change.get("versions", {})}}
    with pytest.raises(ConfigError, match=text):
        hosts._check(HostInfo("there", 1, 1, described, 1, []))
