"""The result of a run: how it follows from the history, and how it is printed at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.strategies.recording.recorder import write_event
from flower_gpu.trace import Event
from flower_gpu.watch.history import History
from flower_gpu.watch.result import places_of, result_lines, result_of, write_results


def failed(number: int, kind: str, client: int, error: str) -> Event:
    return trace.make("reply", round=number, task=kind, node=client, error=error)


def finished(number: int, kind: str, messages: int, failed: int, **metrics: Any) -> Event:
    return trace.make(
        "round_finished", round=number, task=kind, messages=messages, failed=failed, metrics=metrics
    )


def summary(failures: list[Event], **facts: Any) -> dict[str, Any]:
    events = [
        trace.make("run_started", kind="simulate", clients=100),
        trace.make("strategy_started", strategy="FedAvg", num_rounds=5),
        *failures,
        finished(2, "train", 200, 10, loss=0.25),
        finished(2, "server-evaluate", 0, 0, accuracy=0.875, loss=0.5),
        trace.make("strategy_finished"),
        trace.make("run_waited", seconds=41.5),
        trace.make("run_waited", seconds=60),
    ]
    counts = {"messages": 200, "failed": len(failures)}
    events.append(trace.make("run_finished", outcome="completed", **counts, facts=facts))
    history = History(keep_finished=False)
    began = events[0]["time"]
    history.feed([{**event, "time": began + 0.04 * (event is events[-1])} for event in events])
    return result_of(history)


def test_the_wait_of_a_resumed_run_counts_since_its_resumption() -> None:
    history = History(keep_finished=False)
    started = trace.make("run_started", kind="simulate", clients=2)
    waits = [trace.make("run_waited", seconds=seconds) for seconds in (41.5, 2.5)]
    history.feed([started, waits[0], trace.make("run_finished", outcome="interrupted"), started, waits[1]])
    assert history.run.waited_s == 2.5


def test_the_summary_of_a_run() -> None:
    lines = result_lines(
        summary([], workers_started=12, peak_worker_bytes=300 << 20, model_sha256="0f3c"),
        places=[("results", "runs/2026-01-31_12-00-00")],
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


def test_each_reason_is_listed_once_with_its_clients() -> None:
    failures = [
        failed(server_round, kind, client, f"{kind} of client {client}: ValueError: no data")
        for server_round in (1, 2)
        for client in (8, 3)
        for kind in ("train", "evaluate")
    ]
    failures.append(failed(2, "train", 3, "no reply within 60 s"))
    # Each client has its own worker, with its own pid and duration.
    for client in range(7):
        how = "exited with code 0 (sys.exit in task.py, line 3)"
        text = f"the worker (pid {100 + client}) {how} after {client}.5 s"
        failures.append(failed(1, "train", client, f"train of client {client}: {text}, before it returned"))
    lines = result_lines(summary(failures))
    assert lines[lines.index("failed:") :] == [
        "failed:",
        "  clients 3, 8, train and evaluate in rounds 1, 2 (8 messages): ValueError: no data",
        "  clients 0, 1, 2, 3, 4 and 2 others, train in round 1: the worker exited with code 0 (sys.exit in "
        "task.py, line 3), before it returned",
        "  client 3, train in round 2: no reply within 60 s",
    ]


def test_a_reason_includes_the_informative_line_of_the_error() -> None:
    """Some errors begin with an empty line or with a line that only announces the next one. Some are long."""
    shapes = "size mismatch for conv.weight: the shape in current model is torch.Size([4, 4])"
    reasons = [
        f"RuntimeError: Error(s) in loading state_dict for Net:\n\t{shapes}.\nmore",
        "TypeError: \n\nno data",
        f"ValueError: {'x' * 400} is no label of this data set",
    ]
    failures = [failed(1, "train", number, text) for number, text in enumerate(reasons)]
    lines = result_lines(summary(failures))
    first, second, third = lines[lines.index("failed:") + 1 :]
    assert first.endswith(f": RuntimeError: Error(s) in loading state_dict for Net: {shapes}.")
    assert second.endswith(": TypeError: no data")
    assert ": ValueError: xxx" in third and third.endswith("x is no label of this data set")
    assert " ... " in third and len(third) < 300


def test_the_last_lines_name_the_results_even_below_failures() -> None:
    result = summary([failed(1, "train", client, "no data") for client in range(3)], model_sha256="0f3c")
    *_, last_failure, results, report = result_lines(result, places=places_of(RunFolder(Path("/runs/one"))))
    assert last_failure == "  clients 0, 1, 2, train in round 1: no data"
    assert (results, report) == ("results          /runs/one", "report           flower-gpu report /runs/one")


@given(st.integers(1, 400), st.integers(1, 300))
def test_ten_reasons_are_named_and_all_failures_are_counted(clients: int, reasons: int) -> None:
    failures = [failed(1, "train", client, f"reason {client % reasons}") for client in range(clients)]
    result = summary(failures)
    lines = result_lines(result)
    named = lines[lines.index("failed:") + 1 :]
    remaining = sum(reason["count"] for reason in result["failures"][10:])
    if remaining > 0:
        assert named.pop() == f"  and {remaining} more failed messages"
    assert len(named) == min(clients, reasons, 10)
    assert result["failed"] == clients == sum(reason["count"] for reason in result["failures"])


# Results of traces.


def event(name: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "time": time, "event": name, **fields}


def worker(name: str, time: float, pid: int, **fields: Any) -> dict[str, Any]:
    worker_fields = {"pid": pid, "client": "0", "task": "fit", "start_method": "spawn"}
    return event(name, time, **worker_fields, **fields)


METRICS = {"loss": 0.5, "accuracy": 0.75, "precision": 0.7, "recall": 0.6, "f1": 0.65, "num_examples": 9}
EVENTS = [
    event("round", 100.0, round=0, num_rounds=2, metrics={"loss": 2.5}),
    worker("worker_started", 100.5, 11),
    event("progress", 100.6, pid=11, client="0", desc="epoch 1", n=1, total=4),
    worker("worker_finished", 101.0, 11, seconds=0.5, outcome="ok", error=None),
    worker("worker_started", 101.5, 12),
    event("round", 102.25, round=1, num_rounds=2, metrics=METRICS),
    worker("worker_started", 102.5, 11),  # the kernel has reused the pid
    worker("worker_finished", 103.0, 11, seconds=0.25, outcome="died", error="KilledError: gone\nmore"),
    event("round", 104.0, round=2, num_rounds=2, metrics={"loss": float("nan"), "accuracy": True}),
]
NUMBERS = {name: value for name, value in METRICS.items() if name != "num_examples"}
NOTHING = dict.fromkeys(("loss", "accuracy", "precision", "recall", "f1"))
NO_MESSAGES = {"messages": 0, "failed": 0}


def row(number: int, seconds: float | None, metrics: dict[str, Any], **figures: float) -> dict[str, Any]:
    message_fields = {**NO_MESSAGES, "metrics": {"server-evaluate": metrics}}
    return {"round": number, **NOTHING, **figures, "seconds": seconds, **message_fields}


def result_of_events(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    history = History()
    history.feed(events)
    return result_of(history)


def test_result_of_a_trace() -> None:
    result = result_of_events(EVENTS)
    assert result["initial"] == row(0, None, {"loss": 2.5}, loss=2.5)
    assert result["rounds"] == [row(1, 2.25, METRICS, **NUMBERS), row(2, 1.75, {"loss": None})]
    assert (result["rounds_finished"], result["num_rounds"], result["workers_started"]) == (2, 2, 3)
    assert (result["messages"], result["failed"], result["failures"]) == (0, 0, [])
    nothing = {"count": 0, "waited_s": 0.0, "longest_wait_s": 0.0}
    assert (result["leases"], result["cores"]) == ({**nothing, "out_of_memory": {}}, nothing)


def test_numbers_that_are_not_finite_reach_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no such numbers, so they are null in the trace and in the result."""
    values = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": None, "e": 1.5}
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    write_event(event("round_finished", 1.0, round=1, task="train", messages=1, failed=0, metrics=values))
    [line] = (tmp_path / trace.FILE_NAME).read_text().splitlines()
    json.loads(line, parse_constant=pytest.fail)
    history = History.read(tmp_path / trace.FILE_NAME)
    write_results(RunFolder(tmp_path), history.rounds.parts, result_of(history))
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1] == "1,train,nan,inf,-inf,nan,1.5"
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["metrics"]["train"] == {**dict.fromkeys("abcd"), "e": 1.5}
    assert result["not_finite"] == {"train": {"a": "NaN", "b": "Infinity", "c": "-Infinity"}}
    (line,) = [line for line in result_lines(result) if line.startswith("train ")]
    assert line.split(maxsplit=1)[1] == "a nan, b inf, c -inf, e 1.5"


