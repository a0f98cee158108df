"""What can go wrong in a worker: tasks, and what their callers get. For workers of all kinds."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import crash_tasks

from flower_gpu.errors import InvalidResultError, WorkerDiedError, WorkerStartError, WorkerTaskError


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

    def check(self, error: BaseException) -> None:
        """Hold the error that the caller got to what is expected."""
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
    crash(
        "keyboard_interrupt",
        WorkerTaskError,
        "raised KeyboardInterrupt",
        cause_says=(IN_TASK, "in keyboard_interrupt"),
    ),
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
    died("close_stdout_and_die", "exited with code 7", "the last words", code=7),
    died("close_everything", "exited with code", code=1),
    died("write_what_is_no_text", "café", "broken", r"a lone surrogate: \udc80", code=7),
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
