"""The log of failed messages, the failures that end a run, and the wording of its outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_gpu.apps.failures import AllFailed, Failure, FailureLog, outcome_text
from flower_gpu.errors import MOST_CHARACTERS, shortened

TRACEBACK = """Traceback (most recent call last):
  File "/home/a/app/client_app.py", line {line}, in train
    model = Nett()
  File "/venv/lib/python3.12/site-packages/torch/nn/module.py", line 7, in __call__
    {last}
NameError: name 'Nett' is not defined, {last}"""


def failure(client: int, line: int = 12, last: str = "a", server_round: int = 1) -> Failure:
    error = f"NameError: name 'Nett' is not defined, {last}"
    return Failure(str(client), "train", server_round, error, TRACEBACK.format(line=line, last=last))


def test_the_first_failure_of_each_kind_is_printed_and_all_are_logged(tmp_path: Path) -> None:
    printed: list[str] = []
    log = FailureLog(tmp_path / "failures.log", printed.append)
    for client in range(5):
        log.add(failure(client))
    # Another text at the same place in the app.
    log.add(failure(5, last="b"))
    log.add(failure(6, line=30))
    for client in (7, 8):
        error = f"WorkerDiedError: train of client {client}: the worker (pid 1{client}) was killed"
        log.add(Failure(str(client), "train", 1, error))
    assert [text.splitlines()[0] for text in printed] == [
        "train of client 0 failed in round 1:",
        "train of client 6 failed in round 1:",
        "train of client 7 failed in round 1:",
    ]
    assert "client_app.py" in printed[0] and "line 12" in printed[0]
    logged = (tmp_path / "failures.log").read_text()
    assert [f"train of client {client} failed in round 1" in logged for client in range(9)] == [True] * 9
    assert (
        logged.count("Traceback") == 3 and logged.count("(same text as: train of client 0 in round 1)") == 4
    )
    assert log.pointer == "the first traceback is above"


def test_control_characters_are_shown_as_question_marks(tmp_path: Path) -> None:
    printed: list[str] = []
    FailureLog(tmp_path / "failures.log", printed.append).add(failure(1, last="\x1b]0;title\x07\udc80"))
    for text in (*printed, (tmp_path / "failures.log").read_text()):
        assert "?]0;title?\\udc80" in text and "\x1b" not in text


def test_events_of_a_trace_are_failures() -> None:
    event = {"event": "worker_finished", "outcome": "error", "client": "3", "task": "train", "round": 2}
    failure_of_event = Failure.from_event(
        {**event, "error": "ValueError: no", "traceback": "Trace", "time": 5.0}, "3"
    )
    assert failure_of_event == Failure("3", "train", 2, "ValueError: no", "Trace", 5.0)
    assert Failure.from_event(event, "3", "of a log").traceback == "of a log"


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ([("train", 1, 0, 6)], "all 6 clients failed in round 1"),
        ([("train", None, 0, 6)], "all 6 clients failed in the first round"),
        ([("train", 1, 0, 1)], "the one client that was asked failed in round 1"),
        ([("train", 1, 1, 5), ("train", 2, 0, 6), ("train", 3, 0, 6)], None),
        (
            [("train", 1, 1, 5), *(("train", number, 0, 6) for number in (2, 3, 4))],
            "all 6 clients failed in round 4 and the two rounds before",
        ),
        ([("train", 1, 6, 0), *(("train", number, 0, 1) for number in (2, 3, 4))], None),
        ([("train", 1, 6, 0), ("evaluate", 1, 0, 6), ("evaluate", 2, 0, 6), ("evaluate", 3, 0, 6)], None),
        ([("evaluate", 1, 0, 6)], "all 6 clients failed in round 1"),
        ([("query", None, 6, 0), ("train", 1, 0, 6)], "all 6 clients failed in round 1"),
        # No client has replied.
        ([("train", 1, 0, 0)], None),
        # Single messages that belong to no round.
        ([("train", None, 0, 1), ("train", None, 0, 1)], None),
        ([("get_parameters", 0, 0, 1)], None),
    ],
)
def test_a_run_in_which_all_clients_fail_is_ended(
    phases: list[tuple[str, int | None, int, int]], text: str | None
) -> None:
    rule = AllFailed()
    *others, last = [rule.replied(*phase) for phase in phases]
    assert others == [None] * len(others) and last == text


def test_the_outcome_says_what_failed() -> None:
    assert outcome_text("completed", 0, 60) == "completed"
    assert outcome_text("completed", 3, 60) == "completed, 3 of 60 messages failed"
    assert outcome_text("completed", 1, None) == "completed, 1 message failed"
    assert outcome_text("failed", 3, 60) == "failed"


def test_a_long_text_keeps_its_head_and_tail() -> None:
    text = shortened("a" * 50_000_000 + "b")
    assert len(text) < MOST_CHARACTERS + 100 and text.startswith("aaa") and text.endswith("ab")
    assert "[... 49,984,001 characters left out ...]" in text
    assert shortened(text) == text
    assert shortened("short") == "short"
