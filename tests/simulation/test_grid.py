"""The grid of a simulation: who is answered, who is given up, and what waits for what."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server import SimpleClientManager
from flwr.server.compat.app_utils import start_update_client_manager_thread
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from grid_handlers import RUN_ID, GridUnderTest, until

from flower_gpu.errors import ConfigError, NotDeterministicError
from flower_gpu.simulation.run import _identity


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    """Flower lets only the SuperLink's side of a run make messages."""
    with _identity(RUN_ID):
        yield


@pytest.fixture
def new_grid() -> Iterator[Callable[..., GridUnderTest]]:
    made: list[GridUnderTest] = []

    def new(threads: int = 2, **options: Any) -> GridUnderTest:
        made.append(GridUnderTest(threads, **options))
        return made[-1]

    yield new
    for one in made:
        one.close()


def in_time(function: Callable[[], object], timeout_s: float = 20) -> object:
    """Return what a function returns that might wait for ever."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "it waits for ever"
    return found[0]


def test_each_message_has_its_reply(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(3)
    sent = one.messages(20)
    replies = list(one.grid.send_and_receive(sent))
    assert len({message.metadata.message_id for message in sent}) == 20
    assert {reply.metadata.reply_to_message_id for reply in replies} == {
        message.metadata.message_id for message in sent
    }
    by_id = {message.metadata.message_id: message for message in sent}
    for reply in replies:
        message = by_id[reply.metadata.reply_to_message_id]
        assert reply.metadata.src_node_id == message.metadata.dst_node_id
    assert one.handling.most <= 3
    assert not one.grid._boxes


def test_who_waits_for_more_nodes_than_there_are_is_told(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(1)
    for least, sample in ((5, 1), (1, 5)):
        with pytest.raises(ConfigError, match="waits for 5 nodes, and there are 4"):
            sample_nodes(one.grid, least, sample)
    assert len(list(one.grid.send_and_receive(one.messages(1)))) == 1


def test_a_client_manager_that_waits_for_more_clients_is_told(
    new_grid: Callable[..., GridUnderTest],
) -> None:
    """Strategies of Flower's older API wait there, for a day."""
    grid = new_grid(1).grid
    manager = SimpleClientManager()
    thread, ended, is_ready = start_update_client_manager_thread(grid, manager)
    assert is_ready.wait(60)
    try:
        assert manager.num_available() == 4
        assert len(manager.sample(2, 4)) == 2 and len(manager.sample(num_clients=4)) == 4
        for wanted in ({"num_clients": 1, "min_num_clients": 5}, {"num_clients": 5}):
            with pytest.raises(ConfigError, match="waits for 5 nodes, and there are 4"):
                manager.sample(**wanted)
        assert manager.sample(5, 1) == []  # Flower's answer: it does not wait for these
    finally:
        ended.set()
        thread.join(60)


