"""What a launch shows while it runs, from the trace; its folder."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError
from flower_gpu.launch.display import Failures, LaunchDisplay
from flower_gpu.launch.supervisor import new_lines


def event(name: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "time": time, "event": name, **fields}


def worker(name: str, time: float, pid: int, **fields: Any) -> dict[str, Any]:
    known = {"pid": pid, "client": "0", "task": "fit", "start_method": "spawn"}
    return event(name, time, **known, **fields)


EVENTS = [
    event("round", 100.0, round=0, num_rounds=2, metrics={"loss": 2.5}),
    worker("worker_started", 100.5, 11),
    worker("worker_finished", 101.0, 11, seconds=0.5, outcome="ok", error=None),
    worker("worker_started", 102.5, 11),
    worker("worker_finished", 103.0, 11, seconds=0.25, outcome="died", error="KilledError: gone\nmore"),
]


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


def ran_out(time: float, then: str) -> dict[str, Any]:
    fields = {"client": "1", "task": "fit", "kind": "over_cap", "uuid": "GPU-0", "cap_bytes": 3 * 2**29}
    return event("out_of_memory", time, **fields, then=then)


#: Of a call that has a GPU.
GPUS = [{"uuid": "GPU-0", "index": 0, "name": "Stub", "memory_bytes": 2**31}]
LEASED = event("lease_granted", 1.0, client="1", task="fit", lease="b", gpus=GPUS, waited_s=1.5)
OUT = [LEASED, ran_out(2.5, "again"), ran_out(2.6, "on the CPU")]


def test_lines_say_what_follows_when_memory_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay(None)
    for each in OUT:
        display.show(each)
    assert capsys.readouterr().out.splitlines() == [
        "fit of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again",
        "fit of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again on the CPU",
    ]
