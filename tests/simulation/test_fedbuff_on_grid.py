"""FedBuff on the grid of a simulation, with a host in threads: time limits and lost messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result
from grid_handlers import RUN_ID, GridUnderTest
from waiting import until

from flower_gpu import FedBuff
from flower_gpu.errors import ClientsFailedError
from flower_gpu.simulation.run import _identity
from flower_gpu.strategies.streaming import Buffered


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[GridUnderTest]:
    """A grid with four nodes that handles two messages at a time."""
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "in-process")
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with _identity(RUN_ID), caplog.at_level(logging.INFO, "flwr"):
        grid = GridUnderTest(2)
        yield grid
        grid.close()


def wait_until_cancelled(harness: GridUnderTest, reply: Message) -> None:
    until(lambda: reply.metadata.reply_to_message_id in harness.handling.cancelled)


def start(harness: GridUnderTest, strategy: FedBuff, timeout: float, **options: object) -> Result:
    initial = ArrayRecord([np.zeros(2)])
    return strategy.start(harness.grid, initial, timeout=timeout, **{"num_rounds": 3, **options})


def test_the_time_limit_is_paused_while_no_message_can_get_a_worker(harness: GridUnderTest) -> None:
    harness.handling.stuck = time.monotonic()

    def wait_for_cores(reply: Message) -> None:
        harness.handling.gate.wait(60)
        harness.handling.stuck = None

    harness.handling.on_reply = wait_for_cores
    timer = threading.Timer(4.0, harness.handling.gate.set)
    timer.start()
    result = start(harness, FedBuff(2, 2), timeout=3, num_rounds=1)
    assert list(result.train_metrics_clientapp) == [1] and result.arrays["0"].numpy().tolist() == [1, 1]


def test_replies_that_came_in_time_count_after_a_long_evaluation(
    harness: GridUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            time.sleep(4)
        return MetricRecord({"accuracy": 0.5})

    result = start(harness, FedBuff(2, 4), timeout=3, evaluate_fn=evaluate)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert "Received 2 results and 0 failures" in caplog.text
    assert "error in reply" not in caplog.text and not harness.handling.cancelled


def test_a_late_message_is_a_failure_and_is_cancelled(
    harness: GridUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    def first_is_late(reply: Message) -> None:
        if len(harness.handling.begun) == 1:
            wait_until_cancelled(harness, reply)

    harness.handling.on_reply = first_is_late
    result = start(harness, FedBuff(1, 1), timeout=3, num_rounds=2)
    assert list(result.train_metrics_clientapp) == [2]
    assert harness.handling.cancelled[0] == harness.handling.begun[0]
    (warning,) = [record.getMessage() for record in caplog.records if "error in reply" in record.getMessage()]
    assert "no reply within 3 s" in warning


def test_messages_sent_together_with_a_cancelled_message_continue(harness: GridUnderTest) -> None:
    sent = Buffered([*harness.messages(1, "wait"), *harness.messages(1, "gate"), *harness.messages(1)])
    cancelled, *others = harness.grid.push_messages(sent)
    harness.grid.cancel_messages([cancelled])
    until(lambda: cancelled in harness.handling.cancelled or cancelled not in harness.handling.begun)
    harness.handling.gate.set()
    until(lambda: len(harness.grid.wait_for_replies(others, 0)) == 2)
    assert [reply.has_error() for reply in harness.grid.pull_messages(others)] == [False, False]
    assert harness.handling.cancelled in ([cancelled], [])


def test_a_run_in_which_every_message_is_late_has_no_result(harness: GridUnderTest) -> None:
    harness.handling.on_reply = lambda reply: wait_until_cancelled(harness, reply)
    with pytest.raises(ClientsFailedError, match=r"no client has sent an update in 2 rounds.*within 0\.3 s"):
        start(harness, FedBuff(2, 2), timeout=0.3, num_rounds=2)
    until(lambda: set(harness.handling.begun) <= set(harness.handling.cancelled))