def test_a_loop_that_waits_for_nodes_is_told_once(
    new_grid: Callable[..., GridUnderTest], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    grid = new_grid(1).grid
    for _ in range(10):
        grid.get_node_ids()
    assert not caplog.records
    monkeypatch.setattr("flower_gpu.simulation.grid._LONG_S", 0.0)
    for _ in range(10):
        grid.get_node_ids()
    (record,) = caplog.records
    assert "There are 4 nodes, and no more will come" in record.getMessage()


def test_unknown_node(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid()
    stranger = next(number for number in itertools.count(2) if number not in one.nodes.ids)
    sent = [*one.messages(1), Message(RecordDict(), stranger, "train")]
    replies = {reply.metadata.src_node_id: reply for reply in one.grid.send_and_receive(sent)}
    assert not replies[one.nodes.ids[0]].has_error()
    assert replies[stranger].error.code == ErrorCode.NODE_UNAVAILABLE
    assert str(stranger) in replies[stranger].error.reason


@pytest.mark.parametrize(
    ("group", "code", "text"),
    [
        ("error", ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "of the app"),
        ("died", ErrorCode.CLIENT_APP_CRASHED, "killed"),
    ],
)
def test_errors_are_replies(group: str, code: int, text: str, new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(1)
    replies = list(one.grid.send_and_receive([*one.messages(1, group), *one.messages(2)]))
    assert [reply.has_error() for reply in replies] == [True, False, False]
    assert (replies[0].error.code, replies[0].error.reason) == (code, text)


def test_what_is_late_is_given_up(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2)
    sent = [*one.messages(3, "wait"), *one.messages(3)]
    assert list(one.grid.send_and_receive(sent, timeout=3)) == []
    # Two had begun, and are ended; the others never begin.
    assert until(lambda: len(one.handling.done) == 2)
    assert sorted(one.handling.cancelled) == sorted(one.handling.begun)
    replies = list(one.grid.send_and_receive(one.messages(4), timeout=60))
    assert [reply.has_error() for reply in replies] == [False] * 4
    assert len(one.handling.begun) == 6
    assert not one.grid._boxes


def test_time_without_any_worker_does_not_count(new_grid: Callable[..., GridUnderTest]) -> None:
    """Others have the cores: a message that is done long after its time limit is in time."""
    one = new_grid(1)
    one.handling.stuck = time.monotonic()
    timer = threading.Timer(4, one.handling.gate.set)
    one.handling.on_reply = lambda reply: setattr(one.handling, "stuck", None)
    timer.start()
    (reply,) = one.grid.send_and_receive(one.messages(1, "gate"), timeout=3)
    assert not reply.has_error()
    assert list(one.grid.send_and_receive(one.messages(1, "wait"), timeout=0.3)) == [], "else it counts"


def test_a_message_without_a_limit_is_handled_after_a_day(new_grid: Callable[..., GridUnderTest]) -> None:
    """Which a run may wait for leases on a host that it shares; Flower's own limit is 12 hours."""
    one = new_grid(1)
    first, limited = one.messages(2)
    limited.metadata.ttl = 3600.0
    for message in (first, limited):
        message.metadata.__dict__["_created_at"] -= 86400
    replies = list(one.grid.send_and_receive([first, limited], timeout=60))
    assert [reply.has_error() for reply in replies] == [False, True]
    assert replies[1].error.code == ErrorCode.MESSAGE_UNAVAILABLE


def test_a_stream_yields_what_is_there(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2)
    stream = one.grid.stream([*one.messages(1, "gate"), *one.messages(2)])
    assert len([next(stream), next(stream)]) == 2
    one.handling.gate.set()
    assert len(list(stream)) == 1


def test_a_stream_waits_for_its_reader(new_grid: Callable[..., GridUnderTest]) -> None:
    """Else replies would fill the memory; each that is read makes room for one more."""
    one = new_grid(2)
    stream = one.grid.stream(one.messages(30))
    for number in range(1, 30):
        next(stream)
        assert until(lambda: one.handling.running == 0)
        assert len(one.handling.begun) <= number + 2 * 3
    assert len(list(stream)) == 1


@pytest.mark.parametrize("are_short", [False, True])
def test_one_more_is_handled_while_messages_are_short(
    are_short: bool, new_grid: Callable[..., GridUnderTest]
) -> None:
    one = new_grid(2, has_spare=True)
    if are_short:
        one.grid.send_and_receive(one.messages(10))
    one.grid.push_messages(one.messages(6, "gate"))
    assert until(lambda: one.handling.running == 2 + are_short)
    time.sleep(0.05)
    assert one.handling.running == 2 + are_short


def test_a_list_has_the_order_of_sending(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2)
    sent = [*one.messages(1, "gate"), *one.messages(9)]

    def open_at_last() -> None:
        until(lambda: len(one.handling.done) == 9)
        one.handling.gate.set()

    threading.Thread(target=open_at_last).start()
    found = [reply.metadata.reply_to_message_id for reply in one.grid.send_and_receive(sent)]
    assert one.handling.done[-1] == found[0], "the first one was done last"
    assert found == [message.metadata.message_id for message in sent]


def test_messages_in_order_have_the_order_of_partitions(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(1, nodes=40)
    sent = one.messages(40)[::-1]
    rest, weight = one.sums(sent)
    nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    assert [nodes[message_id] for message_id in one.handling.begun] == list(one.nodes.ids)
    assert len(rest) == weight == 40


def test_blocks_wait_for_a_slow_message_before_them_as_far_as_there_is_room(
    new_grid: Callable[..., GridUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only two blocks, as long as their sums are small; and not all of them."""
    monkeypatch.setattr("flower_gpu.simulation.boxes._MOST_AHEAD", 6)
    one = new_grid(2, nodes=160)
    sent = [*one.messages(1, "gate"), *one.messages(160)[1:]]
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(one.sums(sent)), daemon=True)
    reader.start()
    assert until(lambda: len(one.handling.done) == 6 * 16 - 1)
    assert not until(lambda: len(one.handling.done) > 6 * 16, 0.3)
    one.handling.gate.set()
    reader.join(60)
    ((rest, weight),) = found
    assert len(rest) == weight == 160


@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_there_at_the_time_limit_is_summed_without_the_slow_one(
    in_order: bool, new_grid: Callable[..., GridUnderTest]
) -> None:
    one = new_grid(2, nodes=20)
    sent = [*one.messages(1, "wait"), *one.messages(20)[1:]]
    rest, weight = one.sums(sent, in_order=in_order, timeout=3)
    assert sorted(reply.metadata.src_node_id for reply in rest) == sorted(one.nodes.ids[1:])
    assert weight == 19
    assert one.handling.cancelled == [sent[0].metadata.message_id]
    assert until(lambda: not one.dispatcher._jobs)
    assert one.sums(one.messages(20), in_order=in_order)[1] == 20
    assert until(lambda: not one.host._sums), "nothing is left of what nobody wanted"


@pytest.mark.parametrize("in_order", [False, True])
def test_errors_are_not_summed(in_order: bool, new_grid: Callable[..., GridUnderTest]) -> None:
    """Nor is a block without any good reply waited for."""
    one = new_grid(2, nodes=70)
    sent = [*one.messages(20, "error"), *one.messages(70)[20:]]
    rest, weight = one.sums(sent, in_order=in_order)
    assert len(rest) == 70 and weight == 50
    assert one.sums(one.messages(70, "error"), in_order=in_order)[1] == 0


def test_what_is_late_ends_a_strict_run(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2, is_strict=True)
    sent = [*one.messages(3, "wait"), *one.messages(3)]
    with pytest.raises(NotDeterministicError, match=r"messages were not done within 0\.2 s"):
        list(one.grid.send_and_receive(sent, timeout=0.2))
    assert until(lambda: sorted(one.handling.cancelled) == sorted(one.handling.begun))


def test_who_reads_no_further_gives_the_rest_up(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(1)
    stream = one.grid.stream([*one.messages(1), *one.messages(20, "wait")])
    next(stream)
    assert until(lambda: len(one.handling.begun) == 2)
    stream.close()
    assert until(lambda: len(one.handling.done) == 2)
    assert len(one.handling.begun) == 2, "the others have not begun"
    assert len(list(one.grid.send_and_receive(one.messages(2)))) == 2


def test_messages_within_the_loop_over_a_stream(new_grid: Callable[..., GridUnderTest]) -> None:
    """The stream's replies wait for the loop; what the loop sends must not wait for them."""
    one = new_grid(1)

    def loop() -> list[int]:
        found = []
        for _ in one.grid.stream(one.messages(8)):
            found.append(len(list(one.grid.send_and_receive(one.messages(2)))))
        return found

    assert in_time(loop) == [2] * 8


def test_threads_without_messages_let_go_of_their_workers(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2)
    assert until(lambda: one.handling.idles >= 2)
    before = one.handling.idles
    list(one.grid.send_and_receive(one.messages(3)))
    assert until(lambda: one.handling.idles >= before + 1)
    assert one.handling.left == 0
    one.close()
    assert one.handling.left == 2


def test_close_gives_up_what_runs(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2)
    ids = list(one.grid.push_messages(one.messages(5, "wait")))
    assert until(lambda: one.handling.running == 2)
    in_time(one.close)
    assert sorted(one.handling.cancelled) == sorted(one.handling.begun)
    assert len(one.handling.begun) == 2
    assert not any(thread.is_alive() for thread in threads_of(one))
    assert list(one.grid.pull_messages(ids)) == []
    in_time(one.grid.close)  # once more does no harm


def test_close_with_a_stream_that_nobody_reads(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2)
    stream = one.grid.stream(one.messages(30))
    next(stream)
    in_time(one.close)
    stream.close()
    assert not any(thread.is_alive() for thread in threads_of(one))


def threads_of(one: GridUnderTest) -> list[threading.Thread]:
    return [*one.host._threads, one.dispatcher._giver, *one.dispatcher._exchanging]


def test_a_fault_of_the_only_host_ends_the_run(new_grid: Callable[..., GridUnderTest]) -> None:
    one = new_grid(2)

    def fails(visits: object) -> None:
        raise MemoryError("no room")

    one.host.exchange = fails  # type: ignore[method-assign, assignment]
    replies = list(one.grid.send_and_receive(one.messages(3, "wait"), timeout=60))
    assert {str(reply.error.ends_run) for reply in replies} == {
        "this machine can no longer handle messages: no room"
    }
