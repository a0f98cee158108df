"""The state that a worker starts with: definitions in ``__main__``, options, paths, environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forkservers import WITH_TASKS
from processes import SUPERVISED, Run

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerStartError

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_script_without_a_main_guard_runs_once(run_with_methods: RunScript) -> None:
    done = run_with_methods(
        """
        from dataclasses import dataclass

        print("the body runs")
        RATE = 0.5

        @dataclass
        class Settings:
            epochs: int = 2

        def helper(x):
            return x * RATE

        def task(settings, x):
            return [helper(x), settings, Settings(epochs=9)]

        for method in METHODS:
            half, passed, new = run_in_worker(task, Settings(4), 10, start_method=method)
            print(half, passed, new, type(passed) is Settings, type(new) is Settings)
        """
    )
    assert done.stdout == "the body runs\n" + "5.0 Settings(epochs=4) Settings(epochs=9) True True\n" * 3
    assert done.stderr == ""


def test_tasks_may_be_functions_objects_or_names(start_method: str, run: Run) -> None:
    offset = 40

    class Adder:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, x: int) -> int:
            return x + self.by

    assert run_in_worker(lambda x: x + offset, 2, start_method=start_method) == 42
    returned = run_in_worker(lambda: lambda x: x + offset, start_method=start_method)
    assert returned(2) == 42
    assert run_in_worker(Adder(2), 40, start_method=start_method) == 42
    assert run_in_worker("os:path.basename", "/folder/name", start_method=start_method) == "name"


def test_the_worker_searches_the_path_of_its_caller(
    start_method: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_this_test.py").write_text("def where():\n    return __file__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, Path("not a string")])  # Python ignores this entry.
    result = run_in_worker("module_of_this_test:where", start_method=start_method)
    assert result == str(tmp_path / "module_of_this_test.py")
    worker = run_in_worker("plain_tasks:path_and_process", start_method=start_method)
    assert worker["path"] == [entry for entry in sys.path if isinstance(entry, str) or start_method == "fork"]
    assert worker["group"] == worker["pid"] != os.getpgrp()


def test_workers_have_the_interpreter_options_and_safe_path_of_the_caller(
    run_with_methods: RunScript, tmp_path: Path
) -> None:
    """With PYTHONSAFEPATH, neither the working folder nor the script's folder is searched."""
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')\n")
    (tmp_path / "signal.py").write_text("raise RuntimeError('the wrong signal')\n")
    done = run_with_methods(
        """
        import light_servers
        light_servers.begin()
        for method in METHODS:
            assert run_in_worker("plain_tasks:answer", start_method=method) == 42
            print("optimized", sys.flags.optimize, run_in_worker(lambda: __debug__, start_method=method))
        """,
        flags=("-O",),
        env={"PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
    )
    assert done.stdout == "optimized 1 False\n" * 3


@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0), reason="3.13.0 itself fails there: SystemError in a module's getattr"
)
@pytest.mark.parametrize("path", ["absolute", "relative"])
def test_the_working_folder_may_be_deleted(run_script: RunScript, tmp_path: Path, path: str) -> None:
    """Programs that run a script, such as profilers, may set a relative ``__file__``."""
    folder = tmp_path / "gone"
    folder.mkdir()
    text = """
        import os, shutil, sys
        shutil.rmtree(os.getcwd())
        from flower_gpu import run_in_worker
        for method in sys.argv[1:]:
            print(run_in_worker("plain_tasks:answer", start_method=method))
        """
    if path == "relative":
        (folder / "program.py").write_text(textwrap.dedent(text))
        text = "import runpy; runpy.run_path('program.py', run_name='__main__')"
    env = WITH_TASKS
    assert run_script(text, *SUPERVISED, env=env, cwd=folder).stdout == "42\n" * 3


@pytest.mark.parametrize("argument", ["-c", "-"])
def test_a_caller_may_have_no_script_file(argument: str) -> None:
    text = (
        "from flower_gpu import run_in_worker\n"
        f"print([run_in_worker(lambda: 42, start_method=method) for method in {SUPERVISED}])\n"
    )
    line = [sys.executable, argument, *([text] if argument == "-c" else [])]
    done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[42, 42, 42]\n", "")


def test_a_worker_exits_as_a_program_does(start_method: str, run: Run, tmp_path: Path) -> None:
    """Threads that are not daemons are joined, and exit functions run."""

    def task(folder: Path) -> str:
        import atexit
        import threading
        import time

        def later() -> None:
            time.sleep(0.2)
            (folder / "thread").touch()

        threading.Thread(target=later).start()
        atexit.register((folder / "atexit").touch)
        return "result"

    assert run_in_worker(task, tmp_path, start_method=start_method) == "result"
    assert (tmp_path / "thread").exists() and (tmp_path / "atexit").exists()


