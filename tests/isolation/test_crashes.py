"""What goes wrong in a worker, for each supervised start method; nothing is left, the next call works."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import crash_tasks
import pytest
from processes import running_in_group, wait_until
from traced import Run

from flower_gpu import run_in_worker
from flower_gpu.errors import (
    InvalidResultError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTaskError,
    WorkerTimeoutError,
)

pytestmark = pytest.mark.timeout(90)


@dataclass(frozen=True)
class Crash:
    """A task, the error its caller gets, and what the error says."""

    task: str
    error: type[BaseException]
    says: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    outcome: str = "error"
    exitcode: int | None = None
    cause_says: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.task.partition(":")[2], *map(str, self.args)])


def crash(function: str, error: type[BaseException], *says: str, **fields: Any) -> Crash:
    return Crash(f"crash_tasks:{function}", error, says, **fields)


def died(function: str, *says: str, code: int, **fields: Any) -> Crash:
    return crash(function, WorkerDiedError, *says, outcome="died", exitcode=code, **fields)


IN_TASK = "crash_tasks.py"

CRASHES = [
    crash(
        "value_error",
        ValueError,
        "the number is odd",
        cause_says=(IN_TASK, 'raise ValueError("the number is odd")', "in value_error"),
    ),
    crash("own_error", crash_tasks.OwnError, "own", "7", cause_says=(IN_TASK, "in own_error", "OwnError")),
    crash(
        "with_note_and_cause",
        KeyError,
        "table",
        cause_says=("the number is odd", "direct cause", "KeyError: 'table'", "a note"),
    ),
    crash(
        "unpicklable_error",
        WorkerTaskError,
        "raised crash_tasks.UnpicklableError: holds a lock",
        cause_says=(IN_TASK, "in unpicklable_error"),
    ),
    crash(
        "not_rebuilt_error",
        WorkerTaskError,
        "raised crash_tasks.NotRebuiltError: left right",
        cause_says=(IN_TASK, "in not_rebuilt_error"),
    ),
    crash("silent_error", crash_tasks.SilentError, cause_says=(IN_TASK, "in silent_error")),
    crash(
        "library_error",
        WorkerTaskError,
        "raised worker_library.LibraryError: from far away",
        cause_says=(IN_TASK, "in library_error"),
    ),
    crash(
        "library_error_inside",
        WorkerTaskError,
        "raised ValueError: ('holds an object'",
        cause_says=(IN_TASK, "in library_error_inside"),
    ),
    crash(
        "keyboard_interrupt",
        WorkerTaskError,
        "raised KeyboardInterrupt",
        cause_says=(IN_TASK, "in keyboard_interrupt"),
    ),
    died("system_exit", "exited with code 0", "before it returned a result", "leaving", args=(0,), code=0),
    died("system_exit", "exited with code 3", "leaving", args=(3,), code=3),
    died("system_exit", "exited with code 1", "no data here", args=("no data here",), code=1),
    died("os_exit", "exited with code 7", "leaving at once", args=(7,), code=7),
    died("os_exit", "exited with code 0", args=(0,), code=0),
    died("kill_itself", "killed by SIGKILL (9)", "dmesg", "the last words", args=(9,), code=-9),
    died("kill_itself", "killed by SIGTERM (15)", "the last words", args=(15,), code=-15),
    died("kill_itself", "killed by SIGINT (2)", "the last words", args=(2,), code=-2),
    died("kill_itself", f"killed by signal ({signal.SIGRTMIN + 3})", args=(37,), code=-37),
    died("segfault", "killed by SIGSEGV (11)", "Segmentation fault", IN_TASK, "in segfault", code=-11),
    died("abort", "killed by SIGABRT (6)", "Aborted", "in abort", code=-6),
    died("killed_with_the_gil", "killed by SIGTERM (15)", code=-15),
    died("killed_while_writing_the_reply", "killed by SIGKILL (9)", code=-9),
    died("killed_by_the_clock_while_writing", "killed by SIGALRM (14)", code=-14),
    crash("unpicklable_result", InvalidResultError, "TypeError: this object stays where it is"),
    crash("result_for_itself", InvalidResultError, "cannot rebuild", "RuntimeError: built in"),
    crash("endless_result", InvalidResultError, "PicklingError", "recursion"),
    crash("no_such_function", WorkerStartError, "'crash_tasks' has no 'no_such_function'"),
    crash("IN_NO_FUNCTION", WorkerStartError, "has no 'IN_NO_FUNCTION'"),
    crash("os", WorkerStartError, "'crash_tasks:os' is a module, not a function"),
    Crash("no_such_module:task", WorkerStartError, ("cannot import the task", "no_such_module", "sys.path")),
    Crash(
        "broken_import:task",
        WorkerStartError,
        ("cannot import the task", "RuntimeError: this module is broken"),
        cause_says=("broken_import.py", 'raise RuntimeError("this module is broken")'),
    ),
    died("die_with_children", "killed by SIGKILL (9)", code=-9),
    died("leak_shared_memory", "killed by SIGKILL (9)", args=(True,), code=-9),
    died("write_a_lot_and_die", "exited with code 7", "xxxxx", "written", args=(True,), code=7),
    died("write_a_lot_and_die", "exited with code 7", "written", args=(False,), code=7),
    died("close_stdout_and_die", "exited with code 7", "the last words", code=7),
    died("close_everything", "exited with code", code=1),
    died("write_what_is_no_text", "café", "broken", r"a lone surrogate: \udc80", code=7),
    died("draw_a_bar_and_die", "exited with code 7", "\n    999 of 1000", code=7),
]


@pytest.mark.parametrize("case", CRASHES, ids=str)
def test_crash(case: Crash, start_method: str, run: Run) -> None:
    with pytest.raises(case.error) as caught:
        run_in_worker(case.task, *case.args, start_method=start_method)
    error = caught.value
    assert type(error) is case.error or case.error is KeyError
    if case.error is not crash_tasks.SilentError:
        text = str(error)
        assert [part for part in case.says if part not in text] == []
        assert len(text) < 20_000
    if case.exitcode is not None and case.task != "crash_tasks:close_everything":
        assert isinstance(error, WorkerDiedError)
        assert error.exitcode == case.exitcode
    cause = str(error.__cause__)
    assert [part for part in case.cause_says if part not in cause] == []
    assert "worker_library" not in sys.modules  # what only the worker needs is not imported here
    (finished,) = run.events("worker_finished")
    assert finished["outcome"] == case.outcome
    assert finished["error"].startswith(type(error).__name__)


HANGS = [
    ("hang_in_sleep", ["in hang_in_sleep", "going to sleep"]),
    ("hang_with_the_gil", ["in hang_with_the_gil"]),
    ("hang_with_many_threads", ["in hang_with_many_threads", "in hang_in_sleep", "going to sleep"]),
    ("hang_with_children", ["in hang_with_children"]),
    ("hang_stopped", []),
    ("hang_deaf", []),
    ("hang_chattering", ["still here"]),
]


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


def test_exception_of_torch_leaves_torch_unimported(run_script: Callable[..., Any]) -> None:
    done = run_script(
        """
        import sys
        from flower_gpu import run_in_worker
        from flower_gpu.errors import WorkerTaskError

        def task():
            import torch
            raise torch.OutOfMemoryError("no memory on the card")

        try:
            run_in_worker(task, start_method="spawn")
        except WorkerTaskError as error:
            print(error)
            assert "in task" in str(error.__cause__)
        assert "torch" not in sys.modules
        """
    )
    assert "raised torch.OutOfMemoryError: no memory on the card" in done.stdout


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


@pytest.mark.parametrize("task", ["never_ends_its_thread", "never_ends_at_exit"])
def test_hang_after_the_result(
    task: str, start_method: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result counts; the worker gets a moment to exit, not for ever."""
    monkeypatch.setattr("flower_gpu.isolation.worker._EXIT_GRACE_S", 0.3)
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


def test_every_call_has_a_process_of_its_own(start_method: str, run: Run) -> None:
    pids = [run_in_worker("plain_tasks:pid", start_method=start_method) for _ in range(3)]
    assert len({*pids, os.getpid()}) == 4
    assert run.pids() == pids
    assert not any(running_in_group(pid) for pid in pids)
