"""The grid of several hosts, with hosts in threads of this process: what is done where, and how often."""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.run import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from flower_gpu import FedAvg
from flower_gpu.errors import ConfigError, InvalidResultError, NotDeterministicError, WorkerDiedError
from flower_gpu.flower import record_bytes, streaming
from flower_gpu.flower.arrays import view_of
from flower_gpu.flower.rounds import replies_to_sum
from flower_gpu.simulation import machine
from flower_gpu.simulation import run as runs
from flower_gpu.simulation.cluster import grid as cluster_grid
from flower_gpu.simulation.cluster import hosts as cluster_hosts
from flower_gpu.simulation.cluster.agent import About, News
from flower_gpu.simulation.cluster.grid import ClusterGrid
from flower_gpu.simulation.cluster.hosts import HostLostError, Listener
from flower_gpu.simulation.cluster.sum_boxes import BlockBox
from flower_gpu.simulation.cluster.visits import FetchedModels, HostSums, Visit, Visited
from flower_gpu.simulation.cluster.work_queue import WorkQueue
from flower_gpu.simulation.grid import SimulationGrid, reply_of
from flower_gpu.simulation.local_grid import LocalGrid
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.states import StateStore

pytestmark = pytest.mark.timeout(120)

RUN_ID, SEED = 5, 7


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    # Once before there are threads: Python 3.11 cannot always parse headers in several threads at a time.
    # Real hosts do that in a process each.
    for shape in ((3, 4), (3,), (5, 7)):
        for array in ArrayRecord([np.zeros(shape, np.float32)]).values():
            view_of(array)
    with runs._identity(RUN_ID):
        yield


def client(message: Message, state: RecordDict) -> Message:
    """Train: what depends on the model, the node and its state. The state counts the calls."""
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


class InThread:
    """A host whose agent is in this process. What goes there and comes back is pickled."""

    def __init__(self, name: str, concurrency: int, dies_at: int | None = None) -> None:
        self.name = name
        self.about = SimpleNamespace(concurrency=concurrency)
        self.is_gone = self.is_full = False
        self.messages = self.failed = 0
        self.pace = 1.0
        self.call_s: dict[str, float] = {}
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self._sums, self._models = HostSums(), FetchedModels(lambda where: pickle.loads(where))
        self._left = dies_at
        self._lock = threading.Lock()
        self.forgotten: list[int] = []
        self.cancelled: set[str] = set()

        self._queue = WorkQueue()
        for _ in range(concurrency):
            threading.Thread(target=self._work, daemon=True).start()

    def _live(self) -> None:
        """Die after so many calls, whatever it is that is called."""
        with self._lock:
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise HostLostError(f"{self.name} died")

    def give(self, visits: list[Visit]) -> None:
        self._queue.give(pickle.loads(pickle.dumps(visits)))

    def exchange(self, visits: list[Visit]) -> list[Visited]:
        self._live()
        self.give(visits)
        return pickle.loads(pickle.dumps(self._queue.fetch(1.0)))

    def _work(self) -> None:
        while (visit := self._queue.next(None)) is not None:
            try:
                self._queue.finish(self.handle(visit))
            except HostLostError as error:
                self._queue.fail(error)

    def handle(self, visit: Visit) -> Visited:
        self._live()
        self.begun.set()
        message = self._models.message(visit)
        message_id = message.metadata.message_id
        state = record_bytes.decode(visit.state) if visit.state else RecordDict()

        def handled(message: Message) -> Message:
            until(lambda: self.gate.is_set() or message_id in self.cancelled)
            if message_id in self.cancelled:
                raise WorkerDiedError("it was cancelled")
            return client(message, state)

        reply = reply_of(handled, message)
        kept = record_bytes.encode(state)
        self._live()
        if visit.group is None:
            return Visited(message_id, reply, kept, call_s=0.0)
        self._sums.add(visit.group, PLACE[message.metadata.dst_node_id], reply, kept)
        return Visited(message_id, call_s=0.0)

    def taking(self, group: int) -> int:
        return group

    def taken(self, group: int) -> Any:
        self._live()
        return pickle.loads(pickle.dumps(self._sums.take(group)))

    def settle(self, group: int) -> None:
        self._sums.settle(group)

    def forget(self, groups: list[int]) -> None:
        self.forgotten += groups
        self._sums.forget(groups)

    def cancel(self, message_id: str) -> None:
        self.cancelled.add(message_id)
        self._queue.cancel(message_id)

    def close(self) -> None:
        self._queue.close()


