"""Failures in workers, for each supervised start method. Nothing is left, and the next call works."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import crash_tasks
import pytest
from processes import SHARED_MEMORY, SUPERVISED, Run, is_running, wait_until
from worker_lines import Caller

from flower_gpu import run_in_worker, trace
from flower_gpu.errors import (
    InvalidResultError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTaskError,
    WorkerTimeoutError,
)
from flower_gpu.workers.call_end import place_of
from flower_gpu.workers.forkserver import client


@dataclass(frozen=True)
class Crash:
    """A task, the error that its caller gets, and texts in the error's message."""

    task: str
    error: type[BaseException]
    says: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    outcome: str = "error"
    exitcode: int | None = None
    cause_says: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.task.partition(":")[2], *map(str, self.args)])

    def check(self, error: BaseException) -> None:
        """Check the error that the caller got."""
        assert type(error) is self.error or self.error is KeyError
        if self.error is not crash_tasks.SilentError:
            text = str(error)
            assert [part for part in self.says if part not in text] == []
            assert len(text) < 20_000
        if self.exitcode is not None and self.task != "crash_tasks:close_everything":
            assert isinstance(error, WorkerDiedError)
            assert error.exitcode == self.exitcode
        cause = str(error.__cause__)
        assert [part for part in self.cause_says if part not in cause] == []


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
    crash("keyboard_interrupt", WorkerTaskError, "raised KeyboardInterrupt", cause_says=(IN_TASK,)),
    died(
        "system_exit",
        "exited with code 0 (sys.exit in crash_tasks.py, line ",
        "before it returned a result",
        "leaving",
        args=(0,),
        code=0,
    ),
    died("system_exit", "exited with code 1", "no data here", args=("no data here",), code=1),
    died("os_exit", "exited with code 7 after", "leaving at once", args=(7,), code=7),
    died("kill_itself", "killed by SIGKILL (9)", "dmesg", "the last words", args=(9,), code=-9),
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
    died("close_stdout_and_die", "exited with code 7", "the last words", code=7),
    died("close_everything", "exited with code", code=1),
    died("write_invalid_text", "café", "broken", r"a lone surrogate: \udc80", code=7),
    died("draw_a_bar_and_die", "exited with code 7", "\n    999 of 1000", code=7),
]

HANGS = [
    ("hang_in_sleep", ["in hang_in_sleep", "going to sleep"]),
    ("hang_with_the_gil", ["in hang_with_the_gil"]),
    ("hang_with_many_threads", ["in hang_with_many_threads", "in hang_in_sleep", "going to sleep"]),
    ("hang_with_children", ["in hang_with_children"]),
    ("hang_stopped", []),
    ("hang_deaf", []),
    ("hang_chattering", ["still here"]),
]


#: Cases for all start methods. A worker reports errors in the same way for each, but ends differently.
FOR_ALL_METHODS = {"value_error", "no_such_function", "system_exit-no data here", "kill_itself-9", "segfault"}
FOR_ALL_METHODS |= {"die_with_children", "close_everything", "leak_shared_memory-True"}
FOR_ALL_METHODS |= {"killed_while_writing_the_reply"}
CASES = [
    (case, method)
    for case in CRASHES
    for method in SUPERVISED
    if method == "forkserver" or str(case) in FOR_ALL_METHODS
]


@pytest.mark.parametrize(("case", "start_method"), CASES, ids=str, indirect=["start_method"])
def test_a_crash_is_reported_to_the_caller(case: Crash, start_method: str, run: Run) -> None:
    with pytest.raises(case.error) as caught:
        run_in_worker(case.task, *case.args, start_method=start_method)
    case.check(caught.value)
    # The caller must not import a library that only the worker needs.
    assert "worker_library" not in sys.modules
    (finished,) = run.events("worker_finished")
    assert finished["outcome"] == case.outcome
    assert finished["error"].startswith(type(caught.value).__name__)


