"""When a caller, fork server or worker of a line ends, nothing is left behind and no call waits for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkservers
import pytest
from processes import SHARED_MEMORY, is_running, wait_until
from worker_lines import Caller

from flower_gpu.errors import FlowerGPUError, WorkerDiedError, WorkerTimeoutError

pytestmark = forkservers.marks(fixture="folder")


@pytest.fixture
def caller() -> Iterator[Caller]:
    caller = Caller()
    caller.run("plain_tasks:answer")
    yield caller
    caller.close()


def run_with_limit(call: Callable[[], Any], timeout_s: float = 90) -> list[BaseException]:
    """Run a call in a thread, fail if it does not end in time, and return its error, if any."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "the call has not ended in time"
    return errors


def test_workers_outlive_their_fork_server(caller: Caller) -> None:
    others = [caller.line() for _ in range(3)]
    pids = [caller.run("tasks_lines:count", line=line, calls=5)[0] for line in others]
    os.kill(caller.server_pid(), signal.SIGKILL)
    for line, pid in zip(others, pids, strict=True):
        assert caller.run("tasks_lines:count", line=line, calls=5) == (pid, 2)
    assert caller.run("tasks_lines:count", line=caller.lines[0], calls=5)[1] == 1


def test_a_stopped_worker_fails_only_its_own_call(caller: Caller, tmp_path: Path) -> None:
    """The server has to stay, because other workers need it."""
    server = caller.server_pid()
    other = caller.line()
    file = tmp_path / "go on"
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(caller.run("tasks_lines:wait_for", str(file), line=other))
    )
    thread.start()
    pid, _ = caller.run("tasks_lines:count", calls=10)
    os.kill(pid, signal.SIGSTOP)
    run_with_limit(lambda: caller.run("tasks_lines:count", calls=10, timeout_s=0.3))
    assert wait_until(lambda: not is_running(pid))
    assert caller.run("tasks_lines:count", calls=10, timeout_s=60)[0] != pid
    file.touch()
    thread.join(90)
    assert answers == [True]
    assert caller.server_pid() == server


def test_a_call_never_waits_for_a_worker_that_died_before_it(caller: Caller) -> None:
    """The worker may have read any part of the next call when it dies."""

    def use() -> None:
        for _ in range(40):
            pid, _ = caller.run("tasks_lines:count", calls=10_000)
            os.kill(pid, signal.SIGKILL)

    errors = run_with_limit(use, 90)
    assert [error for error in errors if not isinstance(error, WorkerDiedError)] == []
    assert caller.run("tasks_lines:count", timeout_s=60)[1] == 1


def test_a_fork_does_not_end_the_workers_of_its_parent(caller: Caller) -> None:
    worker, _ = caller.run("tasks_lines:count", calls=5)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert caller.run("tasks_lines:count", calls=5) == (worker, 2)


def test_a_call_can_be_cancelled_before_its_worker_starts() -> None:
    """The first call waits for the fork server, and may be cancelled meanwhile."""
    caller = Caller()
    line = caller.line()
    try:
        threading.Timer(0.01, line.cancel).start()
        errors = run_with_limit(lambda: caller.run("time:sleep", 600, line=line))
        assert isinstance(errors[0], FlowerGPUError)
    finally:
        caller.close()


def test_semaphores_of_an_ended_worker_are_removed(caller: Caller, tmp_path: Path) -> None:
    """The resource tracker in the worker's process group removes their files."""
    file = tmp_path / "name"
    caller.run("tasks_lines:count", calls=5)
    with pytest.raises(WorkerTimeoutError):
        caller.run("tasks_lines:leave_semaphore", str(file), calls=5, timeout_s=10)
    name = file.read_text().removeprefix("/")
    assert wait_until(lambda: not (SHARED_MEMORY / f"sem.{name}").exists())
