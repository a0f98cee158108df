"""The messages that a host was given: when they are begun, and when it is told what has become of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from grid_handlers import Handling, NoWorkers

from flower_gpu.simulation import local_host
from flower_gpu.simulation import run as runs
from flower_gpu.simulation.batch_size import Batches
from flower_gpu.simulation.host import About, Answer, Visit
from flower_gpu.simulation.local_host import QueueHost
from flower_gpu.simulation.messages import MessageHandler


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    with runs._identity(5):
        yield


def visit(message_id: str) -> Visit:
    message = Message(RecordDict(), 1, "train", group_id="1")
    message.metadata.__dict__["_message_id"] = message_id
    return Visit(message, 0)


def given(*message_ids: str) -> QueueHost:
    queue = QueueHost(About("here", 1, 1, {}, 1, []))
    queue.start(Handling(), 0)
    queue.take([visit(message_id) for message_id in message_ids])
    return queue


def begun(queue: QueueHost) -> Visit:
    [found] = queue.next(waits=False)
    return found


def finish(queue: QueueHost, state: bytes = b"") -> str:
    visit = begun(queue)
    queue.finish(visit, Answer(visit.message_id, state=state))
    return visit.message_id


def ids(fetched: tuple[list[Answer], list[int]]) -> list[str]:
    return [answer.message_id for answer in fetched[0]]


def beside(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call a function in another thread, which is given the time to begin."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    time.sleep(0.1)
    return thread, found


def test_messages_are_begun_in_their_order() -> None:
    queue = given("a", "b")
    queue.take([visit("c")])
    assert [begun(queue).message_id for _ in range(3)] == ["a", "b", "c"]
    assert queue.next(waits=False) == []


def test_what_is_finished_is_told_at_once_where_no_message_waits() -> None:
    queue = given("a", "b")
    thread, found = beside(lambda: queue.fetch(60))
    begun(queue)
    finish(queue)
    thread.join(60)
    assert ids(found[0]) == ["b"]


def test_while_messages_wait_several_are_told_of_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_GATHER_S", 3600.0)
    queue = given("a", "b", "c")
    thread, found = beside(lambda: queue.fetch(60))
    assert [finish(queue), finish(queue)] == ["a", "b"]
    assert not found, "c still waits for a thread"
    begun(queue)  # from now on this host needs messages
    thread.join(60)
    assert ids(found[0]) == ["a", "b"]


def test_nobody_waits_long_for_others_to_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_GATHER_S", 0.01)
    queue = given("a", "b")
    finish(queue)
    assert ids(queue.fetch(60)) == ["a"]


def test_who_asks_for_a_sum_need_not_wait() -> None:
    queue = given()
    thread, found = beside(lambda: queue.fetch(60))
    queue.ask_for_sum(7)
    thread.join(60)
    assert found == [([], [7])] and queue.fetch(0) == ([], [])


def test_few_large_replies_are_told_of_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_MOST_BYTES", 1200)
    queue = given("a", "b", "c", "d")
    for count in (100, 100, 100, 10_000):
        content = RecordDict({"arrays": ArrayRecord([np.zeros(count, np.float32)])})
        one = begun(queue)
        queue.finish(one, Answer(one.message_id, Message(content, 1, "train")))
    assert [ids(queue.fetch(0)) for _ in range(4)] == [["a", "b"], ["c"], ["d"], []]


def test_what_nobody_has_begun_goes_back() -> None:
    queue = given("a", "b", "c", "d")
    assert begun(queue).message_id == "a"
    queue.cancel("c")
    queue.cancel("a")
    queue.give_back()
    told = queue.fetch(0)
    assert ids(told) == ["c", "b", "d"] and all(answer.reply is None for answer in told[0])
    assert queue.next(waits=False) == []


def test_no_message_is_begun_while_too_much_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_MOST_KEPT_BYTES", 1000)
    queue = given("a", "b", "c")
    assert [finish(queue, bytes(800)), finish(queue, bytes(800))] == ["a", "b"]
    thread, found = beside(lambda: queue.next(waits=True))
    assert not found
    assert ids(queue.fetch(0)) == ["a", "b"]
    thread.join(60)
    assert [each.message_id for each in found[0]] == ["c"]


def test_when_it_is_closed_nobody_waits() -> None:
    queue = given()
    waiting = [beside(lambda: queue.next(waits=True)), beside(lambda: queue.fetch(60))]
    queue.close()
    for thread, _ in waiting:
        thread.join(60)
    assert [found for _, found in waiting] == [[[]], [([], [])]]


class Largest(Batches):
    """Batches of as many messages as there are, up to eight."""

    def largest(self, message_type: str) -> int:
        return 8 if message_type == "train" else 1

    def choose(self, message_type: str, available: int) -> int:
        return available


class Batching(NoWorkers):
    may_share = staticmethod(MessageHandler.may_share)
    batches = Largest(1)


def assignments(concurrency: int, *kinds_and_rounds: tuple[str, int]) -> list[int]:
    """Return how many messages each assignment has."""
    queue = QueueHost(About("here", concurrency, 1, {}, 1, []))
    queue.start(Batching(), 0)
    messages = [Message(RecordDict(), 1, kind, group_id=str(of)) for kind, of in kinds_and_rounds]
    queue.take([Visit(message, 1) for message in messages])
    found = []
    while visits := queue.next(waits=False):
        assert visits == [Visit(message, 1) for message in messages[: len(visits)]], "in their order"
        del messages[: len(visits)]
        found.append(len(visits))
    return found


def test_messages_of_one_type_and_round_make_an_assignment() -> None:
    assert assignments(1, *[("train", 1)] * 3, *[("train", 2)] * 2, *[("evaluate", 2)] * 2) == [3, 2, 1, 1]
    assert assignments(1, *[("train", 1)] * 20) == [8, 8, 4]


def test_other_threads_have_their_part_of_the_messages() -> None:
    assert assignments(3, *[("train", 1)] * 8) == [3, 3, 2]
    assert assignments(16, *[("train", 1)] * 8) == [1] * 8