PLACE: dict[int, int] = {}


class Hosts:
    """The hosts of a grid under test; each that dies is followed by another one."""

    def __init__(self, hosts: list[InThread], *, followed: bool = True) -> None:
        self.there = hosts
        self.all = list(hosts)
        self._followed = followed
        self._lock = threading.Lock()
        self.listener: Listener | None = None

    @property
    def concurrency(self) -> int:
        return sum(host.about.concurrency for host in self.there)

    def lost(self, host: InThread, error: Exception) -> None:
        assert self.listener is not None
        with self._lock:
            if host.is_gone:
                return
            host.is_gone = True
            self.there = [one for one in self.there if one is not host]
        self.listener.on_lost(host)
        if self._followed:
            self.join(InThread(f"{host.name}'", host.about.concurrency))

    def join(self, host: InThread) -> None:
        assert self.listener is not None
        self.there = [*self.there, host]
        self.all.append(host)
        self.listener.on_joined(host)


class DeadlyFor(Hosts):
    """Hosts that die of a message to one node, and so do those that follow them."""

    victim: int

    def __init__(self, sizes: list[tuple[str, int]]) -> None:
        super().__init__([self._deadly(*size) for size in sizes])

    def join(self, host: InThread) -> None:
        super().join(self._deadly(host.name, host.about.concurrency))

    def _deadly(self, name: str, concurrency: int) -> InThread:
        host = InThread(name, concurrency)
        handle = host.handle

        def dies(visit: Visit) -> Visited:
            if visit.message.metadata.dst_node_id == self.victim:
                raise HostLostError(f"{name} died")
            return handle(visit)

        host.handle = dies  # type: ignore[method-assign]
        return host


class Under:
    """A grid under test, with the states of its nodes."""

    def __init__(self, nodes: int, hosts: Hosts | None, **options: Any) -> None:
        self.states = StateStore()
        self._hosts = hosts
        self.nodes = VirtualNodes(nodes, SEED, RUN_ID, {}, self.states)
        PLACE.update({node_id: self.nodes.place_of(node_id) for node_id in self.nodes.ids})
        run = Run.create_empty(RUN_ID)
        self.grid: SimulationGrid
        if hosts is None:
            self.grid = LocalGrid(run, self.nodes, self._Handler(self.nodes), 2, **options)
        else:
            self.grid = ClusterGrid(
                run, self.nodes, hosts, self.states, SEED, lambda record: pickle.dumps(record), **options
            )
            hosts.listener = self.grid.listener()
            for host in hosts.there:
                hosts.listener.on_joined(host)

    def close(self) -> None:
        for host in () if self._hosts is None else self._hosts.all:
            host.close()
        self.grid.close()

    class _Handler:
        def __init__(self, nodes: VirtualNodes) -> None:
            self._nodes = nodes

        def __call__(self, message: Message) -> Message:
            context = self._nodes.context_of(message.metadata.dst_node_id)
            reply = client(message, context.state)
            self._nodes.keep(context)
            return reply

        def idle(self) -> None: ...

        def leave(self) -> None: ...

        def stuck_since(self) -> None: ...

        def cancel(self, message: Message) -> None: ...

    def messages(self, arrays: ArrayRecord, chosen: list[int], group: str = "1") -> list[Message]:
        content = RecordDict({"arrays": arrays})
        return [Message(content, self.nodes.ids[place], "train", group_id=group) for place in chosen]

    def train(
        self, chosen: list[int], *, in_order: bool, rounds: int = 1, group: str = "1"
    ) -> tuple[list[np.ndarray], list[Any]]:
        """Return the model and the metrics after a few rounds."""
        arrays, metrics = ArrayRecord([np.zeros((3, 4), np.float32)]), []
        for _ in range(rounds):
            replies = replies_to_sum(self.grid, self.messages(arrays, chosen, group), None, in_order=in_order)
            new, told = streaming.aggregate(FedAvg(), replies, keeps_integers=True)
            assert new is not None and told is not None
            arrays = new
            metrics.append(dict(told))
        return arrays.to_numpy_ndarrays(), metrics

    def replies(
        self, count: int, *, in_order: bool, timeout: float | None = None, group: str = "1"
    ) -> list[Message]:
        """Return what is left of the replies of the first nodes when they are summed."""
        messages = self.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(count)), group)
        replies: Any = replies_to_sum(self.grid, messages, timeout, in_order=in_order)
        sums = replies.sums("num-examples", keeps_integers=True)
        return [reply for _, part in sums for reply in part.rest]

    def calls(self) -> list[int]:
        """Return how many calls each node's state has."""
        return [
            int(self.states.get(place).get("calls", {"count": 0})["count"])
            for place in range(len(self.nodes.ids))
        ]