def test_a_nested_call_has_its_own_process_and_group(start_method: str, run: Run) -> None:
    def outer(method: str) -> Any:
        from flower_gpu import run_in_worker

        inner = run_in_worker("plain_tasks:path_and_process", start_method=method)
        return os.getpid(), inner["pid"], inner["group"]

    worker, nested, group = run_in_worker(outer, start_method, start_method=start_method)
    assert len({os.getpid(), worker, nested}) == 3
    assert group == nested


def test_a_daemonic_process_can_make_calls(run_with_methods: RunScript) -> None:
    """multiprocessing does not let a daemonic process have children."""
    done = run_with_methods(
        """
        def task():
            import multiprocessing
            process = multiprocessing.get_context("fork").Process(target=print, args=("grandchild",))
            process.start()
            process.join()
            return multiprocessing.current_process().daemon

        def client():
            for method in METHODS:
                print(run_in_worker(task, start_method=method), flush=True)

        process = multiprocessing.get_context("fork").Process(target=client, daemon=True)
        process.start()
        process.join()
        """
    )
    assert done.stdout == "grandchild\nFalse\n" * 3


VARIABLE = "FLOWER_GPU_TEST_VARIABLE"


@pytest.fixture(autouse=True)
def no_test_modules_and_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    for module in ("reads_environment", "changes_environment"):
        sys.modules.pop(module, None)


VALUES = ("", "ä ö \N{SNOWMAN}", "two\nlines", "a=b", "x" * 100_000)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork", "in-process"])
def test_variables_of_a_call_are_set_before_imports_and_do_not_leak(
    start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {f"{VARIABLE}_{number}": value for number, value in enumerate(VALUES)}
    names = [*env]
    assert run_in_worker("plain_tasks:variables", *names, start_method=start_method, env=env) == [*VALUES]
    assert not env.keys() & os.environ.keys()
    assert run_in_worker("plain_tasks:variables", *names, start_method=start_method) == [None] * len(VALUES)
    monkeypatch.setenv(VARIABLE, "the caller's")
    call = {"start_method": start_method, "env": {VARIABLE: "the worker's"}}
    assert run_in_worker("reads_environment:at_import", **call) == ("the worker's", "the worker's")
    assert os.environ[VARIABLE] == "the caller's"


def test_a_variable_does_not_leak_after_an_error_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="odd"):
        run_in_worker("crash_tasks:value_error", start_method="in-process", env={VARIABLE: "new"})
    assert VARIABLE not in os.environ


def test_a_module_must_not_change_variables_of_the_call(start_method: str, run: Run) -> None:
    with pytest.raises(WorkerStartError) as caught:
        run_in_worker("changes_environment:task", start_method=start_method, env={VARIABLE: "s3cret"})
    for part in (f"{VARIABLE} was set to another value", "env="):
        assert part in str(caught.value)
    assert "s3cret" not in str(caught.value)
    # A module may change variables that the call does not set.
    assert run_in_worker("changes_environment:task", start_method=start_method) == "not reached"


def test_the_library_path_is_set_before_a_worker_is_spawned(run: Run) -> None:
    """The loader reads LD_LIBRARY_PATH only when a program starts."""

    def initial_environment() -> bytes:
        with open("/proc/self/environ", "rb") as file:
            return file.read()

    variables = run_in_worker(initial_environment, start_method="spawn", env={"LD_LIBRARY_PATH": "/nowhere"})
    assert b"LD_LIBRARY_PATH=/nowhere\0" in variables


def test_values_of_variables_are_not_on_the_command_line(start_method: str, run: Run) -> None:
    """All accounts can read the command line, and a value may be a secret token."""

    def command_line() -> str:
        return Path("/proc/self/cmdline").read_text()

    env = {VARIABLE: "a-secret-token"}
    text = run_in_worker(command_line, name="3", start_method=start_method, env=env)
    assert "a-secret-token" not in text
    if start_method == "spawn":
        assert "flower-gpu: " in text  # The name of the call is on the command line.
        assert " of client 3" in text


def test_output_is_utf8_in_every_locale(run_with_methods: Callable[..., Any]) -> None:
    """The caller decodes it as UTF-8, and escapes characters that its own stream cannot write."""
    done = run_with_methods(
        """
        import light_servers
        light_servers.begin()

        def task():
            print("caf\\u00e9")
            os._exit(3)

        for method in METHODS:
            try:
                run_in_worker(task, start_method=method)
            except Exception as error:
                print(ascii(str(error)[-4:]))
        """,
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.stdout == "caf\\xe9\n'caf\\xe9'\n" * 3


def test_a_task_may_use_pools_of_all_start_methods(start_method: str) -> None:
    assert run_in_worker("plain_tasks:squares_of_pools", start_method=start_method) == [[0, 1, 4, 9]] * 3