@pytest.mark.parametrize("torn", ['{"v": 1, "time": 105.0, "ev', "\x00\x00", "[1]\n", '"text"\n', "\n"])
def test_torn_lines_change_nothing(torn: str, tmp_path: Path) -> None:
    path = tmp_path / trace.FILE_NAME
    path.write_text("".join(json.dumps(event_) + "\n" for event_ in EVENTS) + torn)
    result = result_of_events(EVENTS)
    assert result_of_events(trace.read(path)) == result
    assert result_of_events(trace.Follower(path).read_new()) == result


def test_unknown_events_are_skipped() -> None:
    strange = [
        event("later", 1.0),
        event("round", 1.0),
        event("round", 1.0, round="x"),
        event("round_finished", 1.0, round="x", task="train"),
        event("round_finished", 1.0, metrics=[]),
        {"v": 1},
    ]
    assert result_of_events(strange) == result_of_events([])
    # A worker may have an end without a start.
    assert result_of_events([worker("worker_finished", 1.0, 5, seconds=2.0)])["workers_started"] == 1


def test_a_round_reported_twice_counts_once() -> None:
    events = [
        event("round", 1.0, round=1, metrics={"loss": 2}),
        event("round", 2.0, round=1, metrics={"loss": 1}),
        event("round", 5.0, round=2, metrics={"loss": 1}),
    ]
    first, second = result_of_events(events)["rounds"]
    assert (first["loss"], second["seconds"]) == (1.0, 3.0)


