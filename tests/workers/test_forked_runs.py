"""`flower-gpu simulate` in a fork of the host's fork server behaves as in its own process."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forkservers
import pytest
import run_programs
from many_files import WITH_MANY_FILES
from processes import is_running
from waiting import until

from flower_gpu.workers.forkserver import control

pytestmark = forkservers.marks(timeout_s=300)

PROJECT = """
[project]
name = "reporter"
version = "1.0.0"
[tool.flwr.app]
publisher = "flower-gpu"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
[tool.flwr.app.config]
do = ""
"""
CLIENT = "from flwr.clientapp import ClientApp\napp = ClientApp()\n"
# The main function runs the code in the run config, and can report its process.
SERVER = """
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
import numpy as np
from flwr.serverapp import ServerApp

app = ServerApp()

def report(**more):
    fields = {"pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "cwd": os.getcwd(), **more}
    print("REPORT", json.dumps(fields), flush=True)

@app.main()
def main(grid, context):
    exec(context.run_config["do"], globals())
"""
WAIT = "report(); time.sleep(600)"
UNTIL_CLOSED = "report(); sys.stdin.read(); print('done', flush=True)"


@pytest.fixture(scope="module", autouse=True)
def own_servers() -> Iterator[None]:
    with forkservers.own_servers():
        yield


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reporter")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "client_app.py").write_text(CLIENT)
    (folder / "server_app.py").write_text(SERVER)
    return folder


def command(app: Path, do: str, *options: str) -> list[str]:
    config = f"do={json.dumps(do)}"
    output_options = ["--log-dir", str(app / "runs"), "--no-progress"]
    simulate = [sys.executable, "-m", "flower_gpu.cli", "simulate", str(app)]
    return [*simulate, "--clients", "1", *output_options, "--run-config", config, *options]


def report_in(text: str) -> dict[str, Any]:
    (line,) = [line for line in text.splitlines() if line.startswith("REPORT ")]
    report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    return report


def run(
    app: Path, do: str, *options: str, stdin: str = "", **more: Any
) -> tuple[run_programs.Ended, dict[str, Any]]:
    done = run_programs.run(command(app, do, *options), input=stdin, **more)
    return done, report_in(done.stdout) if "REPORT " in done.stdout else {}


@contextmanager
def running(app: Path, do: str = WAIT, **more: Any) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a run, and yield its command and its report."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    with subprocess.Popen(command(app, do), text=True, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout is not None
            yield process, report_in(process.stdout.readline())
        finally:
            process.kill()


def test_a_run_has_the_streams_and_environment_of_its_command(app: Path, tmp_path: Path) -> None:
    do = (
        "report(line=sys.stdin.read(), mask=os.umask(0), value=os.environ['A'], "
        "main=sys.modules['__main__'].__file__)"
    )
    done, report = run(
        app, do, stdin="typed", cwd=tmp_path, umask=0o027, env={**os.environ, "A": "b", "PYTHONSAFEPATH": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert report["cwd"] == str(tmp_path)
    assert report["argv"][1:3] == ["simulate", str(app)]
    assert report["main"] == report["argv"][0]
    assert (report["line"], report["mask"], report["value"]) == ("typed", 0o027, "b")


def test_the_command_may_have_many_open_files(app: Path) -> None:
    """The command waits for the run, even if its descriptor for the run has a large number."""
    done = run_programs.run([*WITH_MANY_FILES, *command(app, "report()")])
    assert done.returncode == 0 and report_in(done.stdout)["parent"] != os.getpid(), done.stderr
    assert "Traceback" not in done.stderr


def test_under_a_debugger_or_with_another_start_method_the_command_runs_it_itself(app: Path) -> None:
    program = (
        "import sys; sys.settrace(lambda *_: None); from flower_gpu.cli.main import main; sys.exit(main())"
    )
    arguments = command(app, "report()")[3:]
    done = run_programs.run_python(program, *arguments)
    assert report_in(done.stdout)["parent"] == os.getpid(), done.stderr
    done, report = run(app, "report()", env={**os.environ, "FLOWER_GPU_START_METHOD": "spawn"})
    assert report["parent"] == os.getpid(), done.stderr


@pytest.mark.parametrize(
    ("do", "status", "text"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("sys.exit(7)", 7, ""),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "the process of simulate reporter was killed by SIGKILL (9)",
        ),
        ("os._exit(9)", 9, ""),
    ],
)
def test_the_command_exits_with_the_status_of_the_run(do: str, status: int, text: str, app: Path) -> None:
    done, _ = run(app, do)
    assert text in done.stderr
    assert done.returncode == status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_command_ends_the_run(number: int, status: int, app: Path) -> None:
    with running(app) as (process, report):
        assert report["pid"] != process.pid
        assert report["parent"] in [status.pid for status in control.status()]
        assert ["simulate reporter"] in [status.workers for status in control.status()]
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert "interrupted" in errors
        assert not is_running(report["pid"])


def test_the_run_ends_when_the_command_is_killed(app: Path) -> None:
    with running(app, "child = subprocess.Popen(['sleep', '600']); report(); time.sleep(600)") as (
        process,
        report,
    ):
        process.kill()
        process.wait(60)
        assert until(lambda: not is_running(report["pid"]))
    assert control.status(), "the server must go on"


def test_processes_that_a_run_leaves_are_ended(app: Path) -> None:
    do = (
        "sleeps = 'setsid sleep 600 >/dev/null 2>&1 & echo $!'; "
        "child = subprocess.run(sleeps, shell=True, capture_output=True); "
        "time.sleep(1); pid = int(child.stdout); report(left=pid, lives=os.path.exists(f'/proc/{pid}'))"
    )
    done, report = run(app, do)
    assert done.returncode == 0, done.stderr
    assert report["lives"], "a process must live as long as its run"
    assert until(lambda: not is_running(report["left"]))


def in_terminal(arguments: Sequence[str], typed: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Run a command in a terminal. Type each text once the text before it has been printed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(arguments[0], list(arguments))
    seen = ""
    for awaited, text in typed:
        while awaited not in seen:
            seen += os.read(terminal, 4096).decode()
        os.write(terminal, text.encode())
    try:
        while data := os.read(terminal, 4096):
            seen += data.decode()
    except OSError:  # The terminal is closed.
        pass
    os.close(terminal)
    return seen, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_in_a_terminal_a_breakpoint_can_be_used(app: Path) -> None:
    shown, status = in_terminal(
        command(app, "x = 6\nbreakpoint()\nprint('went', 'on')"), [("(Pdb) ", "p x * 7\n"), ("42", "c\n")]
    )
    assert status == 0, shown
    assert "went on" in shown


def test_in_a_terminal_ctrl_c_ends_the_run(app: Path) -> None:
    shown, status = in_terminal(command(app, WAIT), [("REPORT ", "\x03")])
    assert status == 130, shown
    assert "interrupted" in shown


def test_ctrl_z_stops_the_run_until_it_is_continued(app: Path) -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    with running(app) as (process, report):
        process.send_signal(signal.SIGTSTP)
        assert until(lambda: state(process.pid) == "T" and state(report["pid"]) == "T")
        process.send_signal(signal.SIGCONT)
        assert until(lambda: state(process.pid) != "T" and state(report["pid"]) != "T")


# The next tests end the server.


def test_a_fork_server_told_to_stop_waits_for_the_run(app: Path) -> None:
    with running(app, UNTIL_CLOSED, stdin=subprocess.PIPE) as (process, report):
        assert control.stop()
        time.sleep(0.5)
        assert is_running(report["parent"])
        output, _ = process.communicate("", timeout=60)
        assert (output, process.returncode) == ("done\n", 0)
    assert until(lambda: not is_running(report["parent"]))


def test_a_run_goes_on_when_its_fork_server_is_killed(app: Path) -> None:
    with running(app, UNTIL_CLOSED, stdin=subprocess.PIPE) as (process, report):
        os.kill(report["parent"], signal.SIGKILL)
        assert until(lambda: not is_running(report["parent"]))
        output, errors = process.communicate("", timeout=60)
        assert output == "done\n"
        assert "the exit status of simulate reporter is unknown, because the fork server has ended" in errors
        assert process.returncode == 255
