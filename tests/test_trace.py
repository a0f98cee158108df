"""The trace of a run, a file to which many processes append JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flower_gpu import WorkerDiedError, run_in_worker, trace


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    return tmp_path


def events(folder: Path) -> list[dict[str, object]]:
    return list(trace.read(folder / trace.FILE_NAME))


def test_events_are_written_as_one_line_each(run_folder: Path) -> None:
    before = time.time()
    metrics = {"loss": 0.5, "text": "ä\n\u2028 \N{GRINNING FACE} \\ud800 \0 \r"}
    trace.write("round", round=1, num_rounds=None, metrics=metrics)
    trace.write("own")
    first, second = events(run_folder)
    assert before <= first.pop("time") <= time.time()
    assert first == {"v": 1, "event": "round", "round": 1, "num_rounds": None, "metrics": metrics}
    assert second["event"] == "own"
    assert len((run_folder / "trace.jsonl").read_bytes().splitlines()) == 2


def test_outside_of_a_run_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWER_GPU_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    trace.write("own")
    assert list(tmp_path.iterdir()) == []


def test_torn_and_foreign_lines_are_skipped(run_folder: Path) -> None:
    trace.write("first")
    with (run_folder / "trace.jsonl").open("ab") as file:
        file.write(b'\nno json\n[1]\n5\n{"v": 99, "event": "of the future"}\n\xff\xfe\n')
    trace.write("second")
    with (run_folder / "trace.jsonl").open("ab") as file:
        file.write(b'{"v": 1, "time": 1.0, "event": "to')
    assert [event["event"] for event in events(run_folder)] == ["first", "second"]


def test_an_event_after_a_torn_line_is_read(run_folder: Path) -> None:
    """The next writer does not know about the torn line and appends to it."""
    trace.write("first", text="x" * 100)
    path = run_folder / "trace.jsonl"
    path.write_bytes(path.read_bytes()[:60])
    trace.write("second", metrics={"v": 1})
    trace.write("third")
    assert [event["event"] for event in events(run_folder)] == ["second", "third"]


def test_a_missing_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path / "missing"))
    trace.write("own")
    assert list(tmp_path.iterdir()) == []


def test_values_without_json_equivalent_are_written_as_text(run_folder: Path) -> None:
    trace.write("own", path=Path("/a"), error=ValueError("text"))
    (event,) = events(run_folder)
    assert (event["path"], event["error"]) == ("/a", "text")


def test_lone_surrogates_are_escaped(run_folder: Path) -> None:
    """Python represents a file name that is not UTF-8 with lone surrogates. Other writers may too."""
    text = "\N{GRINNING FACE} \udcff \\ud83d\ude00 \ud83d"
    trace.write("own", text=text)
    with (run_folder / "trace.jsonl").open("a") as file:
        file.write(f'{{"v": 1, "time": 1.0, "event": "foreign", "text": {json.dumps(text)}}}\n')
    for event in events(run_folder):
        assert event["text"] == "\N{GRINNING FACE} \\udcff \\ud83d\\ude00 \\ud83d"
    assert r"\\udcff" in (run_folder / "trace.jsonl").read_text().splitlines()[0]


def test_many_processes_append_at_once(run_folder: Path) -> None:
    code = (
        "import sys\nfrom flower_gpu import trace\n"
        "for n in range(200): trace.write('own', n=n, who=sys.argv[1], text='x' * 500)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(number)]) for number in range(4)]
    assert [writer.wait(timeout=150) for writer in writers] == [0] * 4
    written = events(run_folder)
    assert len(written) == 800
    for number in range(4):
        assert [event["n"] for event in written if event["who"] == str(number)] == list(range(200))


@pytest.mark.parametrize("start_method", ["fork", "in-process"])
def test_a_call_writes_its_events(
    start_method: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    pid = run_in_worker(os.getpid, start_method=start_method, name="3")
    requested, granted, started, task, result, finished, released = events(run_folder)
    names = ["cores_requested", "cores_granted", "cores_released"]
    assert [event["event"] for event in (requested, granted, released)] == names
    leases = {event["lease"] for event in (granted, released)}
    assert leases == {started.pop("cores_lease")} == {finished.pop("cores_lease")}
    times = [event.pop("time") for event in (started, task, result, finished)]
    assert times == sorted(times)  # type: ignore[type-var]
    call = {"v": 1, "pid": pid, "client": "3", "call": started["call"]}
    common = {**call, "task": "getpid", "round": None, "start_method": start_method, "threads": 2}
    assert (task, result) == ({**call, "event": "task_started"}, {**call, "event": "worker_result"})
    assert started == {**common, "event": "worker_started"}
    seconds, task_at, result_at = (finished.pop(name) for name in ("seconds", "task_at", "result_at"))
    # CPU time and memory of a single call are unknown in a process that may do other work at the same time.
    unknown = start_method == "in-process"
    assert [finished.pop(name) is None for name in ("cpu_s", "memory_bytes")] == [unknown] * 2
    assert finished == {**common, "error": None, "event": "worker_finished", "outcome": "ok"}
    assert isinstance(seconds, float) and isinstance(task_at, float) and isinstance(result_at, float)
    assert seconds >= 0
    assert times[0] <= task_at <= result_at <= times[3]  # type: ignore[operator]


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_failed_call_of_the_server_is_recorded(run_folder: Path) -> None:
    with pytest.raises(WorkerDiedError):
        run_in_worker(kill_itself, start_method="fork")
    [finished] = [event for event in events(run_folder) if event["event"] == "worker_finished"]
    assert (finished["client"], finished["outcome"]) == ("server", "died")
    assert str(finished["error"]).startswith("WorkerDiedError: kill_itself on the server: the worker (pid ")


def test_a_call_that_could_not_start_has_no_worker_events(run_folder: Path) -> None:
    with pytest.raises(Exception, match="cannot be passed"):
        run_in_worker(print, (n for n in ()), start_method="spawn")
    names = [event["event"] for event in events(run_folder)]
    assert names == ["cores_requested", "cores_granted", "cores_released"]
