"""The end of callers and workers: after Ctrl-C, a kill or at a limit, nothing is left and no call hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkservers
import hung_disk
import pytest
from forkservers import WITH_TASKS
from processes import SUPERVISED, Run, children_of, is_running, wait_until
from run_programs import run, run_python

from flower_gpu.unkillable import sleeping_in

pytestmark = forkservers.marks()

StartCaller = Callable[..., subprocess.Popen[str]]

INTERRUPTED = """
    import sys, time
    from flower_gpu import run_in_worker

    def busy_in_the_worker():
        import os
        print("pids", os.getpid(), flush=True)
        while True:
            time.sleep(0.01)

    run_in_worker(busy_in_the_worker, start_method=sys.argv[1])
"""

# Each worker has two children that ignore signals, as workers of a DataLoader ignore SIGINT. A fork of the
# caller holds copies of all its descriptors.
KILLED = """
    import ctypes, os, signal, subprocess, sys, threading, time
    from pathlib import Path
    from flower_gpu import run_in_worker
    from flower_gpu.workers.call import Call
    from flower_gpu.workers.caller import Line

    def busy(hold_the_gil):
        code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
        children = [subprocess.Popen([sys.executable, "-S", "-c", code]).pid for _ in range(2)]
        print("pids", os.getpid(), *children, flush=True)
        Path(folder, f"worker{os.getpid()}").touch()
        if hold_the_gil:
            while True:
                ctypes.PyDLL(None).sleep(600)
        time.sleep(600)

    method, folder = sys.argv[1:]
    for hold in (True, False):
        threading.Thread(target=run_in_worker, args=(busy, hold), kwargs={"start_method": method}).start()
    idle = Line()
    pid = idle.run(Call("os:getpid"), method, calls=2)
    # A single write, because the workers write at the same time.
    os.write(1, f"pids {pid}\\n".encode())
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    child = os.fork()
    if child:
        Path(folder, "new").write_text(str(child))
        Path(folder, "new").rename(Path(folder, "child"))
    time.sleep(600)
"""


@pytest.fixture
def caller(write_script: Callable[[str], Path]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(text: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(write_script(text)), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_pids(process: subprocess.Popen[str], lines: int = 1) -> list[int]:
    assert process.stdout is not None
    pids: list[int] = []
    for _ in range(lines):
        line = process.stdout.readline()
        if not line.startswith("pids "):
            process.kill()
            raise AssertionError(line + process.communicate()[1])
        pids += map(int, line.split()[1:])
    return pids


@pytest.mark.parametrize(
    ("receiver", "start_method"),
    [*(("group", method) for method in SUPERVISED), ("caller", "forkserver")],
    indirect=["start_method"],
)
def test_ctrl_c_ends_the_worker_before_its_caller(
    receiver: str, start_method: str, run: Run, caller: StartCaller
) -> None:
    """A terminal sends SIGINT to the whole process group."""
    process = caller(INTERRUPTED, start_method)
    (worker,) = read_pids(process)
    assert worker != process.pid
    (os.killpg if receiver == "group" else os.kill)(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "in busy_in_the_worker" not in errors
    # The worker has ended before the caller, not shortly after it.
    assert not is_running(worker)
    (finished,) = run.events("worker_finished")
    assert finished["outcome"] == "cancelled"


def test_ctrl_c_during_many_short_calls_leaves_nothing_behind(start_method: str, caller: StartCaller) -> None:
    """Ctrl-C comes at random moments. It must not leave a worker, its traceback, a descriptor or a lease."""
    script = """
        import gc, os, random, signal, sys, threading, time
        from flower_gpu import run_in_worker
        from flower_gpu.leases.ledger import Ledger

        def short():
            return os.getpid()

        run_in_worker(short, start_method=sys.argv[1])
        def opened():
            links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
            return [os.readlink(link) for link in links if os.path.lexists(link)]
        descriptors = opened()

        def interrupt_a_call(number, frame):
            while frame is not None:
                if frame.f_code is run_in_worker.__code__:
                    raise KeyboardInterrupt
                frame = frame.f_back

        signal.signal(signal.SIGINT, interrupt_a_call)
        stop = threading.Event()
        def interrupt():
            while not stop.wait(random.uniform(0.0, 0.03 if sys.argv[1] == "fork" else 0.3)):
                os.killpg(0, signal.SIGINT)

        interrupted = 0
        thread = threading.Thread(target=interrupt)
        thread.start()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            try:
                run_in_worker(short, start_method=sys.argv[1])
            except KeyboardInterrupt:
                interrupted += 1
        stop.set()
        thread.join()
        print("pids", os.getpid())
        print("interrupted" if interrupted else "never interrupted")
        gc.collect()  # Tracebacks may keep descriptors open.
        print("lost", [target for target in opened() if target not in descriptors])
        leases = [entry for entry in Ledger().status().holders if entry.pid == os.getpid()]
        print("all leases released", not leases, flush=True)
        time.sleep(600)
    """
    process = caller(script, start_method)
    assert read_pids(process) == [process.pid]
    assert process.stdout is not None
    assert process.stdout.readline() == "interrupted\n"
    assert process.stdout.readline() == "lost []\n"
    assert process.stdout.readline() == "all leases released True\n"
    assert wait_until(lambda: not [pid for pid in children_of(process.pid) if is_running(pid)])
    process.kill()
    assert "Process flower-gpu" not in process.communicate()[1]


def test_workers_end_when_their_caller_is_killed(
    start_method: str, caller: StartCaller, tmp_path: Path
) -> None:
    """The caller has two running calls, an idle worker and a fork. One of the tasks holds the GIL."""
    folder = tmp_path / "reached"
    folder.mkdir()
    process = caller(KILLED, start_method, folder)
    pids = read_pids(process, lines=3)
    assert len(pids) == 7
    assert all(is_running(pid) for pid in pids)
    assert wait_until((folder / "child").exists)
    child = int((folder / "child").read_text())
    try:
        process.kill()
        assert wait_until(lambda: not any(is_running(pid) for pid in pids))
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


# Callers at a limit -----------------------------------------------------------------------------------------

MANY_FILES = """
import json, os, signal, subprocess, sys
import light_servers, many_files
from flower_gpu import run_in_worker
from flower_gpu.workers import life
from flower_gpu.workers.forkserver import client, control