@pytest.mark.parametrize(
    ("function", "says", "start_method"),
    [
        (*hang, method)
        for hang in HANGS
        for method in SUPERVISED
        if method == "forkserver" or hang is HANGS[0]
    ],
    indirect=["start_method"],
)
def test_a_task_that_hangs_is_ended_at_the_time_limit(
    function: str, says: list[str], start_method: str, run: Run, after_reaching: Callable[..., BaseException]
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


def test_an_exception_class_of_main_is_raised_in_the_caller(run_with_methods: Callable[..., Any]) -> None:
    done = run_with_methods(
        """
        class OwnError(Exception):
            def __init__(self, text, code=0):
                super().__init__(text)
                self.code = code

        def task():
            raise OwnError("from main", code=5)

        for method in METHODS:
            try:
                run_in_worker(task, start_method=method)
            except OwnError as error:
                cause = str(error.__cause__)
                print(error, error.code, "script.py" in cause, "in task" in cause)
        """
    )
    assert done.stdout == "from main 5 True True\n" * 3


def test_a_worker_killed_from_outside_is_reported(start_method: str, run: Run) -> None:
    def kill_soon() -> None:
        assert wait_until(lambda: bool(run.pids()), timeout_s=60)
        os.kill(run.pids()[0], signal.SIGTERM)

    thread = threading.Thread(target=kill_soon)
    thread.start()
    with pytest.raises(WorkerDiedError, match=r"killed by SIGTERM \(15\)") as caught:
        run_in_worker("time:sleep", 600, start_method=start_method)
    thread.join()
    assert caught.value.exitcode == -signal.SIGTERM
    assert run_in_worker("plain_tasks:answer", start_method=start_method) == 42


@pytest.mark.parametrize("method", [*SUPERVISED, "line of workers"])
def test_a_pool_in_a_global_ends_with_its_worker(
    method: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller does not have to wait until the worker is killed."""
    monkeypatch.setattr("flower_gpu.workers.call_watch.EXIT_GRACE_S", 60.0)
    with contextlib.ExitStack() as stack:
        call: Callable[..., Any] = partial(run_in_worker, start_method=method)
        if method == "line of workers":
            call = stack.enter_context(contextlib.closing(Caller())).run
        assert ThreadPoolExecutor(1).submit(call, "plain_tasks:keeps_a_pool").result(30) == 49


@pytest.mark.parametrize("task", ["leave_children", "close_stdout"])
def test_a_result_is_returned_despite_left_children_or_a_closed_stdout(
    task: str, start_method: str, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_in_worker(f"crash_tasks:{task}", start_method=start_method) == 42
    assert capfd.readouterr() == ("", "")


def test_leaked_shared_memory_is_removed(start_method: str, run: Run) -> None:
    """Python's resource tracker gets the time that it needs. The fixture ``run`` checks /dev/shm."""
    name = run_in_worker("crash_tasks:leak_shared_memory", False, start_method=start_method)
    assert name.startswith("psm_")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "line of workers"])
def test_a_slow_resource_tracker_is_not_killed_with_its_worker(method: str, run: Run, tmp_path: Path) -> None:
    """The tracker may end after its call, and the next call does not wait for it."""
    if method == "line of workers" and not client.is_supported():
        pytest.skip("needs Linux 5.3")
    with contextlib.ExitStack() as stack:
        call: Callable[..., Any] = partial(run_in_worker, start_method=method)
        if method == "line of workers":
            call = stack.enter_context(contextlib.closing(Caller())).run
        with ThreadPoolExecutor() as pool:
            running = pool.submit(call, "crash_tasks:leak_to_a_slow_tracker", tmp_path)
            assert wait_until((tmp_path / "report").exists)
            report = json.loads((tmp_path / "report").read_text())
            pipe = os.open(f"/proc/{report['pid']}/fd/{report['fd']}", os.O_WRONLY)
            (tmp_path / "go").touch()
            running.result()
        assert call("plain_tasks:echo", 1) == (1,)
        block = SHARED_MEMORY / report["name"]
        assert is_running(report["tracker"]) and block.exists()
        os.close(pipe)
        assert wait_until(lambda: not is_running(report["tracker"]))
        assert not block.exists()


def test_an_argument_that_cannot_be_pickled_is_refused(run: Run) -> None:
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


def test_an_error_does_not_name_our_function_instead_of_the_users(run: Run) -> None:
    with pytest.raises(WorkerStartError) as caught:
        run_in_worker(trace.read, threading.Lock(), start_method="spawn")
    text = "the function, or what it is called with, cannot be passed to a worker (TypeError: "
    assert f"read on the server: {text}" in str(caught.value)


def test_an_argument_that_cannot_be_rebuilt_is_an_error_in_the_worker(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"built in \d+, made in \d+") as caught:
        run_in_worker("plain_tasks:echo", crash_tasks.CannotBeRebuilt(), start_method="spawn")
    assert "crash_tasks.py" in str(caught.value.__cause__)


def test_a_fork_gets_arguments_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    assert run_in_worker(lambda passed: passed.acquire(timeout=1), lock, start_method="fork") is True
    assert not lock.locked()  # Only the worker's copy is locked.


def test_in_process_errors_are_raised_unchanged() -> None:
    with pytest.raises(crash_tasks.OwnError) as caught:
        run_in_worker("crash_tasks:own_error", start_method="in-process")
    assert caught.value.__cause__ is None
    assert run_in_worker("plain_tasks:pid", start_method="in-process") == os.getpid()


def test_an_exit_is_attributed_to_the_app_not_to_a_library() -> None:
    library: dict[str, Any] = {}
    code = "import sys\ndef exit(code): raise SystemExit(code)\n"
    exec(compile(code, "/env/site-packages/wandb/exit_hooks.py", "exec"), library)
    with pytest.raises(SystemExit) as caught:
        library["exit"](3)
    assert place_of(caught.value) == f"test_crashes.py, line {caught.traceback[0].lineno + 1}"
