"""Failed messages of a launched run: told once, kept, and when all fail the run is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_gpu.launch.display import Display
from flower_gpu.launch.engine import _TRACEBACK
from flower_gpu.launch.failures import Failures

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


def finished(messages: int, failed: int, **fields: Any) -> dict[str, Any]:
    return of("round_finished", messages=messages, failed=failed, metrics={}, **fields)


class Shown(Display):
    """What a display would show."""

    def __init__(self) -> None:
        super().__init__(None)
        self.texts: list[str] = []

    def line(self, text: str) -> None:
        self.texts.append(text)

    traceback = line


def told(path: Path, *events: dict[str, Any]) -> tuple[Failures, list[str]]:
    display = Shown()
    failures = Failures(path / "failures.log", display)
    for event in events:
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
    failures, shown = told(tmp_path, *events, *events, reply(1, None), finished(3, 2))
    first, second = shown
    assert first.splitlines() == ["train of client 0 failed in round 1:", *TRACEBACK.format(3).splitlines()]
    assert second == "train of client 0 failed in round 1: NameError: Nett"
    assert (failures.messages, failures.failed, failures.why_over) == (3, 2, None)
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


def test_all_failed(tmp_path: Path) -> None:
    failures, _ = told(tmp_path, process("0"), process("1"), reply(0), reply(1), finished(2, 2))
    assert failures.why_over == "all 2 clients failed in round 1"
    assert failures.sentence == "all 2 clients failed in round 1; the first traceback is above"


def test_without_a_reply_nobody_has_failed_for_good(tmp_path: Path) -> None:
    late = "no reply within 5 s"
    failures, _ = told(tmp_path, reply(0, late), reply(1, late), finished(2, 2))
    assert failures.why_over is None


def test_rounds_are_counted_by_themselves(tmp_path: Path) -> None:
    events = [reply(0, None), finished(1, 0)]
    for number in (2, 3, 4):
        failed = [reply(node, round=number) for node in (0, 1)]
        failures, _ = told(tmp_path, *events)
        assert failures.why_over is None
        events += [*failed, finished(2, 2, round=number)]
    assert told(tmp_path, *events)[0].why_over == "all 2 clients failed in round 4 and the two rounds before"


def test_a_failed_evaluation_on_the_server_is_no_clients(tmp_path: Path) -> None:
    _, shown = told(tmp_path, {**worker("server"), "task": "evaluate"})
    assert shown == ["evaluate on the server failed: NameError: Nett"]
    assert not (tmp_path / "failures.log").exists()


def test_traceback_in_a_log() -> None:
    log = f"INFO: x\n{TRACEBACK.format(1)}\nERROR: y\n{TRACEBACK.format(2)} is not defined\nINFO: end\n"
    assert _TRACEBACK.findall(log) == [TRACEBACK.format(1), f"{TRACEBACK.format(2)} is not defined"]


def test_an_app_that_asks_one_client_after_the_other_ends_with_nothing(tmp_path: Path) -> None:
    events = [event for node in (0, 1) for event in (reply(node), finished(1, 1))]
    failures, _ = told(tmp_path, *({**event, "round": None} for event in events))
    assert failures.why_over is None
    failures.close()
    assert failures.why_over == "all 2 messages failed"