light_servers.begin()

def pid():
    return run_in_worker("os:getpid", gpu="never", start_method="forkserver")

pid()
many_files.open_many()

tracker = subprocess.Popen(["sleep", "600"])
life._TRACKER_S = 0.1
before = len(os.listdir("/proc/self/fd"))
life.end_later([tracker.pid])
ended_with = tracker.wait(60)

[server] = control.status()
os.kill(server.pid, signal.SIGSTOP)
client._ANSWER_S = 0.5
pid()
[other] = control.status()
print(json.dumps([ended_with, other.pid != server.pid]))
control.stop(wait_s=10)
"""

NO_THREADS = """
import json, os, sys, threading, time
from flower_gpu import run_in_worker

import light_servers

light_servers.begin()
os.environ["FLOWER_GPU_CPU_LEASES"] = "off"

def late(): return run_in_worker("tasks_threads:ends_late", gpu="never", start_method=sys.argv[1])

def files(): return len(os.listdir("/proc/self/fd"))

def start(self): raise RuntimeError("can't start new thread")

results = [late()]
for thread in threading.enumerate():
    if thread.name == "flower-gpu-leaving":
        thread.join()
before = files()
threading.Thread.start = start
results += [late(), late()]
print(json.dumps([results, files() - before]))
"""


def run_and_parse(code: str, *arguments: str) -> object:
    """Run a program, and return the JSON value in its last line."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), WITH_TASKS["PYTHONPATH"]])
    done = run_python(code, *arguments, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.usefixtures("folder")
def test_a_caller_with_many_files_ends_processes_that_hang() -> None:
    """It ends a resource tracker, and replaces a fork server that does not answer."""
    assert run_and_parse(MANY_FILES) == [-9, True]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_without_threads_no_result_is_lost_and_no_file_stays_open(start_method: str) -> None:
    """Usually a thread waits for a worker that exits late. Here no thread can start."""
    assert run_and_parse(NO_THREADS, start_method) == [[42, 42, 42], 0]


# Workers that SIGKILL does not end --------------------------------------------------------------------------


@pytest.fixture
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """Run ``stuck_caller.py`` with a disk that hangs, and yield its report on each step."""
    disk, scratch, state, ledger = (tmp_path / name for name in ("disk", "scratch", "state", "ledger"))
    for folder in (disk, scratch, state, ledger):
        folder.mkdir(mode=0o700)
    ledger.chmod(0o1777)
    probe = run([sys.executable, hung_disk.__file__, disk, "-c", ""], stdin=subprocess.DEVNULL)
    if probe.returncode:
        pytest.skip(f"no FUSE file system can be mounted here: {probe.stderr}")
    env = {
        **os.environ,
        **forkservers.WITH_TASKS,
        "FLOWER_GPU_STATE_DIR": str(state),
        "FLOWER_GPU_LEDGER_DIR": str(ledger),
        "FLOWER_GPU_SERVER_IDLE_S": "0.1",
    }
    command = [
        hung_disk.__file__,
        disk,
        Path(__file__).with_name("stuck_caller.py"),
        disk,
        request.param,
        scratch,
    ]
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None

        def step_reports() -> Iterator[dict[str, Any]]:
            for line in program.stdout or ():
                step = json.loads(line)
                if step["step"] == "cancelled":
                    program.stdin.write("\n")
                    program.stdin.flush()
                yield step

        yield step_reports()
        _, errors = program.communicate()
        assert program.returncode == 0, errors


@pytest.mark.parametrize("steps", ["forkserver", "spawn"], indirect=True)
def test_a_worker_that_cannot_be_killed_fails_only_its_own_call(steps: Iterator[dict[str, Any]]) -> None:
    reports = {step["step"]: step for step in steps}
    late = reports["late"]
    assert late["kind"] == "WorkerTimeoutError"
    assert f"the worker (pid {late['pid']}) cannot be killed: after SIGKILL it is in state D" in late["text"]
    # The lease stays with the process.
    assert reports["leased"]["holders"] == ["left_tasks:look_at on the server"]
    assert reports["goes on"]["value"] == 36
    assert "interrupted" in reports
    assert reports["cancelled"]["kind"] == "WorkerDiedError"
    # Once the disk answers, the workers end, and nothing is left.
    assert reports["gone"]["workers"] == []
    assert reports["programs"]["abandoned"] == ["run", "end_group"]


def test_the_state_of_a_sleeping_process_is_reported() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert sleeping_in(process.pid).startswith("state ")
    assert sleeping_in(process.pid) == "state unknown"
