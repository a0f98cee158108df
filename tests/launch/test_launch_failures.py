"""What a launch shows of its run, from the trace: failed messages above all, told once, and kept."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError
from flower_gpu.launch.display import Failures, LaunchDisplay
from flower_gpu.launch.supervisor import last_traceback, new_lines

TRACEBACK = 'Traceback (most recent call last):\n  File "/app/client.py", line {}, in train\nNameError: Nett'


def of(name: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "time": 1.5, "event": name, "round": 1, "task": "train", **fields}


def worker(client: str, line: int = 3, outcome: str = "error") -> dict[str, Any]:
    told = {"outcome": outcome, "error": "NameError: Nett", "traceback": TRACEBACK.format(line)}
    return of("worker_finished", client=client, **told)


def process(client: str, line: int = 3) -> dict[str, Any]:
    return of("client_failed", client=client, error="NameError: Nett", traceback=TRACEBACK.format(line))


def reply(node: int, error: str | None = "<class 'NameError'>", **fields: Any) -> dict[str, Any]:
    return of("reply", node=node, error=error, metrics={}, **fields)


class Shown(LaunchDisplay):
    """Keeps what a display would show."""

    def __init__(self) -> None:
        super().__init__(None)
        self.texts: list[str] = []

    def line(self, text: str) -> None:
        self.texts.append(text)

    traceback = error = line


def told(path: Path, *events: dict[str, Any]) -> tuple[Failures, list[str]]:
    display = Shown()
    failures = Failures(path / "failures.log", display)
    for event in events:
        display.show(event)
        failures.see(event)
    return failures, display.texts


@pytest.mark.parametrize(
    "events",
    [
        [worker("0"), process("0"), reply(0)],
        [process("0"), reply(0)],
        [worker("0"), reply(0)],
        [worker("0", outcome="out of memory"), process("0"), reply(0)],
    ],
    ids=["worker, process, reply", "process, reply", "worker, reply", "out of memory"],
)
def test_a_failed_message_is_told_once(events: list[dict[str, Any]], tmp_path: Path) -> None:
    failures, shown = told(tmp_path, *events, *events, reply(1, None))
    first, second = shown
    assert first.splitlines() == ["train of client 0 failed in round 1:", *TRACEBACK.format(3).splitlines()]
    assert second == "train of client 0 failed in round 1: NameError: Nett"
    assert failures.why_over is None
    text = (tmp_path / "failures.log").read_text()
    assert text.count("train of client 0 failed in round 1") == 2
    assert text.count('File "/app/client.py"') == 1


def test_each_kind_is_shown_with_its_traceback(tmp_path: Path) -> None:
    _, shown = told(tmp_path, process("0"), process("1", line=7), process("2"))
    assert [text.count("\n") for text in shown] == [3, 3, 0]


def test_what_only_the_server_knows_is_told_as_well(tmp_path: Path) -> None:
    display = Shown()
    failures = Failures(
        tmp_path / "failures.log", display, lambda node: f"number {node}", lambda client: f"T of {client}"
    )
    failures.see(reply(7))
    failures.see(reply(8, "no reply within 5 s"))
    assert display.texts == [
        "train of client number 7 failed in round 1:\nT of number 7",
        "train of client number 8 failed in round 1: no reply within 5 s",
    ]


def test_a_reply_of_ours_says_which_client_it_is_of(tmp_path: Path) -> None:
    """With ``start_server`` nobody knows which connection is whose."""
    display = Shown()
    failures = Failures(tmp_path / "failures.log", display, lambda node: f"node {node}")
    failures.see(worker("1"))
    failures.see(reply(5, "fit of client 1: the worker was killed"))
    assert len(display.texts) == 1


def test_the_server_says_when_all_have_failed(tmp_path: Path) -> None:
    over = of("all_failed", reason="all 2 clients failed in round 1")
    failures, _ = told(tmp_path, process("0"), process("1"), reply(0), reply(1), over)
    assert failures.why_over == "all 2 clients failed in round 1; the first traceback is above"


def test_a_failed_evaluation_on_the_server_is_no_clients(tmp_path: Path) -> None:
    _, shown = told(tmp_path, {**worker("server"), "task": "evaluate"})
    assert shown == ["evaluate on the server failed: NameError: Nett"]
    assert not (tmp_path / "failures.log").exists()


def test_the_last_traceback_in_a_log(tmp_path: Path) -> None:
    log = f"INFO: x\n{TRACEBACK.format(1)}\nERROR: y\n{TRACEBACK.format(2)} is not defined\nINFO: end\n"
    path = tmp_path / "client-0.log"
    assert last_traceback(path) == ""
    path.write_text(log)
    assert last_traceback(path) == f"{TRACEBACK.format(2)} is not defined"


# What is shown while it runs; its folder ------------------------------------------------------------------


EVENTS = [
    of("round", round=0, num_rounds=2, metrics={"loss": 2.5}),
    of("worker_started", pid=11, client="0", start_method="spawn"),
    of("worker_finished", pid=11, client="0", seconds=0.5, outcome="ok", error=None),
    of("worker_started", pid=11, client="0", start_method="spawn"),
    of("worker_finished", pid=11, client="0", seconds=0.25, outcome="died", error="KilledError: gone\nmore"),
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
        display.show(of("out_of_memory", client="0", uuid="GPU-0", then=then))
    told = capsys.readouterr()
    assert told.out == ""
    first, *error, last = told.err.splitlines()
    assert (first, error) == ("train of client 0 failed in round 1:", ["KilledError: gone", "more"])
    assert last.startswith("train of client 0 ran out of memory")


def test_a_run_without_a_checkpoint_says_so_once() -> None:
    display = Shown()
    for resumes in (None, None):
        display.show(of("strategy_started", strategy="Mine", num_rounds=2, resumes=resumes))
    assert display.texts == ["note: this run has no checkpoint, so it cannot be resumed; run.log says why"]
    display = Shown()
    display.show(of("strategy_started", strategy="FedAvg", num_rounds=2, resumes="flower_gpu.FedAvg"))
    assert display.texts == []


def test_lines_say_what_follows_when_memory_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay(None)
    gpu = {"uuid": "GPU-0", "index": 0, "name": "Stub", "memory_bytes": 2**31}
    display.show(of("lease_granted", client="1", lease="b", gpus=[gpu], waited_s=1.5))
    for then in ("again", "on the CPU"):
        fields = {"client": "1", "kind": "over_cap", "uuid": "GPU-0", "cap_bytes": 3 * 2**29}
        display.show(of("out_of_memory", **fields, then=then))
    assert capsys.readouterr().out.splitlines() == [
        "train of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again",
        "train of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again on the CPU",
    ]
