"""A launch shows the events of its trace. Each failed message is reported once and kept in a file."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError
from flower_gpu.launch.event_lines import EventLines
from flower_gpu.launch.supervisor import last_traceback, new_lines
from flower_gpu.watch.shown_run import ShownRun

TRACEBACK = 'Traceback (most recent call last):\n  File "/app/client.py", line {}, in train\nNameError: Nett'


def make_event(name: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "time": 1.5, "event": name, "round": 1, "task": "train", **fields}


def worker(client: str, line: int = 3, outcome: str = "error") -> dict[str, Any]:
    fields = {"outcome": outcome, "error": "NameError: Nett", "traceback": TRACEBACK.format(line)}
    return make_event("worker_finished", client=client, **fields)


def process(client: str, line: int = 3) -> dict[str, Any]:
    return make_event(
        "client_failed", client=client, error="NameError: Nett", traceback=TRACEBACK.format(line)
    )


def reply(node: int, error: str | None = "<class 'NameError'>", **fields: Any) -> dict[str, Any]:
    return make_event("reply", node=node, error=error, metrics={}, **fields)


class RecordingRun(ShownRun):
    """A shown run that records its texts instead of printing them."""

    def __init__(self, failure_log: Path | None = None) -> None:
        super().__init__(None, None, failure_log)
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)

    show_traceback = complain = say


def see_all(lines: EventLines, shown: ShownRun, *events: dict[str, Any]) -> None:
    for event in events:
        shown.show(event)
        lines.see(event)


def show_all(path: Path, *events: dict[str, Any]) -> tuple[EventLines, list[str]]:
    shown = RecordingRun(path / "failures.log")
    lines = EventLines(shown)
    see_all(lines, shown, *events)
    return lines, shown.texts


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
def test_a_failed_message_is_reported_once(events: list[dict[str, Any]], tmp_path: Path) -> None:
    lines, texts = show_all(tmp_path, *events, *events, reply(1, None))
    first, second = texts
    assert first.splitlines() == [
        "train of client 0 failed in round 1:",
        *TRACEBACK.format(3).splitlines(),
    ]
    assert second == "train of client 0 failed in round 1: NameError: Nett"
    assert lines.why_over is None
    text = (tmp_path / "failures.log").read_text()
    assert text.count("train of client 0 failed in round 1") == 2
    assert text.count('File "/app/client.py"') == 1


def test_each_distinct_failure_is_shown_with_its_traceback_once(tmp_path: Path) -> None:
    _, texts = show_all(tmp_path, process("0"), process("1", line=7), process("2"))
    assert [text.count("\n") for text in texts] == [3, 3, 0]


def test_a_failure_that_only_the_server_knows_is_reported(tmp_path: Path) -> None:
    shown = RecordingRun(tmp_path / "failures.log")
    lines = EventLines(shown, lambda node: f"number {node}", lambda client: f"T of {client}")
    see_all(lines, shown, reply(7), reply(8, "no reply within 5 s"))
    assert shown.texts == [
        "train of client number 7 failed in round 1:\nT of number 7",
        "train of client number 8 failed in round 1: no reply within 5 s",
    ]


def test_an_error_reply_that_names_its_client_is_not_reported_twice(tmp_path: Path) -> None:
    """With ``start_server`` the server does not know which client a connection belongs to."""
    shown = RecordingRun(tmp_path / "failures.log")
    lines = EventLines(shown, lambda node: f"node {node}")
    see_all(lines, shown, worker("1"), reply(5, "fit of client 1: the worker was killed"))
    assert len(shown.texts) == 1


def test_the_reason_for_the_end_is_kept_if_all_clients_fail(tmp_path: Path) -> None:
    over = make_event("all_failed", reason="all 2 clients failed in round 1")
    lines, _ = show_all(tmp_path, process("0"), process("1"), reply(0), reply(1), over)
    assert lines.why_over == "all 2 clients failed in round 1; the first traceback is above"


def test_a_failed_evaluation_on_the_server_is_not_attributed_to_a_client(tmp_path: Path) -> None:
    _, texts = show_all(tmp_path, {**worker("server"), "task": "evaluate"})
    assert texts == ["evaluate on the server failed: NameError: Nett"]
    assert not (tmp_path / "failures.log").exists()


def test_the_last_traceback_in_a_log(tmp_path: Path) -> None:
    log = f"INFO: x\n{TRACEBACK.format(1)}\nERROR: y\n{TRACEBACK.format(2)} is not defined\nINFO: end\n"
    path = tmp_path / "client-0.log"
    assert last_traceback(path) == ""
    path.write_text(log)
    assert last_traceback(path) == f"{TRACEBACK.format(2)} is not defined"


# Display during the run, and the run folder ---------------------------------------------------------------


EVENTS = [
    make_event("round", round=0, num_rounds=2, metrics={"loss": 2.5}),
    make_event("worker_started", pid=11, client="0", start_method="spawn"),
    make_event("worker_finished", pid=11, client="0", seconds=0.5, outcome="ok", error=None),
    make_event("worker_started", pid=11, client="0", start_method="spawn"),
    make_event(
        "worker_finished", pid=11, client="0", seconds=0.25, outcome="died", error="KilledError: gone\nmore"
    ),
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


def test_a_log_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--log-dir"):
        RunFolder.create(tmp_path / "file")


def test_quiet_shows_only_failures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = ShownRun(sys.stdout, sys.stderr, tmp_path / "failures.log", is_shown=False)
    lines = EventLines(shown)
    see_all(lines, shown, *EVENTS)
    for then in ("again", "on the CPU", "failed"):
        see_all(lines, shown, make_event("out_of_memory", client="0", uuid="GPU-0", then=then))
    output = capsys.readouterr()
    assert output.out == ""
    first, *error, last = output.err.splitlines()
    assert (first, error) == ("train of client 0 failed in round 1:", ["KilledError: gone", "more"])
    assert last.startswith("train of client 0 ran out of memory")


def test_a_run_without_a_checkpoint_says_so_once(tmp_path: Path) -> None:
    unknown = make_event("strategy_started", strategy="Mine", num_rounds=2, resumes=None)
    _, texts = show_all(tmp_path, unknown, unknown)
    assert texts == ["note: this run has no checkpoint, so it cannot be resumed; run.log says why"]
    _, texts = show_all(tmp_path, {**unknown, "strategy": "FedAvg", "resumes": "flower_gpu.FedAvg"})
    assert texts == []
    resumed = RecordingRun()
    resumed.show(unknown)
    EventLines(resumed).see(unknown)
    assert resumed.texts == [], "the earlier run has already said so"


def test_an_out_of_memory_line_says_where_the_message_runs_next(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ShownRun(sys.stdout, sys.stderr)
    lines = EventLines(shown)
    gpu = {"uuid": "GPU-0", "index": 0, "name": "Stub", "memory_bytes": 2**31}
    shown.show(make_event("lease_granted", client="1", lease="b", gpus=[gpu], waited_s=1.5))
    for then in ("again", "on the CPU"):
        fields = {"client": "1", "kind": "over_cap", "uuid": "GPU-0", "cap_bytes": 3 * 2**29}
        see_all(lines, shown, make_event("out_of_memory", **fields, then=then))
    assert capsys.readouterr().out.splitlines() == [
        "train of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again",
        "train of client 1 ran out of memory on GPU 0 with 1.5 GiB: it runs again on the CPU",
    ]
