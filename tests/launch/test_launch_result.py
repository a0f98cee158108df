"""From a trace to a result, to lines and to a table."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder, write_json
from flower_gpu.errors import ConfigError
from flower_gpu.launch.display import Failures, LaunchDisplay
from flower_gpu.launch.result import print_table, result_of
from flower_gpu.launch.supervisor import new_lines
from flower_gpu.watch.history import History


def event(name: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "time": time, "event": name, **fields}


def worker(name: str, time: float, pid: int, **fields: Any) -> dict[str, Any]:
    known = {"pid": pid, "client": "0", "task": "fit", "start_method": "spawn"}
    return event(name, time, **known, **fields)


METRICS = {"loss": 0.5, "accuracy": 0.75, "precision": 0.7, "recall": 0.6, "f1": 0.65, "num_examples": 9}
EVENTS = [
    event("round", 100.0, round=0, num_rounds=2, metrics={"loss": 2.5}),
    worker("worker_started", 100.5, 11),
    event("progress", 100.6, pid=11, client="0", desc="epoch 1", n=1, total=4),
    worker("worker_finished", 101.0, 11, seconds=0.5, outcome="ok", error=None),
    worker("worker_started", 101.5, 12),
    event("round", 102.25, round=1, num_rounds=2, metrics=METRICS),
    worker("worker_started", 102.5, 11),  # the kernel gives out a pid again
    worker("worker_finished", 103.0, 11, seconds=0.25, outcome="died", error="KilledError: gone\nmore"),
    event("round", 104.0, round=2, num_rounds=2, metrics={"loss": float("nan"), "accuracy": True}),
]
NUMBERS = {name: value for name, value in METRICS.items() if name != "num_examples"}
NOTHING = dict.fromkeys(("loss", "accuracy", "precision", "recall", "f1"))
NO_MESSAGES = {"messages": 0, "failed": 0}


def row(number: int, seconds: float | None, told: dict[str, Any], **figures: float) -> dict[str, Any]:
    counted = {**NO_MESSAGES, "metrics": {"server-evaluate": told}}
    return {"round": number, **NOTHING, **figures, "seconds": seconds, **counted}


def ran(pid: int, seconds: float | None) -> dict[str, Any]:
    return {"pid": pid, "client": "0", "task": "fit", "start_method": "spawn", "seconds": seconds}


RESULT = {
    "initial": row(0, None, {"loss": 2.5}, loss=2.5),
    "rounds": [row(1, 2.25, METRICS, **NUMBERS), row(2, 1.75, {"loss": None})],
    **NO_MESSAGES,
    "workers": [ran(11, 0.5), ran(12, None), ran(11, 0.25)],
}


def build_result(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    history = History()
    history.feed(events)
    return result_of(history)


def write_trace(path: Path, events: list[dict[str, Any]], torn: str = "") -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in events) + torn)


def test_result_of_a_trace() -> None:
    assert build_result(EVENTS) == RESULT


@pytest.mark.parametrize("torn", ['{"v": 1, "time": 105.0, "ev', "\x00\x00", "[1]\n", '"text"\n', "\n"])
def test_torn_lines_change_nothing(torn: str, tmp_path: Path) -> None:
    path = tmp_path / trace.FILE_NAME
    write_trace(path, EVENTS, torn)
    assert build_result(trace.read(path)) == RESULT
    assert build_result(trace.Follower(path).read_new()) == RESULT


def test_events_nobody_knows_are_skipped() -> None:
    strange = [
        event("later", 1.0),
        event("round", 1.0),
        event("round", 1.0, round="x"),
        event("round_finished", 1.0, round="x", task="train"),
        event("round_finished", 1.0, metrics=[]),
        {"v": 1},
    ]
    assert build_result(strange) == {"initial": None, "rounds": [], **NO_MESSAGES, "workers": []}


def test_a_round_reported_twice_counts_once() -> None:
    events = [
        event("round", 1.0, round=1, metrics={"loss": 2}),
        event("round", 2.0, round=1, metrics={"loss": 1}),
        event("round", 5.0, round=2, metrics={"loss": 1}),
    ]
    first, second = build_result(events)["rounds"]
    assert (first["loss"], second["seconds"]) == (1.0, 3.0)


def test_end_of_a_worker_without_its_start() -> None:
    (found,) = build_result([worker("worker_finished", 1.0, 5, seconds=2.0)])["workers"]
    assert (found["pid"], found["seconds"]) == (5, 2.0)


def test_following_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    follower = trace.Follower(path)
    assert new_lines(follower) == []
    path.write_bytes(b"one\ntw")
    assert new_lines(follower) == ["one"]
    with path.open("ab") as file:
        file.write(b"o\r\n\x1b[92mthree\x1b[0m\n\xff")
    assert new_lines(follower) == ["two", "three"]
    assert new_lines(follower) == []


def test_result_file_is_json_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, build_result(EVENTS))
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == RESULT
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def make_folder(log_dir: Path) -> str:
    return RunFolder.create(log_dir).path.name


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        names = pool.map(make_folder, [tmp_path / "runs"] * 40, chunksize=1)
    assert len(set(names)) == 40 == len(list((tmp_path / "runs").iterdir()))


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--log-dir"):
        RunFolder.create(tmp_path / "file")


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay(None)
    for each in EVENTS:
        display.show(each)
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "round 0/2  server-evaluate                           loss 2.5",
        "round 1/2  server-evaluate                           loss 0.5, accuracy 0.75, precision 0.7",
        "round 2/2  server-evaluate                           loss nan",
    ]


def finished(time: float, number: int, task: str, messages: int, failed: int, **metrics: Any) -> Any:
    fields = {"round": number, "task": task, "messages": messages, "failed": failed, "seconds": 1.25}
    return event("round_finished", time, **fields, metrics=metrics)


def reply(time: float, task: str, error: str | None = None) -> dict[str, Any]:
    return event("reply", time, round=1, task=task, node=2**63 + 1, error=error, metrics={})


#: Of an app that knows nothing of flower_gpu, with Flower's own FedAvg and an evaluation on the clients.
RECORDED = [
    event("strategy_started", 10.0, strategy="FedAvg", num_rounds=1),
    event("round_started", 10.5, round=1, task="train", messages=2),
    reply(11.0, "train"),
    reply(12.0, "train", "RuntimeError: no"),
    finished(12.5, 1, "train", 2, 1, train_loss=0.5),
    event("round_started", 12.5, round=1, task="evaluate", messages=2),
    reply(13.0, "evaluate"),
    reply(13.0, "evaluate"),
    finished(13.5, 1, "evaluate", 2, 0, loss=0.25, eval_acc=0.875),
    event("round", 14.0, round=1, num_rounds=1, metrics={"accuracy": 0.75, "f1": 0.5}),
    finished(14.0, 1, "server-evaluate", 0, 0, accuracy=0.75),
]


def test_rounds_of_any_app(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = build_result(RECORDED)
    assert result["rounds"] == [
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
    monkeypatch.setenv("COLUMNS", "100")
    print_table(result)
    assert cells(capsys.readouterr().out) == [
        ["round", "accuracy", "F1", "loss", "eval_acc", "train_loss", "seconds"],
        ["1", "0.7500", "0.5000", "0.2500", "0.8750", "0.5000", "4.0"],
    ]


def test_lines_of_any_app_are_those_of_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay(None)
    for each in RECORDED:
        display.show(each)
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "round 1/1  train                2/2 clients  1.25 s  1 failed, train_loss 0.5",
        "round 1/1  evaluate             2/2 clients  1.25 s  loss 0.25, eval_acc 0.875",
        "round 1/1  server-evaluate                           accuracy 0.75",
    ]


def test_metrics_of_one_name_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    events = [finished(1.0, 1, task, 1, 0, loss=0.5) for task in ("train", "evaluate", "server-evaluate")]
    print_table(build_result(events))
    title, _ = cells(capsys.readouterr().out)
    assert title == ["round", "loss", "evaluate loss", "train loss", "seconds"]


def test_quiet_shows_what_has_failed_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    display = LaunchDisplay(None, is_quiet=True)
    failures = Failures(tmp_path / "failures.log", display)
    for each in EVENTS:
        display.show(each)
        failures.see(each)
    for then in ("again", "on the CPU", "failed"):
        display.show(event("out_of_memory", 105.0, client="0", task="fit", uuid="GPU-0", then=then))
    told = capsys.readouterr()
    assert told.out == ""
    first, *error, last = told.err.splitlines()
    assert (first, error) == ("fit of client 0 failed:", ["KilledError: gone", "more"])
    assert last.startswith("fit of client 0 ran out of memory")


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(RESULT)
    assert cells(capsys.readouterr().out) == [
        ["round", "loss", "accuracy", "F1", "seconds"],
        ["initial", "2.5000", "-", "-", "-"],
        ["1", "0.5000", "0.7500", "0.6500", "2.2"],
        ["2", "-", "-", "-", "1.8"],
    ]


def test_without_leases_nothing_is_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(RESULT)
    assert "lease" not in capsys.readouterr().out


GIB = 2**30


def lease(name: str, client: str, waited_s: float, *sizes: int, task: str = "fit") -> dict[str, Any]:
    gpus = [
        {"uuid": f"GPU-{index}", "index": index, "name": "Stub", "memory_bytes": size}
        for index, size in enumerate(sizes)
    ]
    fields = {"client": client, "task": task, "lease": name, "gpus": gpus, "alone": False}
    return event("lease_granted", 1.0, **fields, waited_s=waited_s)


def leased(name: str, pid: int, client: str, **fields: Any) -> dict[str, Any]:
    known = {"pid": pid, "client": client, "task": "fit", "start_method": "fork", "lease": name}
    return event("worker_finished", 2.0, **known, seconds=1.0, **fields)


PEAK = {"uuid": "GPU-0", "peak_bytes": GIB, "lease_bytes": 2 * GIB}
OUT = {"client": "1", "task": "fit", "kind": "over_cap", "uuid": "GPU-0", "cap_bytes": 3 * GIB // 2}
LEASE_EVENTS = [
    worker("worker_started", 0.5, 9),
    worker("worker_finished", 0.7, 9, seconds=0.2, outcome="ok"),
    lease("a", "0", 0.0, 2 * GIB),
    lease("b", "1", 1.5, 2 * GIB),
    leased("a", 10, "0", outcome="ok", gpus=[PEAK]),
    leased("b", 11, "1", outcome="out of memory", error="OutOfMemoryError: no", gpus=None),
    event("out_of_memory", 2.5, **OUT, lease="b", then="again"),
    lease("c", "1", 4.0, 4 * GIB, 4 * GIB),
    leased("c", 12, "1", outcome="out of memory", error="OutOfMemoryError: no", gpus=[PEAK]),
    event("out_of_memory", 2.6, **OUT, lease="c", then="on the CPU"),
    event(
        "worker_finished", 3.0, pid=13, client="1", task="fit", start_method="fork", seconds=1.0, outcome="ok"
    ),
]


def test_workers_have_their_leases() -> None:
    result = build_result(LEASE_EVENTS)
    first = {"index": 0, "uuid": "GPU-0", "memory_bytes": 2 * GIB}
    assert [(worker["pid"], worker["waited_s"], worker["gpus"]) for worker in result["workers"]] == [
        (9, 0.0, []),
        (10, 0.0, [{**first, "peak_bytes": GIB}]),
        (11, 1.5, [{**first, "peak_bytes": None}]),
        (
            12,
            4.0,
            [
                {"index": 0, "uuid": "GPU-0", "memory_bytes": 4 * GIB, "peak_bytes": GIB},
                {"index": 1, "uuid": "GPU-1", "memory_bytes": 4 * GIB, "peak_bytes": None},
            ],
        ),
        (13, 0.0, []),
    ]
    assert result["leases"] == {
        "count": 3,
        "waited_s": 5.5,
        "longest_wait_s": 4.0,
        "out_of_memory": {"again": 1, "on the CPU": 1},
    }


def test_lines_say_what_follows_when_memory_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay(None)
    for each in LEASE_EVENTS:
        display.show(each)
    assert capsys.readouterr().out.splitlines() == [
        "fit of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again",
        "fit of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again on the CPU",
    ]


def cells(output: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in output.splitlines()
        if "│" in line or "┃" in line
    ]


def test_table_of_leases(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(build_result([*EVENTS[:1], *LEASE_EVENTS]))
    output = capsys.readouterr().out
    assert cells(output)[2:] == [
        ["client", "calls", "on CPU", "GPU", "lease", "used", "waited s"],
        ["0", "2", "1", "0", "2.0 GiB", "1.0 GiB", "0.0"],
        ["1", "3", "1", "0, 1", "2.0 GiB to 4.0 GiB", "1.0 GiB", "5.5"],
    ]
    assert output.splitlines()[-2:] == [
        "leases      3, waited for 5.5 s in all, 4.0 s at most",
        "memory      ran out 2 times: 1 ran again, 1 ran on the CPU",
    ]
    assert max(map(len, output.splitlines())) <= 80


def test_table_of_many_clients_shows_those_that_waited_longest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    events = []
    for client in range(64):
        events.append(lease(f"lease-{client}", str(client), float(client), GIB))
        events.append(leased(f"lease-{client}", 100 + client, str(client)))
    print_table(build_result(events))
    output = capsys.readouterr().out
    assert [row[0] for row in cells(output)[2:]] == [str(client) for client in range(44, 64)]
    assert "44 more clients waited less" in output