@contextmanager
def under(nodes: int, hosts: Hosts | None, **options: Any) -> Iterator[Under]:
    test = Under(nodes, hosts, **options)
    try:
        yield test
    finally:
        test.close()


@given(
    chosen=st.sets(st.integers(0, 69), min_size=2, max_size=70),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    deaths=st.lists(st.none() | st.integers(0, 150), min_size=4, max_size=4),
    rounds=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_in_order_the_bits_are_those_of_one_machine(
    chosen: set[int], sizes: list[int], deaths: list[int | None], rounds: int
) -> None:
    places = sorted(chosen, key=lambda place: hash((place, rounds)))
    with under(70, None) as alone:
        expected = alone.train(places, in_order=True, rounds=rounds)
        counted = alone.calls()
    hosts = Hosts(
        [InThread(f"h{n}", size, dies) for n, (size, dies) in enumerate(zip(sizes, deaths, strict=False))]
    )
    with under(70, hosts) as test:
        found = test.train(places, in_order=True, rounds=rounds)
        assert found[0][0].tobytes() == expected[0][0].tobytes() and found[1] == expected[1]
        assert test.calls() == counted, "each client's state went on by one call in each round"


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    deaths=st.lists(st.none() | st.integers(0, 150), min_size=4, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_in_any_order_each_reply_counts_once(sizes: list[int], deaths: list[int | None]) -> None:
    chosen = list(range(0, 60, 2))
    with under(60, None) as alone:
        ((expected,), metrics), counted = alone.train(chosen, in_order=True, rounds=2), alone.calls()
    hosts = Hosts(
        [InThread(f"h{n}", size, dies) for n, (size, dies) in enumerate(zip(sizes, deaths, strict=False))]
    )
    with under(60, hosts) as test:
        (found,), told = test.train(chosen, in_order=False, rounds=2)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert [one["calls"] for one in told] == pytest.approx([one["calls"] for one in metrics])
        assert test.calls() == counted
        living = [host for host in hosts.all if not host.is_gone]
        assert all(not host._sums._parts and not host._sums._kept for host in living)


def test_replies_that_are_not_summed_come_as_they_are() -> None:
    hosts = Hosts([InThread("a", 2, dies_at=9), InThread("b", 1)])
    with under(20, hosts) as test:
        messages = test.messages(ArrayRecord([np.ones(3, np.float32)]), list(range(20)))
        replies = list(test.grid.send_and_receive(messages))
        assert [reply.metadata.src_node_id for reply in replies] == list(test.nodes.ids)
        assert test.calls() == [1] * 20


@pytest.mark.parametrize("in_order", [False, True])
def test_a_message_that_costs_three_hosts_is_an_error(in_order: bool) -> None:
    with under(20, deadly := DeadlyFor([("a", 2), ("b", 2)])) as test:
        victim = deadly.victim = test.nodes.ids[4]
        rest = test.replies(20, in_order=in_order)
        (error,) = [reply for reply in rest if reply.has_error()]
        assert len(rest) == 20 and error.metadata.src_node_id == victim
        assert "3 hosts were lost while they handled a message to client 4" in error.error.reason
        assert test.calls() == [1] * 4 + [0] + [1] * 15


@pytest.mark.parametrize("in_order", [False, True])
def test_without_hosts_the_run_ends(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_grid, "_NO_HOST_S", 0.1)
    hosts = Hosts([InThread("a", 2, dies_at=5)], followed=False)
    with under(20, hosts) as test:
        rest = test.replies(20, in_order=in_order)
        assert len(rest) == 20
        assert {str(reply.error.ends_run) for reply in rest if reply.has_error()} == {
            "no host of the Ray cluster is left, for 0 s"
        }


@pytest.mark.parametrize("in_order", [False, True])
def test_late_replies_are_given_up(in_order: bool) -> None:
    slow, fast = InThread("slow", 1), InThread("fast", 2)
    slow.gate.clear()
    fast.gate = slow.begun  # else it may do all before the other one has begun
    hosts = Hosts([slow, fast])
    with under(64, hosts) as test:
        rest = test.replies(64, in_order=in_order, timeout=1.0)
        assert 0 < len(rest) < 64
        assert sum(test.calls()) == len(rest)
        slow.gate.set()


def test_a_strict_run_ends_with_late_replies() -> None:
    slow, fast = InThread("slow", 1), InThread("fast", 2)
    slow.gate.clear()
    fast.gate = slow.begun  # else it may do all before the other one has begun
    with under(64, Hosts([slow, fast]), is_strict=True) as test:
        with pytest.raises(NotDeterministicError, match=r"messages were not done within 0\.5 s"):
            test.replies(64, in_order=True, timeout=0.5)
        slow.gate.set()


def test_a_full_host_gets_nothing_until_it_has_room() -> None:
    full, other = InThread("full", 4), InThread("other", 1)
    full.is_full = True
    hosts = Hosts([full, other])
    with under(10, hosts) as test:
        test.train(list(range(10)), in_order=False)
        assert (full.messages, other.messages) == (0, 10)
        hosts.listener.on_full(full, False)
        hosts.listener.on_full(other, True)
        test.train(list(range(10)), in_order=False)
        assert (full.messages, other.messages) == (10, 10)


def test_a_host_that_becomes_full_gives_back_what_it_has_not_begun() -> None:
    full, other = InThread("full", 1), InThread("other", 1)
    full.call_s = other.call_s = {"train": 0.01}  # so messages are sent ahead
    full.gate.clear()
    with under(40, Hosts([full, other])) as test:
        thread = threading.Thread(target=test.train, args=[list(range(40))], kwargs={"in_order": False})
        thread.start()
        until(lambda: full.begun.is_set() and full._queue._waiting)
        full._queue.give_back()  # as its agent does when a message waits for a lease
        until(lambda: full.is_full)
        full.gate.set()
        thread.join(30)
        assert test.calls() == [1] * 40 and full.messages == 1


def test_there_is_one_thread_for_each_host() -> None:
    """Not one for each message: with a thousand under way all of them woke up at each reply."""
    before = set(threading.enumerate())
    hosts = [InThread("a", 0), InThread("b", 0)]
    for host in hosts:
        host.about.concurrency = 500
    with under(10, Hosts(hosts)):
        assert len(set(threading.enumerate()) - before) == 1 + 2


def test_long_messages_are_not_sent_ahead_after_short_ones() -> None:
    host = InThread("a", 1)
    with under(20, Hosts([host])) as test:
        test.train(list(range(20)), in_order=False)
        assert host.call_s["train"] < 0.1
        host.gate.clear()
        messages = [
            Message(message.content, message.metadata.dst_node_id, "query", group_id="1")
            for message in test.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(20)))
        ]
        ids = list(test.grid.push_messages(messages))
        until(lambda: test.grid._under_way[host])
        time.sleep(0.2)  # in which others would come
        assert test.grid._under_way[host] == 1
        host.gate.set()
        replies: list[Message] = []
        until(lambda: replies.extend(test.grid.pull_messages(ids[len(replies) :])) or len(replies) == 20)