def part(time: float, number: int, task: str, messages: int, failed: int, **metrics: Any) -> Any:
    fields = {"round": number, "task": task, "messages": messages, "failed": failed, "seconds": 1.25}
    return event("round_finished", time, **fields, metrics=metrics)


def answer(time: float, task: str, error: str | None = None) -> dict[str, Any]:
    return event("reply", time, round=1, task=task, node=2**63 + 1, error=error, metrics={})


#: Events of an app that does not use flower_gpu, with Flower's own FedAvg and an evaluation on the clients.
RECORDED = [
    event("strategy_started", 10.0, strategy="FedAvg", num_rounds=1),
    event("round_started", 10.5, round=1, task="train", messages=2),
    answer(11.0, "train"),
    answer(12.0, "train", "RuntimeError: no"),
    part(12.5, 1, "train", 2, 1, train_loss=0.5),
    event("round_started", 12.5, round=1, task="evaluate", messages=2),
    answer(13.0, "evaluate"),
    answer(13.0, "evaluate"),
    part(13.5, 1, "evaluate", 2, 0, loss=0.25, eval_acc=0.875),
    event("round", 14.0, round=1, num_rounds=1, metrics={"accuracy": 0.75, "f1": 0.5}),
    part(14.0, 1, "server-evaluate", 0, 0, accuracy=0.75),
]


def test_rounds_of_any_app() -> None:
    assert result_of_events(RECORDED)["rounds"] == [
        {
            "round": 1,
            **{**NOTHING, "loss": 0.25, "accuracy": 0.75, "f1": 0.5},
            "seconds": 4.0,
            "messages": 4,
            "failed": 1,
            "metrics": {
                "train": {"train_loss": 0.5},
                "evaluate": {"loss": 0.25, "eval_acc": 0.875},
                "server-evaluate": {"accuracy": 0.75, "f1": 0.5},
            },
        }
    ]


