"""Commands, runs and calls work with standard streams that are closed or cannot be written to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, combinations
from pathlib import Path

import pytest
from run_programs import TIMEOUT_S, run_python
from scripted_app import APP
from shared_servers import SHARED_STATE

pytestmark = pytest.mark.timeout(300)

CLI = (sys.executable, "-m", "flower_gpu.cli")
CLOSED = tuple(chain.from_iterable(combinations((0, 1, 2), count) for count in (1, 2, 3)))
ALL = (0, 1, 2)


def run(closed: tuple[int, ...], *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command with some of its standard descriptors closed."""
    redirections = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *map(str, command)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        env={**os.environ, **SHARED_STATE},
    )


@pytest.mark.parametrize("closed", CLOSED)
def test_top_works_with_closed_streams(closed: tuple[int, ...]) -> None:
    done = run(closed, *CLI, "top", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (1 not in closed)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (0, "gpus"),
        (0, "leases"),
        (0, "workers status"),
        (0, "footprint"),
        (0, "metrics --help"),
        (0, "supernode --help"),
        (0, "--version"),
        (2, "nonsense"),
        (2, "report /nowhere"),
        (2, "launch /nowhere"),
    ],
)
def test_each_command_has_the_same_status_as_with_open_streams(status: int, line: str) -> None:
    assert run(ALL, *CLI, *line.split()).returncode == status


#: A full disk.
FULL = "full"
#: A pipe with a reader that has exited.
GONE = "gone"


