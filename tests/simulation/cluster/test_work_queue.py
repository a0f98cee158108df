"""The messages that a host was given: when they are begun, and when it is told what has become of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict

from flower_gpu.simulation import run as runs
from flower_gpu.simulation.cluster import work_queue
from flower_gpu.simulation.cluster.visits import Visit, Visited
from flower_gpu.simulation.cluster.work_queue import WorkQueue

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    with runs._identity(5):
        yield


def visit(message_id: str) -> Visit:
    message = Message(RecordDict(), 1, "train", group_id="1")
    message.metadata.__dict__["_message_id"] = message_id
    return Visit(message, [], 0, b"", None)


def given(*message_ids: str) -> WorkQueue:
    queue = WorkQueue()
    queue.give([visit(message_id) for message_id in message_ids])
    return queue


def begun(queue: WorkQueue) -> str:
    found = queue.next(0)
    assert found is not None
    return found.message.metadata.message_id


def ids(fetched: list[Visited]) -> list[str]:
    return [visited.message_id for visited in fetched]


def beside(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call a function in another thread, which is given the time to begin."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    time.sleep(0.1)
    return thread, found


def test_messages_are_begun_in_their_order() -> None:
    queue = given("a", "b")
    queue.give([visit("c")])
    assert [begun(queue) for _ in range(3)] == ["a", "b", "c"]
    assert queue.next(0) is None


def test_what_is_finished_is_told_at_once_where_no_message_waits() -> None:
    queue = given("a", "b")
    thread, found = beside(lambda: queue.fetch(60))
    assert [begun(queue), begun(queue)] == ["a", "b"]
    queue.finish(Visited("b"))
    thread.join(30)
    assert ids(found[0]) == ["b"]


def test_while_messages_wait_several_are_told_of_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "_GATHER_S", 3600.0)
    queue = given("a", "b", "c")
    thread, found = beside(lambda: queue.fetch(60))
    for _ in range(2):
        queue.finish(Visited(begun(queue)))
    assert not found, "c still waits for a thread"
    assert begun(queue) == "c"  # from now on this host needs messages
    thread.join(30)
    assert ids(found[0]) == ["a", "b"]


def test_nobody_waits_long_for_others_to_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "_GATHER_S", 0.01)
    queue = given("a", "b")
    queue.finish(Visited(begun(queue)))
    assert ids(queue.fetch(60)) == ["a"]


def test_few_large_replies_are_told_of_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "_MOST_BYTES", 1200)
    queue = WorkQueue()
    for message_id, count in (("a", 100), ("b", 100), ("c", 100), ("d", 10_000)):
        content = RecordDict({"arrays": ArrayRecord([np.zeros(count, np.float32)])})
        queue.finish(Visited(message_id, Message(content, 1, "train")))
    assert [ids(queue.fetch(0)) for _ in range(4)] == [["a", "b"], ["c"], ["d"], []]


def test_what_nobody_has_begun_goes_back() -> None:
    queue = given("a", "b", "c", "d")
    assert begun(queue) == "a"
    queue.cancel("c")
    queue.cancel("a")
    queue.give_back()
    told = queue.fetch(0)
    assert ids(told) == ["c", "b", "d"] and not any(visited.is_handled for visited in told)
    assert queue.next(0) is None


def test_what_was_given_up_before_it_came_is_known() -> None:
    """Ray may carry what is called later first."""
    queue = WorkQueue()
    queue.cancel("a")
    queue.give([visit("a"), visit("b")])
    assert [queue.is_cancelled(one) for one in (queue.next(0), queue.next(0)) if one] == [True, False]


def test_no_message_is_begun_while_too_much_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "_MOST_KEPT_BYTES", 1000)
    queue = given("a", "b", "c")
    for message_id in ("a", "b"):
        assert begun(queue) == message_id
        queue.finish(Visited(message_id, state=bytes(800)))
    thread, found = beside(lambda: queue.next(60))
    assert not found
    assert ids(queue.fetch(0)) == ["a", "b"]
    thread.join(30)
    assert found[0].message.metadata.message_id == "c"


def test_an_error_is_raised_where_messages_are_fetched() -> None:
    queue = WorkQueue()
    queue.fail(OSError("the model is gone"))
    with pytest.raises(OSError, match="the model is gone"):
        queue.fetch(60)


def test_when_it_is_closed_nobody_waits_for_a_message() -> None:
    queue = given()
    thread, found = beside(lambda: queue.next(None))
    queue.close()
    thread.join(30)
    assert found == [None] and queue.is_closed
