"""The queue of messages on a host: the order in which they start, and when the grid gets their replies."""

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
from flower_gpu.simulation.host import AssignedMessage, HostInfo, MessageOutcome
from flower_gpu.simulation.local_host import QueueHost
from flower_gpu.simulation.messages import MessageHandler


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    with runs._identity(5):
        yield


def visit(message_id: str) -> AssignedMessage:
    message = Message(RecordDict(), 1, "train", group_id="1")
    message.metadata.__dict__["_message_id"] = message_id
    return AssignedMessage(message, 0)


def queue_of(*message_ids: str) -> QueueHost:
    queue = QueueHost(HostInfo("here", 1, 1, {}, 1, []))
    queue.start(Handling(), 0)
    queue.submit([visit(message_id) for message_id in message_ids])
    return queue


def start_next(queue: QueueHost) -> AssignedMessage:
    [found] = queue.next(is_blocking=False)
    return found


def finish(queue: QueueHost, state: bytes = b"") -> str:
    visit = start_next(queue)
    queue.finish(visit, MessageOutcome(visit.message_id, state=state))
    return visit.message_id


def ids(fetched: tuple[list[MessageOutcome], list[int]]) -> list[str]:
    return [answer.message_id for answer in fetched[0]]


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call a function in another thread, and give it time to start."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    time.sleep(0.1)
    return thread, results


def test_messages_start_in_their_order() -> None:
    queue = queue_of("a", "b")
    queue.submit([visit("c")])
    assert [start_next(queue).message_id for _ in range(3)] == ["a", "b", "c"]
    assert queue.next(is_blocking=False) == []


def test_finished_messages_are_reported_at_once_if_no_message_waits() -> None:
    queue = queue_of("a", "b")
    thread, results = in_thread(lambda: queue.fetch(60))
    start_next(queue)
    finish(queue)
    thread.join(60)
    assert ids(results[0]) == ["b"]


def test_finished_messages_are_reported_together_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_GATHER_S", 3600.0)
    queue = queue_of("a", "b", "c")
    thread, results = in_thread(lambda: queue.fetch(60))
    assert [finish(queue), finish(queue)] == ["a", "b"]
    assert not results, "c still waits for a thread"
    # From now on this host needs messages.
    start_next(queue)
    thread.join(60)
    assert ids(results[0]) == ["a", "b"]


def test_a_finished_message_is_reported_after_a_short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_GATHER_S", 0.01)
    queue = queue_of("a", "b")
    finish(queue)
    assert ids(queue.fetch(60)) == ["a"]


def test_a_request_for_a_sum_ends_the_wait() -> None:
    queue = queue_of()
    thread, results = in_thread(lambda: queue.fetch(60))
    queue.ask_for_sum(7)
    thread.join(60)
    assert results == [([], [7])] and queue.fetch(0) == ([], [])


def test_only_a_few_large_replies_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_MAX_FETCH_BYTES", 1200)
    queue = queue_of("a", "b", "c", "d")
    for count in (100, 100, 100, 10_000):
        content = RecordDict({"arrays": ArrayRecord([np.zeros(count, np.float32)])})
        started = start_next(queue)
        queue.finish(started, MessageOutcome(started.message_id, Message(content, 1, "train")))
    assert [ids(queue.fetch(0)) for _ in range(4)] == [["a", "b"], ["c"], ["d"], []]


def test_messages_that_have_not_started_are_returned() -> None:
    queue = queue_of("a", "b", "c", "d")
    assert start_next(queue).message_id == "a"
    queue.cancel("c")
    queue.cancel("a")
    queue.return_queued()
    returned = queue.fetch(0)
    assert ids(returned) == ["c", "b", "d"] and all(answer.reply is None for answer in returned[0])
    assert queue.next(is_blocking=False) == []


def test_no_message_starts_while_too_many_bytes_are_unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_host, "_MAX_KEPT_BYTES", 1000)
    queue = queue_of("a", "b", "c")
    assert [finish(queue, bytes(800)), finish(queue, bytes(800))] == ["a", "b"]
    thread, results = in_thread(lambda: queue.next(is_blocking=True))
    assert not results
    assert ids(queue.fetch(0)) == ["a", "b"]
    thread.join(60)
    assert [visit.message_id for visit in results[0]] == ["c"]


def test_closing_the_queue_ends_all_waits() -> None:
    queue = queue_of()
    waiting = [in_thread(lambda: queue.next(is_blocking=True)), in_thread(lambda: queue.fetch(60))]
    queue.close()
    for thread, _ in waiting:
        thread.join(60)
    assert [result for _, result in waiting] == [[[]], [([], [])]]


class Largest(Batches):
    """Batches of all available messages, up to eight."""

    def largest(self, message_type: str) -> int:
        return 8 if message_type == "train" else 1

    def choose(self, message_type: str, available: int) -> int:
        return available


class Batching(NoWorkers):
    may_share = staticmethod(MessageHandler.may_share)
    batches = Largest(1)


def assignments(concurrency: int, *kinds_and_rounds: tuple[str, int]) -> list[int]:
    """Return the number of messages of each assignment."""
    queue = QueueHost(HostInfo("here", concurrency, 1, {}, 1, []))
    queue.start(Batching(), 0)
    messages = [Message(RecordDict(), 1, kind, group_id=str(of)) for kind, of in kinds_and_rounds]
    queue.submit([AssignedMessage(message, 1) for message in messages])
    sizes = []
    while visits := queue.next(is_blocking=False):
        assert visits == [AssignedMessage(message, 1) for message in messages[: len(visits)]], (
            "in their order"
        )
        del messages[: len(visits)]
        sizes.append(len(visits))
    return sizes


def test_messages_of_one_type_and_round_make_an_assignment() -> None:
    assert assignments(1, *[("train", 1)] * 3, *[("train", 2)] * 2, *[("evaluate", 2)] * 2) == [3, 2, 1, 1]
    assert assignments(1, *[("train", 1)] * 20) == [8, 8, 4]


def test_idle_threads_get_their_part_of_the_messages() -> None:
    assert assignments(3, *[("train", 1)] * 8) == [3, 3, 2]
    assert assignments(16, *[("train", 1)] * 8) == [1] * 8
