"""Messages that a worker handles together: what stays separate, and which failures they share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recycled_handler import Handler, has_failed
from waiting import until

from flower_gpu.simulation.clients import Clients


def test_a_message_in_a_batch_has_the_same_facts_as_alone(new_handler: Callable[..., Handler]) -> None:
    handler, alone = new_handler(), new_handler()
    together = [handler.together(*[""] * 3) for _ in range(2)]
    singles = [[alone(node, kind="train.many") for node in range(3)] for _ in range(2)]
    for in_batch, expected in zip(together, singles, strict=True):
        for name in ("message_seed", "times"):
            assert [facts[name] for facts in in_batch] == [facts[name] for facts in expected]
        assert {facts["together"] for facts in in_batch} == {3} and len(
            {facts["pid"] for facts in in_batch}
        ) == 1
    assert len({facts["message_seed"] for facts in together[0]}) == 3
    assert {facts["together"] for facts in singles[0]} == {1}
    counts = [each.handler.facts()["batches"] for each in (handler, alone)]
    assert [(each["count"], each["messages"]) for each in counts] == [(2, 6), (0, 0)]


def test_an_exception_fails_all_messages_of_a_batch(new_handler: Callable[..., Handler]) -> None:
    handler = new_handler()
    assert handler.together("", "refuse", "")[1] == "no data", (
        "the app's own error reply belongs to one message"
    )
    assert [handler.times(node) for node in range(3)] == [1, 0, 1]
    failed = handler.together("", "fail", "")
    for node, error in enumerate(failed):
        assert error.startswith(f"train.many of client {node}: ValueError: of the app")
        assert "The 3 messages that were handled together have all failed" in error
    assert [handler.times(node) for node in range(3)] == [1, 0, 1], "the states are unchanged"
    assert [facts["times"] for facts in handler.together("", "", "")] == [2, 1, 2]


def test_a_dead_worker_fails_its_whole_batch(new_handler: Callable[..., Handler]) -> None:
    handler, again = new_handler(), new_handler(tries=2)
    for node, error in enumerate(handler.together("", "die", "")):
        assert error.startswith(f"train.many of client {node}: the worker")
        assert "exited with code 3" in error
    assert handler(0)["times"] == 1
    # On a host of a cluster each message is handled again, alone, so the other messages do not fail.
    results = again.together("", "die", "")
    assert "exited with code 3" in results[1] and "together" not in results[1]
    assert [results[node]["together"] for node in (0, 2)] == [1, 1]


@pytest.mark.parametrize("task", ["too large", "killed"])
def test_a_batch_that_runs_out_of_memory_is_split(task: str, new_handler: Callable[..., Handler]) -> None:
    handler = new_handler()
    # Its reply says that the app takes several messages.
    handler(0, kind="train.many")
    assert handler.handler.batches.largest("train.many") == 64
    results = handler.together(*[task] * 6)
    assert [facts["together"] for facts in results] == [4, 4, 4, 4, 2, 2]
    assert handler.handler.batches.largest("train.many") == 4
    counts = handler.handler.facts()["batches"]
    assert (counts["count"], counts["messages"]) == (2, 6), "each message is counted once"


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (64, {}),
        (3, {"calls_per_worker": 3}),
        (1, {"is_strict": True}),
        (1, {"clients": {1: {"timeout-s": 600}}}),
        (1, {"clients": {"*": {"slow-down": 1.01}}}),
        (64, {"clients": {"*": {"timeout-s": 600}}}),
    ],
)
def test_only_some_runs_have_batches(
    expected: int, options: dict[str, Any], new_handler: Callable[..., Handler]
) -> None:
    """Runs with --deterministic have none, nor do clients with different resources."""
    if "clients" in options:
        options = {"clients": Clients.of(options["clients"], 8)}
    handler = new_handler(**options)
    for kind in ("train", "train.many"):
        assert handler.handler.batches.largest(kind) == handler.handler.batches.choose(kind, 100) == 1
        handler(0, kind=kind)
    assert handler.handler.batches.largest("train") == 1
    assert handler.handler.batches.largest("train.many") == expected


def test_a_message_of_a_batch_is_cancelled(new_handler: Callable[..., Handler], tmp_path: Path) -> None:
    """The other messages of the batch continue. Its worker ends only when all of them are cancelled."""
    handler = new_handler()
    handler(0)
    earlier, first = (handler.visit(node, kind="train.many") for node in range(2))
    second = handler.visit(2, "hang", kind="train.many", file=str(tmp_path / "begun"))
    handler.handler.cancel(earlier.message_id)
    remaining: list[set[str]] = []

    def cancel() -> None:
        until((tmp_path / "begun").exists)
        for visit in (first, second):
            handler.handler.cancel(visit.message_id)
            remaining.append(set(handler.handler._running))

    thread = threading.Thread(target=cancel)
    thread.start()
    answers = handler.handler(earlier, first, second)
    thread.join()
    assert remaining == [{second.message_id}, set()]
    assert all(map(has_failed, answers))