@pytest.mark.parametrize("how", ["summed", "summed in order", "each reply"])
def test_what_has_expired_is_an_error(how: str) -> None:
    host = InThread("a", 1)
    with under(20, Hosts([host])) as test:
        content = RecordDict({"arrays": ArrayRecord([np.zeros(3, np.float32)])})
        messages = [Message(content, node, "train", ttl=0.3, group_id="1") for node in test.nodes.ids[:4]]
        host.gate.clear()
        if how == "each reply":
            replies = list(test.grid.send_and_receive(messages))
        else:
            found: Any = replies_to_sum(test.grid, messages, None, in_order="order" in how)
            sums = found.sums("num-examples", keeps_integers=True)
            replies = [reply for _, part in sums for reply in part.rest]
        host.gate.set()
        assert [reply.error.code for reply in replies] == [ErrorCode.MESSAGE_UNAVAILABLE] * 4
        assert len(host.cancelled) == 1, "the others have not begun"
        until(lambda: not test.grid._under_way[host])
        # The host goes on, and what has expired is not in its sums.
        test.train(list(range(20)), in_order="order" in how)
        assert test.calls() == [1] * 20


@pytest.mark.parametrize("method", ["give", "exchange"])
def test_a_host_with_a_fault_is_lost_and_the_run_goes_on(method: str) -> None:
    faulty = InThread("faulty", 1)

    def fails(visits: list[Visit]) -> list[Visited]:
        raise MemoryError("no room in the object store")

    setattr(faulty, method, fails)
    with under(20, Hosts([faulty])) as test:
        assert test.replies(20, in_order=False) and test.calls() == [1] * 20


