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
from flower_gpu.launch.follow import LineFollower, TraceFollower
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
    assert build_result(TraceFollower(path).read_new()) == RESULT


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


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = QuietDisplay(None)
    for each in EVENTS:
        display.event(each)
    assert capsys.readouterr().out == ""


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
