"""From a trace to a result, to lines and to a table."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.errors import ConfigError
from flower_gpu.launch.display import Display, QuietDisplay, print_table, round_line
from flower_gpu.launch.folder import RunFolder, write_json
from flower_gpu.launch.follow import LineFollower
from flower_gpu.launch.result import build_result


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
RESULT = {
    "initial": {
        "round": 0,
        "loss": 2.5,
        "accuracy": None,
        "precision": None,
        "recall": None,
        "f1": None,
        "seconds": None,
    },
    "rounds": [
        {
            "round": 1,
            "loss": 0.5,
            "accuracy": 0.75,
            "precision": 0.7,
            "recall": 0.6,
            "f1": 0.65,
            "seconds": 2.25,
        },
        {
            "round": 2,
            "loss": None,
            "accuracy": None,
            "precision": None,
            "recall": None,
            "f1": None,
            "seconds": 1.75,
        },
    ],
    "workers": [
        {"pid": 11, "client": "0", "task": "fit", "start_method": "spawn", "seconds": 0.5},
        {"pid": 12, "client": "0", "task": "fit", "start_method": "spawn", "seconds": None},
        {"pid": 11, "client": "0", "task": "fit", "start_method": "spawn", "seconds": 0.25},
    ],
}


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
    strange = [event("later", 1.0), event("round", 1.0), event("round", 1.0, round="x"), {"v": 1}]
    assert build_result(strange) == {"initial": None, "rounds": [], "workers": []}


def test_a_round_reported_twice_counts_once() -> None:
    events = [
        event("round", 1.0, round=1, metrics={"loss": 2}),
        event("round", 2.0, round=1, metrics={"loss": 1}),
    ]
    (row,) = build_result(events)["rounds"]
    assert (row["loss"], row["seconds"]) == (1.0, 1.0)


def test_end_of_a_worker_without_its_start() -> None:
    (found,) = build_result([worker("worker_finished", 1.0, 5, seconds=2.0)])["workers"]
    assert (found["pid"], found["seconds"]) == (5, 2.0)


def test_following_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    follower = LineFollower(path)
    assert follower.read_new() == []
    path.write_bytes(b"one\ntw")
    assert follower.read_new() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\r\n\x1b[92mthree\x1b[0m\n\xff")
    assert follower.read_new() == ["two", "three"]
    assert follower.read_new() == []


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
    display = Display(None)
    for each in EVENTS:
        display.event(each)
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "initial model  loss 2.500",
        "round 1/2  loss 0.500  accuracy 0.750  f1 0.650  2.2 s",
        "fit of client 0 failed: KilledError: gone",
        "round 2/2  1.8 s",
    ]


def test_quiet_shows_what_has_failed_only(capsys: pytest.CaptureFixture[str]) -> None:
    display = QuietDisplay(None)
    for each in EVENTS:
        display.event(each)
    for then in ("again", "on the CPU", "failed"):
        display.event(event("out_of_memory", 105.0, client="0", task="fit", uuid="GPU-0", then=then))
    told = capsys.readouterr()
    assert told.out == ""
    first, second = told.err.splitlines()
    assert first == "fit of client 0 failed: KilledError: gone"
    assert second.startswith("fit of client 0 ")


def test_line_without_a_number_of_rounds() -> None:
    assert round_line(RESULT["rounds"][0], None).startswith("round 1  loss 0.500")


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(RESULT)
    rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line or "┃" in line
    ]
    assert rows == [
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
    display = Display(None)
    for each in LEASE_EVENTS:
        display.event(each)
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
