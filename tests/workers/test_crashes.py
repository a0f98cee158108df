"""What goes wrong in a worker, for each supervised start method: nothing is left, the next call works."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import crash_tasks
import pytest
from crash_cases import CRASHES, HANGS, Crash
from processes import Run, wait_until

from flower_gpu import run_in_worker
from flower_gpu.errors import (
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("case", CRASHES, ids=str)
def test_crash(case: Crash, start_method: str, run: Run) -> None:
    with pytest.raises(case.error) as caught:
        run_in_worker(case.task, *case.args, start_method=start_method)
    case.check(caught.value)
    assert "worker_library" not in sys.modules  # what only the worker needs is not imported here
    (finished,) = run.events("worker_finished")
    assert finished["outcome"] == case.outcome
    assert finished["error"].startswith(type(caught.value).__name__)


@pytest.mark.parametrize(("function", "says"), HANGS, ids=[name for name, _ in HANGS])
def test_timeout(
    function: str,
    says: list[str],
    start_method: str,
    run: Run,
    after_reaching: Callable[..., BaseException],
) -> None:
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        error = after_reaching(
            f"crash_tasks:{function}", expected=WorkerTimeoutError, says=says, start_method=start_method
        )
    text = str(error)
    assert "no result within timeout_s=" in text
    assert f"(pid {run.pids()[-1]}) and its children were ended" in text
    assert len(text.splitlines()) < 40
    assert isinstance(error, TimeoutError)
    assert {line["outcome"] for line in run.events("worker_finished")} == {"timeout"}


def test_exception_class_of_main(start_method: str, run_script: Callable[..., Any]) -> None:
    done = run_script(
        """
        import sys
        from flower_gpu import run_in_worker

        class OwnError(Exception):
            def __init__(self, text, code=0):
                super().__init__(text)
                self.code = code

        def task():
            raise OwnError("from main", code=5)

        try:
            run_in_worker(task, start_method=sys.argv[1])
        except OwnError as error:
            print(error, error.code, "script.py" in str(error.__cause__), "in task" in str(error.__cause__))
        """,
        start_method,
    )
    assert done.stdout == "from main 5 True True\n"


def test_killed_from_outside(start_method: str, run: Run) -> None:
    def kill_soon() -> None:
        assert wait_until(lambda: bool(run.pids()))
        os.kill(run.pids()[0], signal.SIGTERM)

    thread = threading.Thread(target=kill_soon)
    thread.start()
    with pytest.raises(WorkerDiedError, match=r"killed by SIGTERM \(15\)") as caught:
        run_in_worker("time:sleep", 600, start_method=start_method)
    thread.join()
    assert caught.value.exitcode == -signal.SIGTERM
    assert run_in_worker("plain_tasks:answer", start_method=start_method) == 42


@pytest.mark.parametrize("task", ["never_ends_its_thread", "never_ends_at_exit"])
def test_hang_after_the_result(
    task: str, start_method: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result counts; the worker gets a moment to exit, not for ever."""
    monkeypatch.setattr("flower_gpu.workers.caller._EXIT_GRACE_S", 0.3)
    assert run_in_worker(f"plain_tasks:{task}", start_method=start_method) == 42


@pytest.mark.parametrize("task", ["leave_children", "close_stdout"])
def test_result_counts(task: str, start_method: str, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_worker(f"crash_tasks:{task}", start_method=start_method) == 42
    assert capfd.readouterr() == ("", "")


def test_leaked_shared_memory_is_tidied_up(start_method: str, run: Run) -> None:
    """Python's resource tracker gets the moment it needs; the fixture looks into /dev/shm."""
    name = run_in_worker("crash_tasks:leak_shared_memory", False, start_method=start_method)
    assert name.startswith("psm_")


def test_argument_that_cannot_be_passed(run: Run) -> None:
    with pytest.raises(WorkerStartError) as caught:
        run_in_worker("plain_tasks:echo", threading.Lock(), start_method="spawn")
    for part in (
        "'plain_tasks:echo'",
        "plain_tasks:echo or its arguments cannot be passed",
        "TypeError",
        "lock",
    ):
        assert part.strip("'") in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)
    assert run.pids() == []


def test_argument_that_cannot_be_rebuilt(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"built in \d+, made in \d+") as caught:
        run_in_worker("plain_tasks:echo", crash_tasks.CannotBeRebuilt(), start_method="spawn")
    assert "crash_tasks.py" in str(caught.value.__cause__)


def test_fork_passes_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    assert run_in_worker(lambda passed: passed.acquire(timeout=1), lock, start_method="fork") is True
    assert not lock.locked()  # the worker's copy is


@pytest.mark.parametrize("start_method", ["inline", "in-process"])
def test_without_a_worker_errors_are_as_they_are(start_method: str) -> None:
    with pytest.raises(crash_tasks.OwnError) as caught:
        run_in_worker("crash_tasks:own_error", start_method=start_method)
    assert caught.value.__cause__ is None
    assert run_in_worker("plain_tasks:pid", start_method=start_method) == os.getpid()
