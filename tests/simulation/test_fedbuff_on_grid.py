"""FedBuff on the grid of a simulation, with a host in threads: limits of messages, and what is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result
from grid_handlers import RUN_ID, GridUnderTest, until

from flower_gpu import FedBuff
from flower_gpu.errors import ClientsFailedError
from flower_gpu.flower.streaming import Buffered
from flower_gpu.simulation.run import _identity


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[GridUnderTest]:
    """A grid with four nodes, two of which are handled at a time."""
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "in-process")
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with _identity(RUN_ID), caplog.at_level(logging.INFO, "flwr"):
        grid = GridUnderTest(2)
        yield grid
        grid.close()


def wait_until_cancelled(one: GridUnderTest, reply: Message) -> None:
    assert until(lambda: reply.metadata.reply_to_message_id in one.handling.cancelled)


def start(one: GridUnderTest, strategy: FedBuff, timeout: float, **given: object) -> Result:
    initial = ArrayRecord([np.zeros(2)])
    return strategy.start(one.grid, initial, timeout=timeout, **{"num_rounds": 3, **given})


def test_the_limit_stands_still_while_no_message_can_have_a_worker(one: GridUnderTest) -> None:
    one.handling.stuck = time.monotonic()

    def wait_for_cores(reply: Message) -> None:
        one.handling.gate.wait(60)
        one.handling.stuck = None

    one.handling.on_reply = wait_for_cores
    timer = threading.Timer(4.0, one.handling.gate.set)
    timer.start()
    result = start(one, FedBuff(2, 2), timeout=3, num_rounds=1)
    assert list(result.train_metrics_clientapp) == [1] and result.arrays["0"].numpy().tolist() == [1, 1]


def test_replies_that_came_in_time_count_after_a_long_evaluation(
    one: GridUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            time.sleep(4)
        return MetricRecord({"accuracy": 0.5})

    result = start(one, FedBuff(2, 4), timeout=3, evaluate_fn=evaluate)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert "Received 2 results and 0 failures" in caplog.text
    assert "error in reply" not in caplog.text and not one.handling.cancelled


def test_a_late_message_is_a_failure_and_its_handling_ends(
    one: GridUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    def first_is_late(reply: Message) -> None:
        if len(one.handling.begun) == 1:
            wait_until_cancelled(one, reply)

    one.handling.on_reply = first_is_late
    result = start(one, FedBuff(1, 1), timeout=3, num_rounds=2)
    assert list(result.train_metrics_clientapp) == [2]
    assert one.handling.cancelled[0] == one.handling.begun[0]
    (told,) = [record.getMessage() for record in caplog.records if "error in reply" in record.getMessage()]
    assert "no reply within 3 s" in told


def test_messages_that_were_sent_with_a_cancelled_one_go_on(one: GridUnderTest) -> None:
    sent = Buffered([*one.messages(1, "wait"), *one.messages(1, "gate"), *one.messages(1)])
    cancelled, *others = one.grid.push_messages(sent)
    one.grid.cancel_messages([cancelled])
    assert until(lambda: cancelled in one.handling.cancelled or cancelled not in one.handling.begun)
    one.handling.gate.set()
    assert until(lambda: len(one.grid.wait_for_replies(others, 0)) == 2)
    assert [reply.has_error() for reply in one.grid.pull_messages(others)] == [False, False]
    assert one.handling.cancelled in ([cancelled], [])


def test_a_run_in_which_every_message_is_late_has_no_result(one: GridUnderTest) -> None:
    one.handling.on_reply = lambda reply: wait_until_cancelled(one, reply)
    with pytest.raises(ClientsFailedError, match=r"no client has sent an update in 2 rounds.*within 0\.3 s"):
        start(one, FedBuff(2, 2), timeout=0.3, num_rounds=2)
    assert until(lambda: set(one.handling.begun) <= set(one.handling.cancelled))