def test_a_state_that_cannot_be_kept_is_an_error_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with under(4, Hosts([InThread("a", 2)])) as test:
        put_bytes = test.states.put_bytes

        def fails(partition: int, state: bytes) -> None:
            if partition == 2:
                raise OSError("no space left on device")
            put_bytes(partition, state)

        monkeypatch.setattr(test.states, "put_bytes", fails)
        messages = test.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(4)))
        replies = list(test.grid.send_and_receive(messages))
        assert [reply.has_error() for reply in replies] == [False, False, True, False]
        assert "no space left" in replies[2].error.reason


def test_messages_that_nobody_wants_any_more_are_not_sent() -> None:
    host = InThread("a", 1)
    host.gate.clear()
    with under(20, Hosts([host])) as test:
        sent = test.messages(ArrayRecord([np.zeros(3, np.float32)]), list(range(20)))
        assert not list(test.grid.send_and_receive(sent, timeout=0.3))
        host.gate.set()
        until(lambda: not test.grid._under_way[host])
        test.train([3], in_order=False)
        assert sum(test.calls()) == 1, "of the first messages none was counted"
        assert not test.grid._seed_of and not test.grid._losses and not test.grid._jobs


def test_messages_beside_a_deadly_one_have_not_failed() -> None:
    """They were on the same hosts, three times."""
    with under(30, deadly := DeadlyFor([("a", 30)])) as test:
        victim = deadly.victim = test.nodes.ids[7]
        rest = test.replies(30, in_order=False)
        assert [reply.metadata.src_node_id for reply in rest if reply.has_error()] == [victim]


