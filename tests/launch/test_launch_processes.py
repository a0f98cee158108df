"""Supervision with real processes: early exits are reported, and no process outlives the launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launch_helpers import processes_of, read_pids
from live_processes import is_running
from waiting import until

from flower_gpu.launch import ports, supervisor
from flower_gpu.launch.supervisor import Service, tail

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

#: A minimal launcher. It starts the services named by its arguments and waits for a signal to stop.
LAUNCHER = """
import os, sys
from pathlib import Path
from flower_gpu.launch.supervisor import LaunchStoppedError, Service, Supervisor

folder, grace_s = Path(sys.argv[1]), float(sys.argv[2])
marker = f"FLOWER_GPU_RUN_DIR={folder}"
env = {**os.environ, "FLOWER_GPU_RUN_DIR": str(folder)}
code = 0
with Supervisor(marker) as supervisor:
    for name in sys.argv[3:]:
        command = [sys.executable, str(folder / f"{name}.py"), str(folder / f"{name}.pids")]
        supervisor.start(Service(name, command, env, folder / f"{name}.log"))
    try:
        while True:
            supervisor.wait(1.0)
    except LaunchStoppedError as stopped:
        code = 128 + stopped.signum
        supervisor.stop(grace_s=grace_s)
assert not supervisor.unkilled
sys.exit(code)
"""

#: Services. Each writes the pids that must be gone at the end, then sleeps.
POLITE = """
import os, sys, time
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
time.sleep(600)
"""
STUBBORN = """
import os, signal, sys, time
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
time.sleep(600)
"""
# Like a SuperLink, it starts a child in a new session, and the child's child becomes an orphan. Both ignore
# SIGTERM.
DETACHING = """
import os, signal, subprocess, sys, time
grandchild = (
    "import os, signal, subprocess, sys, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "sleep = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'\\n"
    "orphan = subprocess.Popen(['sh', '-c', f'{sys.executable} -c \\"{sleep}\\" & echo $!'],\\n"
    "                          stdout=subprocess.PIPE)\\n"
    "print(os.getpid(), int(orphan.stdout.readline()), flush=True)\\n"
    "time.sleep(600)\\n"
)
child = subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True, stdout=subprocess.PIPE)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.stdout.readline().decode()}")
time.sleep(600)
"""

# Leaves an orphan with an empty environment, so no variable connects the orphan with the run.
NAMELESS = """
import os, subprocess, sys, time
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
shell = f'env -i {sys.executable} -c "{sleep}" > /dev/null & echo $!'
orphan = subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True).stdout
open(sys.argv[1], "w").write(f"{os.getpid()} {orphan.decode()}")
time.sleep(600)
"""
SERVICES = {"polite": POLITE, "stubborn": STUBBORN, "detaching": DETACHING, "nameless": NAMELESS}

StartLauncher = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[StartLauncher]:
    """Start the minimal launcher with services, and check at the end that all processes are gone."""
    for name, text in SERVICES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    started: list[subprocess.Popen[bytes]] = []

    def start(*names: str, grace_s: float = 0.5) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path), str(grace_s), *names]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    try:
        until(lambda: not processes_of(tmp_path), "every process of the run is gone")
    finally:
        # A failed test must not leave processes behind either.
        pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def guard_of(launcher: subprocess.Popen[bytes]) -> int:
    (guard,) = [
        process.pid
        for process in psutil.Process(launcher.pid).children()
        if any(word.endswith("guard.py") for word in process.cmdline())
    ]
    return guard


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_ends_everything(signum: int, start_launcher: StartLauncher, tmp_path: Path) -> None:
    launcher = start_launcher(*SERVICES)
    pids = [pid for name in SERVICES for pid in read_pids(tmp_path / f"{name}.pids")]
    assert len(pids) == 7
    assert all(map(is_running, pids))
    launcher.send_signal(signum)
    _, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, err) == (128 + signum, b"")
    assert not any(map(is_running, pids))


def test_stopping_cannot_take_five_seconds() -> None:
    assert supervisor.GRACE_S + supervisor.KILL_S < 5.0


def test_a_second_ctrl_c_kills_the_services_at_once(start_launcher: StartLauncher, tmp_path: Path) -> None:
    launcher = start_launcher("stubborn", "polite", grace_s=100_000)
    (stubborn,), (polite,) = (read_pids(tmp_path / f"{name}.pids") for name in ("stubborn", "polite"))
    launcher.send_signal(signal.SIGINT)
    until(lambda: not is_running(polite), "the launcher is stopping")
    assert is_running(stubborn)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, err) == (130, b"")
    assert not is_running(stubborn)


def test_killed_launcher_takes_everything_with_it(start_launcher: StartLauncher, tmp_path: Path) -> None:
    launcher = start_launcher("stubborn", "detaching")
    pids = [pid for name in ("stubborn", "detaching") for pid in read_pids(tmp_path / f"{name}.pids")]
    guard = guard_of(launcher)
    launcher.kill()
    until(lambda: not any(map(is_running, [*pids, guard])), "all are gone")


def test_services_die_with_the_launcher_without_the_guard(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    launcher = start_launcher("stubborn", "polite")
    pids = [pid for name in ("stubborn", "polite") for pid in read_pids(tmp_path / f"{name}.pids")]
    os.kill(guard_of(launcher), signal.SIGKILL)
    launcher.kill()
    until(lambda: not any(map(is_running, pids)), "the kernel has killed them")


def test_processes_older_than_the_supervisor_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as older:
        with supervisor.Supervisor(f"FLOWER_GPU_RUN_DIR={tmp_path}") as watch:
            during = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            assert psutil.Process(during.pid).ppid() == os.getpid()
        assert watch.unkilled == []
        assert not is_running(during.pid)
        during.wait(timeout=60)
        assert older.poll() is None
        older.communicate(b"\n", timeout=60)
    assert older.returncode == 0


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV (-11)"),
        ("import os, signal; os.kill(os.getpid(), 40)", "signal 40"),
        ("1 / 0", "exit code 1"),
    ],
)
def test_early_end_is_noticed_and_described(code: str, how: str, tmp_path: Path) -> None:
    log = tmp_path / "broken.log"
    with supervisor.Supervisor(f"FLOWER_GPU_RUN_DIR={tmp_path}") as watch:
        service = Service("broken part", [sys.executable, "-c", code], os.environ, log)
        assert (service.pid, service.returncode, service.runs) == (None, None, False)
        watch.start(service)
        while service.runs:
            # The exit of the child interrupts the wait.
            watch.wait(60.0)
    assert service.describe_end() == f"broken part ended with {how}"
    assert log.read_text().startswith("$ ")
    if code == "1 / 0":
        assert service.tail().endswith("ZeroDivisionError: division by zero")


def test_a_missing_program_leaves_no_open_file(tmp_path: Path) -> None:
    open_before = sorted(Path("/proc/self/fd").iterdir())
    service = Service("missing", [str(tmp_path / "nothing")], os.environ, tmp_path / "missing.log")
    with pytest.raises(FileNotFoundError):
        service.start()
    assert sorted(Path("/proc/self/fd").iterdir()) == open_before


def test_tail_skips_empty_lines_marker_lines_and_colors(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"old\n\n\x1b[91mERROR \x1b[0m: bad\n    f(x)\n    ~~~^^^\n\xff\n")
    assert tail(path, 3) == "ERROR : bad\n    f(x)\n\N{REPLACEMENT CHARACTER}"
    assert tail(tmp_path / "missing.log") == ""


def test_a_listening_port_is_attributed_to_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ports.listens(os.getpid(), port)
        assert not ports.listens(os.getppid(), port)
    assert not ports.listens(os.getpid(), port)
