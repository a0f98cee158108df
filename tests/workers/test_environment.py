"""The worker's environment variables: there before anything is imported, and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from traced import SUPERVISED, Run

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerStartError

pytestmark = pytest.mark.timeout(60)

VARIABLE = "FLOWER_GPU_TEST_VARIABLE"


@pytest.fixture(autouse=True)
def neither_module_nor_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    for module in ("reads_environment", "changes_environment"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork", "in-process", "inline"])
def test_set_before_the_module_is_imported(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "the caller's")
    call = {"start_method": start_method, "env": {VARIABLE: "the worker's"}}
    assert run_in_worker("reads_environment:at_import", **call) == ("the worker's", "the worker's")
    # An inline call ends with its process, a flwr-clientapp: there it stays.
    assert os.environ[VARIABLE] == ("the worker's" if start_method == "inline" else "the caller's")


VALUES = ("", "ä ö \N{SNOWMAN}", "two\nlines", "a=b", "x" * 100_000)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork", "in-process"])
def test_values_arrive_as_they_are_and_do_not_leak(start_method: str) -> None:
    env = {f"{VARIABLE}_{number}": value for number, value in enumerate(VALUES)}
    names = [*env]
    assert run_in_worker("plain_tasks:variables", *names, start_method=start_method, env=env) == [*VALUES]
    assert not env.keys() & os.environ.keys()
    assert run_in_worker("plain_tasks:variables", *names, start_method=start_method) == [None] * len(VALUES)


def test_does_not_leak_after_an_error_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="odd"):
        run_in_worker("crash_tasks:value_error", start_method="in-process", env={VARIABLE: "new"})
    assert VARIABLE not in os.environ


def test_module_that_changes_the_environment(start_method: str, run: Run) -> None:
    with pytest.raises(WorkerStartError) as caught:
        run_in_worker("changes_environment:task", start_method=start_method, env={VARIABLE: "set"})
    for part in (VARIABLE, "is 'changed', not 'set'", "env="):
        assert part in str(caught.value)
    # It may change what the caller has not set.
    assert run_in_worker("changes_environment:task", start_method=start_method) == "not reached"


def test_library_path_is_set_at_exec(run: Run) -> None:
    """The loader reads LD_LIBRARY_PATH when a program starts, so a spawned worker has it from there."""

    def from_the_kernel() -> bytes:
        with open("/proc/self/environ", "rb") as file:
            return file.read()

    found = run_in_worker(from_the_kernel, start_method="spawn", env={"LD_LIBRARY_PATH": "/nowhere"})
    assert b"LD_LIBRARY_PATH=/nowhere\0" in found


def test_values_are_not_on_the_command_line(start_method: str, run: Run) -> None:
    """Everybody on the machine may read that; a value may be a token."""

    def command_line() -> str:
        return Path("/proc/self/cmdline").read_text()

    env = {VARIABLE: "a-secret-token"}
    found = run_in_worker(command_line, name="3", start_method=start_method, env=env)
    assert "a-secret-token" not in found
    if start_method == "spawn":
        assert "flower-gpu: " in found  # what it is for is
        assert " of client 3" in found


def test_output_is_utf8_whatever_the_locale_is(run_script: Callable[..., Any]) -> None:
    """The caller reads it so, and shows what its own stream cannot write as an escape."""
    done = run_script(
        """
        import os, sys
        from flower_gpu import run_in_worker

        def task():
            print("caf\\u00e9")
            os._exit(3)

        for method in sys.argv[1:]:
            try:
                run_in_worker(task, start_method=method)
            except Exception as error:
                print(ascii(str(error)[-4:]))
        """,
        *SUPERVISED,
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.stdout == "caf\\xe9\n'caf\\xe9'\n" * 3


def test_a_task_may_have_pools_of_all_kinds(start_method: str) -> None:
    assert run_in_worker("plain_tasks:squares_of_pools", start_method=start_method) == [[0, 1, 4, 9]] * 3