def test_the_last_messages_are_not_for_a_host_that_is_far_slower() -> None:
    slow, fast = InThread("slow", 2), InThread("fast", 2)
    slow.pace, fast.pace = 4.0, 0.5
    with under(2, Hosts([slow, fast])) as test:
        test.train([0, 1], in_order=False)
        assert (slow.messages, fast.messages) == (0, 2)


def test_a_block_is_complete_when_the_next_one_has_begun() -> None:
    """Until then messages of it may not be sent: summed without them, the bits would be others."""
    blocks = {"a": 0, "b": 0, "c": 1}
    box = BlockBox(
        threading.Condition(),
        itertools.count(),
        "num-examples",
        False,
        lambda message: blocks[message.metadata.message_id],
        lambda: 10,
    )

    def sent(message_id: str) -> Message:
        message = Message(RecordDict(), 1, "train", group_id="1")
        message.metadata.__dict__["_message_id"] = message_id
        box.push(message)
        return message

    with box._changed:
        for message_id, is_complete in (("a", False), ("b", False), ("c", True)):
            message = sent(message_id)
            found = box.begin_on("host")
            assert found is not None and found[0] is message
            if message_id != "c":
                box.hold(*found)
                first = message
            assert box.is_complete(first) is is_complete


@pytest.mark.parametrize("in_order", [False, True])
def test_replies_that_do_not_go_together_are_an_error(in_order: bool) -> None:
    with under(40, Hosts([InThread("a", 2), InThread("b", 2)])) as test:
        with pytest.raises(InvalidResultError, match="do all clients train the same model"):
            test.train(list(range(40)), in_order=in_order, group="misfit")
        assert sum(test.calls()) <= 40
        test.train([1], in_order=in_order)  # it goes on


def test_clients_that_fail_are_counted() -> None:
    with under(6, Hosts([InThread("a", 2), InThread("b", 2)])) as test:
        rest = test.replies(6, in_order=True, group="error")
        assert [reply.has_error() for reply in rest] == [True] * 6
        assert test.calls() == [0] * 6
        assert sum(host.failed for host in test.grid._hosts.there) == 6


def test_the_model_of_a_round_goes_to_each_host_once() -> None:
    put: list[ArrayRecord] = []
    test = Under(30, hosts := Hosts([InThread("a", 2), InThread("b", 2)]))
    assert isinstance(test.grid, ClusterGrid)
    test.grid._models._put = lambda record: put.append(record) or pickle.dumps(record)
    got: list[str] = []
    for host in hosts.there:
        host._models._get = lambda where, name=host.name: got.append(name) or pickle.loads(where)
    try:
        test.train(list(range(30)), in_order=False, rounds=3)
    finally:
        test.close()
    assert len(put) == 3 and max(got.count("a"), got.count("b")) <= 3


