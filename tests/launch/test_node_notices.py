"""Notices from the logs of SuperNodes are reported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_gpu.launch.supernode_log import Notices
from flower_gpu.trace import Follower

FAILED = "\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 1.64 seconds"
IN = "\x1b[92mINFO \x1b[0m:      SuperNode ID: 7"
HOT = "\x1b[93mWARNING \x1b[0m:   GPU {} is \x07hot"
FULL = "\x1b[91mERROR \x1b[0m:     the disk is full"
EXIT = "\x1b[91mERROR \x1b[0m:     Exit Code: 305"


class Nodes:
    """Two SuperNodes, represented only by their logs."""

    def __init__(self, folder: Path, with_warnings: bool = True) -> None:
        self.notices: list[str] = []
        self._notices = Notices(2, self.notices.append, with_warnings)
        self._logs = [folder / f"supernode-{number}.log" for number in range(2)]
        self._new = [Follower(log) for log in self._logs]

    def write(self, number: int, *lines: str) -> list[str]:
        """Append lines to the log of a node, and return the notices that they cause."""
        with self._logs[number].open("a") as log:
            log.writelines(f"{line}\n" for line in lines)
        self.notices.clear()
        self._notices.look(f"SuperNode {number}", self._new[number], self._logs[number])
        return list(self.notices)

    def turn_away(self, number: int) -> list[str]:
        self.notices.clear()
        self._notices.turned_away(f"SuperNode {number}", ": why")
        return list(self.notices)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_an_unreachable_superlink_is_reported_once_and_so_is_the_end_of_the_wait(nodes: Nodes) -> None:
    assert len(nodes.write(0, FAILED, FAILED)) == 1
    assert nodes.write(1, FAILED, FAILED) == []
    assert nodes.write(0, IN) == []
    assert nodes.write(1, IN) == ["connected: 2 of 2 SuperNodes"]
    assert nodes.write(1, FAILED, IN) == [], "the node was restarted"


def test_a_refused_key_is_reported_and_so_is_its_registration(nodes: Nodes) -> None:
    assert nodes.turn_away(1) == ["SuperNode 1 is not admitted: why"]
    assert nodes.turn_away(1) == []
    assert nodes.write(1, EXIT, IN) == ["SuperNode 1 is admitted"]
    assert nodes.turn_away(1) == ["SuperNode 1 is not admitted: why"]


def test_warnings_and_errors_are_reported_once_with_their_log(nodes: Nodes, tmp_path: Path) -> None:
    log = tmp_path / "supernode-0.log"
    assert nodes.write(0, HOT.format(0), FULL, HOT.format(1)) == [
        f"SuperNode 0: GPU 0 is ?hot (in {log})",
        f"SuperNode 0: the disk is full (in {log})",
    ]
    assert nodes.write(1, HOT.format(3), FULL) == []
    (tmp_path / "quiet").mkdir()
    quiet = Nodes(tmp_path / "quiet", with_warnings=False)
    assert len(quiet.write(0, HOT, FULL)) == 1


RAISED = "\x1b[91mERROR \x1b[0m:     ClientApp raised an exception"


def traceback(exception: str) -> list[str]:
    frames = ['  File "app.py", line 3, in train', "    fit()"]
    cause = ["Traceback (most recent call last):", *frames, "KeyError: 'w'", ""]
    chain = ["The above exception was the direct cause of the following exception:", ""]
    return [RAISED, *cause, *chain, "Traceback (most recent call last):", *frames, exception]


def test_each_distinct_exception_of_an_app_is_reported_once(nodes: Nodes, tmp_path: Path) -> None:
    log = tmp_path / "supernode-0.log"
    notice = f"SuperNode 0: ClientApp raised an exception: {{}} (in {log})"
    lines = [
        *traceback("ValueError: no data for client 1"),
        IN,
        *traceback("ValueError: no data for client 2"),
    ]
    assert nodes.write(0, *lines) == [notice.format("ValueError: no data for client 1")]
    error = ["RuntimeError: Error(s) in loading state_dict for Net:", '\tMissing key(s) in state_dict: "w"']
    assert nodes.write(0, *traceback(error[0]), error[1]) == [notice.format(f"{error[0]} {error[1].strip()}")]
    assert nodes.write(1, *traceback("ValueError: no data for client 3")) == []
