"""Processes that a task starts in their own sessions end with its worker, and not earlier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import forkservers
import pytest
from processes import is_running, wait_until
from worker_lines import Caller

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerDiedError, WorkerTimeoutError

pytestmark = forkservers.marks()
ERRORS = {"abort": WorkerDiedError, "hang": WorkerTimeoutError}
TIMEOUT_S = 10


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with forkservers.own_servers(light=True):
        # Start the server now, so that calls with a time limit do not wait for it.
        run_in_worker("os:getpid", start_method="forkserver")
        yield


def pids_of(folder: Path) -> list[int]:
    pids = [int(path.read_text()) for path in folder.iterdir()]
    assert len(pids) == 4
    return pids


@pytest.mark.parametrize("end", ["return", "abort", "hang"])
def test_processes_in_other_sessions_end_with_the_worker(end: str, tmp_path: Path) -> None:
    def call() -> list[bool]:
        task, args = "tasks_sessions:leave", (str(tmp_path), end)
        timeout_s = TIMEOUT_S if end == "hang" else 60
        living = run_in_worker(task, *args, start_method="forkserver", timeout_s=timeout_s)
        assert isinstance(living, list)
        return living

    if end == "return":
        assert call() == [True] * 4
    else:
        with pytest.raises(ERRORS[end]):
            call()
    pids = pids_of(tmp_path)
    assert wait_until(lambda: not any(map(is_running, pids))), pids


def test_processes_in_other_sessions_outlive_other_workers(caller: Caller, tmp_path: Path) -> None:
    """Processes of a worker that stays are not ended when workers of other lines end."""
    line, other = caller.line(), caller.line()
    assert caller.run("tasks_sessions:leave", str(tmp_path), "return", line=line, calls=3) == [True] * 4
    for _ in range(3):
        caller.run("os:getpid", line=other)
    assert all(map(is_running, pids_of(tmp_path)))
    line.retire()
    pids = pids_of(tmp_path)
    assert wait_until(lambda: not any(map(is_running, pids))), pids


def test_a_fork_server_started_by_a_worker_stays() -> None:
    """Other processes may use it already."""
    pid = run_in_worker("tasks_sessions:start_server", "another", start_method="forkserver")
    assert isinstance(pid, int)
    for _ in range(3):  # These calls make the fork server look for orphans.
        run_in_worker("os:getpid", start_method="forkserver")
    assert is_running(pid)