@contextmanager
def unwritable(kind: str) -> Iterator[int]:
    """Open a descriptor on which every write fails."""
    if kind == FULL:
        if not Path("/dev/full").exists():
            pytest.skip("there is no /dev/full here")
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        read, descriptor = os.pipe()
        os.close(read)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def run_into(kind: str, stream: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command that cannot write to ``stdout``, ``stderr`` or both."""
    with unwritable(kind) as descriptor:
        streams = {
            name: descriptor if stream in (name, "both") else subprocess.PIPE for name in ("stdout", "stderr")
        }
        return subprocess.run(
            list(map(str, command)),
            **streams,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            env={**os.environ, **SHARED_STATE},
        )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", ["leases", "gpus --json", "--version", "leases --help", "workers stop"])
def test_a_result_that_cannot_be_written_fails_with_a_one_line_error(
    line: str, unbuffered: str, tmp_path: Path
) -> None:
    variables = [f"PYTHONUNBUFFERED={unbuffered}", f"FLOWER_GPU_STATE_DIR={tmp_path}"]
    command = ["env", *variables, *CLI, *line.split()]
    done = run_into(FULL, "stdout", *command)
    reason = "flower-gpu: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, reason)
    done = run_into(GONE, "stdout", *command)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    assert run_into(FULL, "both", *command).returncode == 1


@pytest.mark.parametrize("kind", [FULL, GONE])
@pytest.mark.parametrize(
    ("status", "line"), [(0, "footprint"), (2, "leases --nonsense"), (2, "nonsense"), (2, "report /nowhere")]
)
def test_messages_that_cannot_be_written_do_not_change_the_status(
    kind: str, status: int, line: str, tmp_path: Path
) -> None:
    # This state folder is new, so it has no learned footprint.
    done = run_into(kind, "stderr", "env", f"FLOWER_GPU_STATE_DIR={tmp_path}", *CLI, *line.split())
    assert (done.returncode, done.stdout) == (status, "")


@pytest.mark.parametrize("kind", [FULL, GONE])
@pytest.mark.parametrize("stream", ["stdout", "stderr", "both"])
def test_a_run_continues_if_its_output_cannot_be_written(kind: str, stream: str, tmp_path: Path) -> None:
    command = ["simulate", APP, "--clients", "2", "--rounds", "1", "--log-dir", tmp_path]
    done = run_into(kind, stream, *CLI, *command)
    assert done.returncode == 0
    if stream == "stdout":
        assert "Traceback" not in done.stderr and "outcome" in done.stderr
        told = "cannot write to standard output: No space left on device. The command continues without it"
        assert done.stderr.count(told) == (kind == FULL), done.stderr
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "result.json").read_text())["outcome"] == "completed"


@pytest.mark.parametrize("closed", CLOSED)
def test_a_simulation_and_its_report_work_with_closed_streams(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    done = run(closed, *CLI, "simulate", APP, "--clients", "2", "--rounds", "1", "--log-dir", tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert ("outcome" in done.stderr) == (2 not in closed)
    assert "outcome" not in done.stdout, "the summary goes to stderr"
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "result.json").read_text())["outcome"] == "completed"
    if closed == ALL:
        assert run(closed, *CLI, "report", folder).returncode == 0
        assert (folder / "report.html").is_file()


@pytest.mark.e2e
def test_a_launch_works_with_closed_streams(tmp_path: Path) -> None:
    app = Path(__file__).parent / "launch/tiny_app"
    assert run(ALL, *CLI, "launch", app, "--log-dir", tmp_path).returncode == 0
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "result.json").read_text())["outcome"] == "completed"


LIBRARY = """
import json, os, sys
from pathlib import Path

def descriptors():
    return [os.readlink(f"/proc/self/fd/{number}").partition(":")[0] for number in range(3)]

def work(fails=False):
    print("written by the worker")
    print("and by it to stderr", file=sys.stderr)
    if fails:
        raise ValueError("of the task")
    return descriptors()

if __name__ == "__main__":
    from flower_gpu import run_in_worker, simulate

    found = {"streams": [sys.stdin is None, sys.stdout is None, sys.stderr is None]}
    for method in ("forkserver", "spawn", "fork"):
        found[method] = run_in_worker(work, gpu="never", start_method=method)
        try:
            run_in_worker(work, True, gpu="never", start_method=method)
        except ValueError as error:
            found[method].append(str(error))
    found["caller"] = descriptors()
    simulate(sys.argv[1], 2, run_config={"num-server-rounds": 1}, log_dir=sys.argv[2])
    Path(sys.argv[2], "found.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize("closed", [(1,), (2,), ALL])
def test_calls_and_simulate_work_in_a_program_with_closed_streams(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    """The program's streams are unchanged, and none of our descriptors has their numbers."""
    script = tmp_path / "script.py"
    script.write_text(LIBRARY)
    done = run(closed, sys.executable, script, APP, tmp_path / "runs")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stderr
    found = json.loads((tmp_path / "runs/found.json").read_text())
    assert found.pop("streams") == [number in closed for number in range(3)]
    caller = found.pop("caller")
    assert [caller[number] for number in closed] == ["/dev/null"] * len(closed)
    assert found == {
        method: ["/dev/null", "pipe", "pipe", "of the task"] for method in ("forkserver", "spawn", "fork")
    }
    assert done.stdout.count("written by the worker") == (0 if 1 in closed else 6)
    assert done.stderr.count("and by it to stderr") == (0 if 2 in closed else 6)
    assert "stderr" not in done.stdout


OWN_FILE = """
import os, sys
from flower_gpu import standard_streams

own = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
standard_streams.open_missing()
print("a line")
print("an error", file=sys.stderr)
os.write(own, b"data")
"""


def test_a_file_with_the_number_of_a_standard_stream_gets_no_output(tmp_path: Path) -> None:
    """A module may have opened the file before the command starts."""
    done = run((1, 2), sys.executable, "-c", OWN_FILE, tmp_path / "own")
    assert done.returncode == 0
    assert (tmp_path / "own").read_text() == "data"


def test_open_streams_are_not_replaced() -> None:
    code = """
import sys
from flower_gpu import standard_streams
before = sys.stdin, sys.stdout, sys.stderr
standard_streams.open_missing()
print(before == (sys.stdin, sys.stdout, sys.stderr))
"""
    assert run_python(code).stdout == "True\n"