def test_an_agent_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, or waits for its disk: Ray takes it for alive, and calls of its methods never end."""
    monkeypatch.setattr(cluster_hosts, "_NEWS_S", 0.001)
    monkeypatch.setattr(cluster_hosts, "_SILENT", 20)
    monkeypatch.setattr(
        cluster_hosts, "_is_there", lambda coming, timeout_s=0: coming not in ("hangs", ["hangs"])
    )
    monkeypatch.setattr(cluster_hosts, "_get", lambda coming, timeout_s=None: coming())
    monkeypatch.setattr(cluster_hosts, "_kill", lambda host: killed.append(host.name))
    monkeypatch.setattr(sys, "path", sys.path.copy())  # Ray adds to it, and fork servers are told apart by it
    asked: list[str] = []
    killed: list[str] = []

    def news(name: str) -> Any:
        asked.append(name)
        return "hangs" if name == "hangs" else lambda: News([], [], False)

    lost: list[cluster_hosts.RemoteHost] = []
    hosts = _hosts("hangs", "answers", on_lost=lost.append, news=news, exchange=lambda name, visits: "hangs")
    errors: list[str] = []
    exchanges = threading.Thread(target=lambda: errors.append(_error_of(hosts._all[0])), daemon=True)
    hears = threading.Thread(target=hosts._hear_all, daemon=True)
    exchanges.start()
    hears.start()
    until(lambda: lost and errors)
    count = len(asked)
    until(lambda: len(asked) > count + 5)  # the others are asked as before
    hosts._is_closed.set()
    hears.join(20)
    assert [each.name for each in lost] == killed == ["hangs"] and asked.count("hangs") == 1
    assert "given up" in errors[0]


def _hosts(
    *names: str, on_lost: Callable[[cluster_hosts.RemoteHost], None], **methods: Callable[..., Any]
) -> cluster_hosts.Hosts:
    """Return hosts whose agents have methods that get the host's name first."""

    def host(name: str) -> cluster_hosts.RemoteHost:
        agent = {key: SimpleNamespace(remote=partial(method, name)) for key, method in methods.items()}
        about = SimpleNamespace(name=name)
        return cluster_hosts.RemoteHost(name, about, SimpleNamespace(**agent), 0.0)  # type: ignore[arg-type]

    hosts = cluster_hosts.Hosts.__new__(cluster_hosts.Hosts)
    hosts._all, hosts._kept, hosts._lock = [host(name) for name in names], [], threading.Lock()
    hosts._is_closed, hosts._ray, hosts._asked, hosts._watchers = threading.Event(), __import__("ray"), {}, []
    hosts._listener = Listener(lambda host: None, on_lost, lambda host, is_full: None)
    return hosts


def test_news_that_are_under_way_at_the_end_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_hosts, "_NEWS_S", 0.001)
    monkeypatch.setattr(cluster_hosts, "_is_there", lambda coming: False)  # not as long as the run goes on
    monkeypatch.setattr(cluster_hosts, "_get", lambda coming, timeout_s: coming)
    monkeypatch.setattr(cluster_hosts, "_kill", lambda host: None)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def news(name: str) -> News:
        asked.append(name)
        return News([{"event": "first", "time": 1.0}], [], False)

    def close(name: str) -> News:
        return News([{"event": "last", "time": 2.0}], [], False)

    asked: list[str] = []
    hosts = _hosts("host", on_lost=lambda host: None, news=news, close=close)
    hosts._watchers = [threading.Thread(target=hosts._hear_all, daemon=True)]
    hosts._watchers[0].start()
    until(lambda: asked)
    hosts.close()
    assert [event["event"] for event in hosts._kept or ()] == ["first", "last"] and asked == ["host"]


def _error_of(host: cluster_hosts.RemoteHost) -> str:
    with pytest.raises(HostLostError) as told:
        host.exchange([])
    return str(told.value)


@pytest.mark.parametrize(
    ("change", "is_strict", "text"),
    [
        ({"versions": {"torch": "0.1"}}, False, "host there: torch 0.1 there and .+ Install the same on all"),
        ({"versions": {"flwr": "1.0"}}, False, "host there: flwr 1.0 there and .+"),
        ({"versions": {"numpy": "1.0"}}, True, "host there has other processors, GPUs or versions"),
        ({"cpu": "Z80"}, True, "host there has other processors, GPUs or versions .+ --deterministic wants"),
    ],
)
def test_a_host_that_is_different_is_named(change: dict[str, Any], is_strict: bool, text: str) -> None:
    hosts = cluster_hosts.Hosts.__new__(cluster_hosts.Hosts)
    here = machine.described([])
    hosts._work = SimpleNamespace(is_strict=is_strict)
    hosts._all = [SimpleNamespace(about=SimpleNamespace(described=here))]
    hosts._check(About("there", 1, 1, 1, here, 1, []))
    described = {**here, **change, "versions": {**here["versions"], **change.get("versions", {})}}
    with pytest.raises(ConfigError, match=text):
        hosts._check(About("there", 1, 1, 1, described, 1, []))
