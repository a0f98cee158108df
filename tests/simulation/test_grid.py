"""The grid of a simulation: replies, cancelled messages, and the order of messages."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server import SimpleClientManager
from flwr.server.compat.app_utils import start_update_client_manager_thread
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from grid_handlers import GridUnderTest
from waiting import until

from flower_gpu.errors import ConfigError, NotDeterministicError

pytestmark = pytest.mark.usefixtures("identity")


def in_time(function: Callable[[], object], timeout_s: float = 20) -> object:
    """Return the result of a function that might block forever."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "it waits for ever"
    return results[0]


def test_each_message_has_its_reply(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(3)
    sent = harness.messages(20)
    replies = list(harness.grid.send_and_receive(sent))
    assert len({message.metadata.message_id for message in sent}) == 20
    assert {reply.metadata.reply_to_message_id for reply in replies} == {
        message.metadata.message_id for message in sent
    }
    by_id = {message.metadata.message_id: message for message in sent}
    for reply in replies:
        message = by_id[reply.metadata.reply_to_message_id]
        assert reply.metadata.src_node_id == message.metadata.dst_node_id
    assert harness.handling.most <= 3
    assert not harness.grid._sets


def test_waiting_for_more_nodes_than_exist_is_an_error(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(1)
    for least, sample in ((5, 1), (1, 5)):
        with pytest.raises(ConfigError, match="waits for 5 nodes, and there are 4"):
            sample_nodes(harness.grid, least, sample)
    assert len(list(harness.grid.send_and_receive(harness.messages(1)))) == 1


def test_waiting_for_more_clients_in_a_client_manager_is_an_error(
    new_grid: Callable[..., GridUnderTest],
) -> None:
    """Strategies of Flower's older API wait in the client manager, for up to a day."""
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
        # This is Flower's result: it does not wait for these clients.
        assert manager.sample(5, 1) == []
    finally:
        ended.set()
        thread.join(60)


def test_a_loop_that_waits_for_nodes_is_warned_once(
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


def test_a_message_to_an_unknown_node_is_an_error(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid()
    stranger = next(number for number in itertools.count(2) if number not in harness.nodes.ids)
    sent = [*harness.messages(1), Message(RecordDict(), stranger, "train")]
    replies = {reply.metadata.src_node_id: reply for reply in harness.grid.send_and_receive(sent)}
    assert not replies[harness.nodes.ids[0]].has_error()
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
    harness = new_grid(1)
    replies = list(harness.grid.send_and_receive([*harness.messages(1, group), *harness.messages(2)]))
    assert [reply.has_error() for reply in replies] == [True, False, False]
    assert (replies[0].error.code, replies[0].error.reason) == (code, text)


def test_late_messages_are_cancelled(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(2)
    sent = [*harness.messages(3, "wait"), *harness.messages(3)]
    assert list(harness.grid.send_and_receive(sent, timeout=3)) == []
    # Two messages had started, and are cancelled. The others never start.
    until(lambda: len(harness.handling.done) == 2)
    assert sorted(harness.handling.cancelled) == sorted(harness.handling.begun)
    replies = list(harness.grid.send_and_receive(harness.messages(4), timeout=60))
    assert [reply.has_error() for reply in replies] == [False] * 4
    assert len(harness.handling.begun) == 6
    assert not harness.grid._sets


def test_time_without_any_worker_does_not_count(new_grid: Callable[..., GridUnderTest]) -> None:
    """While other runs use all cores, a message that ends long after its time limit is in time."""
    harness = new_grid(1)
    harness.handling.stuck = time.monotonic()
    timer = threading.Timer(4, harness.handling.gate.set)
    harness.handling.on_reply = lambda reply: setattr(harness.handling, "stuck", None)
    timer.start()
    (reply,) = harness.grid.send_and_receive(harness.messages(1, "gate"), timeout=3)
    assert not reply.has_error()
    assert list(harness.grid.send_and_receive(harness.messages(1, "wait"), timeout=0.3)) == [], (
        "else it counts"
    )


def test_a_message_without_a_limit_is_handled_after_a_day(new_grid: Callable[..., GridUnderTest]) -> None:
    """A run may wait that long for leases on a shared host, and Flower's own limit is 12 hours."""
    harness = new_grid(1)
    first, limited = harness.messages(2)
    limited.metadata.ttl = 3600.0
    for message in (first, limited):
        message.metadata.__dict__["_created_at"] -= 86400
    replies = list(harness.grid.send_and_receive([first, limited], timeout=60))
    assert [reply.has_error() for reply in replies] == [False, True]
    assert replies[1].error.code == ErrorCode.MESSAGE_UNAVAILABLE


def test_a_stream_yields_finished_replies(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(2)
    stream = harness.grid.stream([*harness.messages(1, "gate"), *harness.messages(2)])
    assert len([next(stream), next(stream)]) == 2
    harness.handling.gate.set()
    assert len(list(stream)) == 1


def test_a_stream_waits_for_its_reader(new_grid: Callable[..., GridUnderTest]) -> None:
    """Otherwise replies would fill the memory. Each reply that is read makes room for one more message."""
    harness = new_grid(2)
    stream = harness.grid.stream(harness.messages(30))
    for number in range(1, 30):
        next(stream)
        until(lambda: harness.handling.running == 0)
        assert len(harness.handling.begun) <= number + 2 * 3
    assert len(list(stream)) == 1


@pytest.mark.parametrize("are_short", [False, True])
def test_the_spare_thread_is_used_while_messages_are_short(
    are_short: bool, new_grid: Callable[..., GridUnderTest]
) -> None:
    harness = new_grid(2, has_spare=True)
    if are_short:
        harness.grid.send_and_receive(harness.messages(10))
    harness.grid.push_messages(harness.messages(6, "gate"))
    until(lambda: harness.handling.running == 2 + are_short)
    time.sleep(0.05)
    assert harness.handling.running == 2 + are_short


def test_a_list_has_the_order_of_sending(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(2)
    sent = [*harness.messages(1, "gate"), *harness.messages(9)]

    def open_at_last() -> None:
        until(lambda: len(harness.handling.done) == 9)
        harness.handling.gate.set()

    threading.Thread(target=open_at_last).start()
    reply_ids = [reply.metadata.reply_to_message_id for reply in harness.grid.send_and_receive(sent)]
    assert harness.handling.done[-1] == reply_ids[0], "the first message was done last"
    assert reply_ids == [message.metadata.message_id for message in sent]


def test_messages_in_order_have_the_order_of_partitions(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(1, nodes=40)
    sent = harness.messages(40)[::-1]
    rest, weight = harness.sums(sent)
    nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    assert [nodes[message_id] for message_id in harness.handling.begun] == list(harness.nodes.ids)
    assert len(rest) == weight == 40


def test_blocks_proceed_past_a_slow_message_as_far_as_there_is_room(
    new_grid: Callable[..., GridUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as sums are small, more than two blocks proceed, but not all of them."""
    monkeypatch.setattr("flower_gpu.simulation.pending_messages._MAX_AHEAD", 6)
    harness = new_grid(2, nodes=160)
    sent = [*harness.messages(1, "gate"), *harness.messages(160)[1:]]
    results: list[object] = []
    reader = threading.Thread(target=lambda: results.append(harness.sums(sent)), daemon=True)
    reader.start()
    until(lambda: len(harness.handling.done) == 6 * 16 - 1)
    time.sleep(0.3)
    assert len(harness.handling.done) <= 6 * 16
    harness.handling.gate.set()
    reader.join(60)
    ((rest, weight),) = results
    assert len(rest) == weight == 160


@pytest.mark.parametrize("in_order", [False, True])
def test_at_the_time_limit_the_finished_replies_are_summed(
    in_order: bool, new_grid: Callable[..., GridUnderTest]
) -> None:
    harness = new_grid(2, nodes=20)
    sent = [*harness.messages(1, "wait"), *harness.messages(20)[1:]]
    rest, weight = harness.sums(sent, in_order=in_order, timeout=3)
    assert sorted(reply.metadata.src_node_id for reply in rest) == sorted(harness.nodes.ids[1:])
    assert weight == 19
    assert harness.handling.cancelled == [sent[0].metadata.message_id]
    until(lambda: not harness.dispatcher._jobs)
    assert harness.sums(harness.messages(20), in_order=in_order)[1] == 20
    until(lambda: not harness.host._sums), "no sums of cancelled messages remain"


@pytest.mark.parametrize("in_order", [False, True])
def test_errors_are_not_summed(in_order: bool, new_grid: Callable[..., GridUnderTest]) -> None:
    """A block without any successful reply does not delay the sum."""
    harness = new_grid(2, nodes=70)
    sent = [*harness.messages(20, "error"), *harness.messages(70)[20:]]
    rest, weight = harness.sums(sent, in_order=in_order)
    assert len(rest) == 70 and weight == 50
    assert harness.sums(harness.messages(70, "error"), in_order=in_order)[1] == 0


def test_a_late_message_ends_a_strict_run(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(2, is_strict=True)
    sent = [*harness.messages(3, "wait"), *harness.messages(3)]
    with pytest.raises(NotDeterministicError, match=r"messages were not done within 0\.2 s"):
        list(harness.grid.send_and_receive(sent, timeout=0.2))
    until(lambda: sorted(harness.handling.cancelled) == sorted(harness.handling.begun))


def test_closing_a_stream_cancels_the_remaining_messages(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(1)
    stream = harness.grid.stream([*harness.messages(1), *harness.messages(20, "wait")])
    next(stream)
    until(lambda: len(harness.handling.begun) == 2)
    stream.close()
    until(lambda: len(harness.handling.done) == 2)
    assert len(harness.handling.begun) == 2, "the others have not begun"
    assert len(list(harness.grid.send_and_receive(harness.messages(2)))) == 2


def test_messages_within_the_loop_over_a_stream(new_grid: Callable[..., GridUnderTest]) -> None:
    """The stream's replies wait for the loop; what the loop sends must not wait for them."""
    harness = new_grid(1)

    def loop() -> list[int]:
        found = []
        for _ in harness.grid.stream(harness.messages(8)):
            found.append(len(list(harness.grid.send_and_receive(harness.messages(2)))))
        return found

    assert in_time(loop) == [2] * 8


def test_close_cancels_running_messages(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(2)
    ids = list(harness.grid.push_messages(harness.messages(5, "wait")))
    until(lambda: harness.handling.running == 2)
    in_time(harness.close)
    assert sorted(harness.handling.cancelled) == sorted(harness.handling.begun)
    assert len(harness.handling.begun) == 2
    assert not any(thread.is_alive() for thread in threads_of(harness))
    assert list(harness.grid.pull_messages(ids)) == []
    # Closing the grid again has no effect.
    in_time(harness.grid.close)


def test_close_with_an_unread_stream(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(2)
    stream = harness.grid.stream(harness.messages(30))
    next(stream)
    in_time(harness.close)
    stream.close()
    assert not any(thread.is_alive() for thread in threads_of(harness))


def threads_of(harness: GridUnderTest) -> list[threading.Thread]:
    return [*harness.host._threads, harness.dispatcher._assigner, *harness.dispatcher._exchanging]


def test_a_fault_of_the_only_host_ends_the_run(new_grid: Callable[..., GridUnderTest]) -> None:
    harness = new_grid(2)

    def fails(visits: object) -> None:
        raise MemoryError("no room")

    harness.host.exchange = fails  # type: ignore[method-assign, assignment]
    replies = list(harness.grid.send_and_receive(harness.messages(3, "wait"), timeout=60))
    assert {str(reply.error.ends_run) for reply in replies} == {
        "this machine can no longer handle messages: no room"
    }
