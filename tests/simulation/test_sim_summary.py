"""The summary of a simulated run, as it is kept and as it is shown."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flower_gpu import trace
from flower_gpu.simulation.reporting import summary_lines, summary_of
from flower_gpu.trace import Event
from flower_gpu.watch.history import History


def failed(number: int, kind: str, client: int, error: str) -> Event:
    return trace.make("reply", round=number, task=kind, node=client, error=error)


def finished(number: int, kind: str, messages: int, failed: int, **metrics: Any) -> Event:
    return trace.make(
        "round_finished", round=number, task=kind, messages=messages, failed=failed, metrics=metrics
    )


def summary(failures: list[Event], **facts: Any) -> dict[str, Any]:
    history = History(keep_finished=False)
    history.feed([trace.make("strategy_started", strategy="FedAvg", num_rounds=5), *failures])
    history.feed([finished(2, "train", 200, 10, loss=0.25)])
    history.feed([finished(2, "server-evaluate", 0, 0, accuracy=0.875, loss=0.5)])
    history.feed([trace.make("strategy_finished")])
    history.feed([trace.make("run_waited", seconds=41.5), trace.make("run_waited", seconds=60)])
    return summary_of(history, "completed", clients=100, seconds=0.04, **facts)


def test_the_summary_has_what_one_wants_to_know() -> None:
    lines = summary_lines(
        summary([], workers_started=12, peak_worker_bytes=300 << 20, model_sha256="0f3c"),
        "runs/2026-01-31_12-00-00",
    )
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert shown.pop("time") == "0.04 s, 5e+03 messages/s"
    assert shown == {
        "outcome": "completed",
        "rounds": "2 of 5",
        "clients": "100, 200 messages, 0 failed",
        "waiting": "1 min 42 s of that without any worker",
        "workers": "12 started, with 300 MiB at most",
        "train": "loss 0.25",
        "server-evaluate": "accuracy 0.875, loss 0.5",
        "model": "sha256     0f3c",
        "results": "runs/2026-01-31_12-00-00",
    }


def test_rounds_that_have_finished_and_replies_are_what_counts() -> None:
    """Of a run that is interrupted in round 3: by its own history, and by the end of its trace alone."""
    before = [trace.make("strategy_started", strategy="FedAvg", num_rounds=5)]
    for server_round in (1, 2):
        begins = trace.make("round_started", round=server_round, task="train", messages=50)
        before += [begins, finished(server_round, "train", 50, 0)]
    replies = [
        trace.make("reply", round=3, task="train", node=node, error="no" if node == 1 else None)
        for node in range(5)
    ]
    history = History(keep_finished=False)
    history.feed([*before, trace.make("round_started", round=3, task="train", messages=50), *replies])
    found = summary_of(history, "interrupted", clients=50, seconds=10.0)
    shown = dict(line.split(maxsplit=1) for line in summary_lines(found, None)[:4])
    assert (shown["rounds"], shown["clients"]) == ("2 of 5", "50, 105 messages, 1 failed")
    assert shown["time"] == "10.0 s, 10.5 messages/s"
    history = History()
    history.feed([*before, trace.make("round_started", round=3, task="train", messages=50)])
    history.feed([trace.make("run_finished", outcome="interrupted", messages=105, failed=1)])
    assert (history.highest_round, history.messages_sent, history.messages_failed) == (2, 105, 1)
    history = History()  # its clients have evaluated nothing yet, and the round is not over
    history.feed(before)
    assert history.highest_round == 1


def test_a_reason_is_told_once_with_its_clients() -> None:
    failures = [
        failed(server_round, kind, client, f"{kind} of client {client}: ValueError: no data")
        for server_round in (1, 2)
        for client in (8, 3)
        for kind in ("train", "evaluate")
    ]
    failures.append(failed(2, "train", 3, "no reply within 60 s"))
    for client in range(7):  # each has a worker of its own, which takes its own time
        how = "exited with code 0 (sys.exit in task.py, line 3)"
        text = f"the worker (pid {100 + client}) {how} after {client}.5 s"
        failures.append(failed(1, "train", client, f"train of client {client}: {text}, before it returned"))
    lines = summary_lines(summary(failures), None)
    assert lines[lines.index("failed:") :] == [
        "failed:",
        "  clients 3, 8, train and evaluate in rounds 1, 2 (8 messages): ValueError: no data",
        "  clients 0, 1, 2, 3, 4 and 2 others, train in round 1: the worker exited with code 0 (sys.exit in "
        "task.py, line 3), before it returned",
        "  client 3, train in round 2: no reply within 60 s",
    ]


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 300))
def test_of_many_reasons_ten_are_named_and_all_failures_are_counted(clients: int, reasons: int) -> None:
    failures = [failed(1, "train", client, f"reason {client % reasons}") for client in range(clients)]
    found = summary(failures)
    lines = summary_lines(found, None)
    named = lines[lines.index("failed:") + 1 :]
    more = sum(reason["count"] for reason in found["failures"][10:])
    if more > 0:
        assert named.pop() == f"  and {more} more failed messages"
    assert len(named) == min(clients, reasons, 10)
    assert found["failed"] == clients == sum(reason["count"] for reason in found["failures"])
