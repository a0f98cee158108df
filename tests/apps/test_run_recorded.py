"""A whole run: other processes see it while it runs, and its trace has samples of the GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_stub import GIB, Host

from flower_gpu import trace
from flower_gpu.apps.recording import recorded_run, running_runs
from flower_gpu.errors import ConfigError
from flower_gpu.workers import state_folder

RECORD = """
import sys
from pathlib import Path
from flower_gpu.apps.recording import recorded_run
with recorded_run(Path(sys.argv[1]), "launch", "app", clients=3, num_rounds=2) as run:
    print("runs", flush=True)
    if "fail" in sys.argv:
        raise ValueError
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a run"
    path.mkdir()
    return path


def record(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RECORD, str(folder), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("runs")
    return process


def events(folder: Path) -> list[dict[str, object]]:
    return list(trace.read(folder / trace.FILE_NAME))


def test_the_gpus_are_sampled_before_and_after(folder: Path, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", gpus=2)
    host.set(1, used=2 * GIB, util=55, temp=61)
    process = record(folder, env=host.env)
    host.set(1, used=3 * GIB, util=None)
    process.communicate("", timeout=60)
    began, first, *_, last, ended = events(folder)
    assert (began["event"], began["kind"], began["name"]) == ("run_started", "launch", "app")
    assert (began["clients"], began["num_rounds"], began["pid"]) == (3, 2, process.pid)
    assert [gpu["uuid"] for gpu in began["gpus"]] == host.uuids  # type: ignore[attr-defined]
    assert began["gpus"][0]["capacity_bytes"] == 16 * GIB - (256 << 20)  # type: ignore[index]
    assert (first["event"], last["event"]) == ("gpu_sample", "gpu_sample")
    of_second = {"uuid": host.uuids[1], "temperature_c": 61}
    assert first["gpus"][1] == {**of_second, "used_bytes": 2 * GIB, "utilization_percent": 55}  # type: ignore[index]
    assert last["gpus"][1] == {**of_second, "used_bytes": 3 * GIB, "utilization_percent": None}  # type: ignore[index]
    assert (ended["event"], ended["outcome"]) == ("run_finished", "completed")


def test_a_failed_run_is_recorded_as_failed_and_without_gpus_there_are_no_samples(folder: Path) -> None:
    assert record(folder, "fail").wait(timeout=60) == 1
    outcomes = [(event["event"], event.get("outcome")) for event in events(folder)]
    assert outcomes == [("run_started", None), ("run_finished", "failed")]


def test_a_run_is_listed_while_its_process_lives(folder: Path) -> None:
    assert running_runs() == []
    process = record(folder)
    [run] = running_runs()
    assert (run.folder, run.kind, run.name, run.pid) == (str(folder), "launch", "app", process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert running_runs() == []
    assert events(folder)[-1]["event"] == "run_started"
    # Files of the dead process do not prevent another run.
    process = record(folder)
    assert len(running_runs()) == 1
    process.communicate("", timeout=60)
    assert running_runs() == []


def test_only_one_process_records_a_run(folder: Path) -> None:
    with recorded_run(folder, "supernodes", "first"):
        original = events(folder)
        with (
            pytest.raises(ConfigError, match="another process continues the run in"),
            recorded_run(folder, "supernodes", "second"),
        ):
            raise AssertionError
        [run] = running_runs()
        assert run.name == "first" and events(folder) == original
    assert running_runs() == []


@pytest.mark.parametrize("content", ["", "{}", "no json", '{"folder": 1}', "[]"])
def test_invalid_run_files_are_ignored(content: str, tmp_path: Path) -> None:
    folder = state_folder.made_state_dir() / "runs"
    folder.mkdir()
    (folder / "0123456789abcdef.json").write_text(content)
    (folder / "notes.json").write_text("not of this package")
    assert running_runs() == []
    assert (folder / "notes.json").exists()


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    record(folder).communicate("", timeout=60)
    assert events(folder)[-1]["outcome"] == "completed"