def lease(name: str, waited_s: float) -> dict[str, Any]:
    gpus = [{"uuid": "GPU-0", "index": 0, "name": "Stub", "memory_bytes": 2**30}]
    fields = {"client": "1", "task": "fit", "lease": name, "gpus": gpus, "alone": False}
    return event("lease_granted", 1.0, **fields, waited_s=waited_s)


OUT = {"client": "1", "task": "fit", "kind": "over_cap", "uuid": "GPU-0", "cap_bytes": 2**29}
LEASE_EVENTS = [
    lease("a", 0.0),
    lease("b", 1.5),
    event("out_of_memory", 2.5, **OUT, lease="b", then="again"),
    lease("c", 4.0),
    event("out_of_memory", 2.6, **OUT, lease="c", then="on the CPU"),
]


def test_leases_are_summed_up() -> None:
    cores = [event("cores_granted", 1.0, lease=f"c{waited_s}", waited_s=waited_s) for waited_s in (0.0, 8.0)]
    result = result_of_events([*EVENTS[:1], *LEASE_EVENTS, *cores])
    assert result["cores"] == {"count": 2, "waited_s": 8.0, "longest_wait_s": 8.0}
    # A request is for cores and main memory together, and the trace does not tell which of them was short.
    (line,) = [line for line in result_lines(result) if line.startswith("cores")]
    assert line.split("  ")[0] == "cores, memory"
    assert line.endswith("2, waited for 8.00 s in all, 8.00 s at most")
    assert result["leases"] == {
        "count": 3,
        "waited_s": 5.5,
        "longest_wait_s": 4.0,
        "out_of_memory": {"again": 1, "on the CPU": 1},
    }
    shown = dict(line.split(maxsplit=1) for line in result_lines(result)[1:])
    assert shown["leases"] == "3, waited for 5.50 s in all, 4.00 s at most"
    assert shown["memory"] == "ran out 2 times: 1 ran again, 1 ran on the CPU"


def test_latest_metrics_and_round_end_match_all_rounds() -> None:
    """The history keeps the latest metrics and the end of the last round, so displays read no other parts."""
    history = History(keep_finished=False, keep_rounds=True)
    parts: dict[tuple[int, str], tuple[float, dict[str, Any]]] = {}
    time = 0.0

    def check(highest: int) -> None:
        assert history.rounds.highest_round == highest
        ends = [at for (number, _), (at, _) in parts.items() if number <= highest]
        assert history.rounds.rounds_ended_at == max(ends, default=None)
        reported = sorted(((at, task, metrics) for (_, task), (at, metrics) in parts.items() if metrics))
        last = {task: metrics for _, task, metrics in reported}
        assert history.rounds.last_metrics == last
        tasks = list(dict.fromkeys(task for _, task, _ in reversed(reported)))
        assert list(history.rounds.last_metrics) == tasks[::-1]

    def finish(number: int, task: str, **metrics: Any) -> None:
        nonlocal time
        time += 1.0
        history.feed([event("round_finished", time, round=number, task=task, metrics=metrics)])
        parts[number, task] = time, metrics

    history.feed([event("strategy_started", time, strategy="FedAvg", num_rounds=9)])
    finish(0, "server-evaluate", loss=2.0)
    for number in range(1, 6):
        history.feed([event("round_started", time, round=number, task="train", messages=2)])
        check(number - 1)
        finish(number, "train", **({"loss": 1.0 / number} if number != 4 else {}))
        finish(number, "server-evaluate", accuracy=number / 10)
        check(number - 1)
    history.feed([event("strategy_resumed", time, round=3)])
    parts = {key: part for key, part in parts.items() if key[0] <= 3}
    check(3)
    finish(4, "train", loss=0.125)
    check(3)
    history.feed([event("strategy_finished", time)])
    check(4)
    history.feed([event("run_finished", time, outcome="completed")])
    assert history.calls.current_round == 4
