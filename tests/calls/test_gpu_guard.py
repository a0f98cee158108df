"""The kernel refuses device files of GPUs that are not part of a worker's lease."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from guard_calls import CONFINED, METHODS
from nvml_stub import Host
from run_programs import run, run_python

from flower_gpu import errors, landlock, trace
from flower_gpu.calls.grants import guard
from flower_gpu.cli import main as cli
from flower_gpu.gpu import nvidia
from flower_gpu.workers import confinement

pytestmark = pytest.mark.timeout(180)


def landlock_problem() -> str:
    try:
        landlock.version()
    except landlock.LandlockUnavailableError as error:
        return str(error)
    return ""


needs_landlock = pytest.mark.skipif(bool(landlock_problem()), reason=landlock_problem())

# Creates device files of zero, full, random and kmsg under the names of GPU device files, and the files in
# /dev that programs need.
DEV = """
set -e
mount -t tmpfs -o mode=755 none "$1/dev"
cp -a /dev/null /dev/urandom /dev/tty "$1/dev"
ln -s /proc/self/fd "$1/dev/fd"
mkdir -m 1777 "$1/dev/shm" && mkdir "$1/dev/nvidia-caps"
while read name major minor; do
  mknod -m 666 "$1/dev/$name" c $major $minor
done <<END
nvidia0 1 5
nvidia1 1 7
nvidiactl 1 8
nvidia-uvm 1 11
nvidia-caps/nvidia-cap1 1 5
END
mount --move "$1/dev" /dev
shift
exec "$@"
"""
FILES = [
    f"/dev/{name}" for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1")
]


def guard_env(folder: Path, device: Path | None = None) -> dict[str, str]:
    """Return variables for programs with the tasks of this folder and their own fork servers.

    ``device``: a file that counts as the device file of a GPU.
    """
    (folder / "state").mkdir(mode=0o700)
    tests = Path(__file__).parent
    env = {
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), *sys.path]),
        "FLOWER_GPU_STATE_DIR": str(folder / "state"),
        "FLOWER_GPU_SERVER_IDLE_S": "1",
    }
    if device is not None:
        device.parent.mkdir(exist_ok=True)
        device.touch()
        env["FLOWER_GPU_GUARDED"] = str(device)
    return env


def run_with_own_mounts(command: list[str], env: dict[str, str]) -> Any:
    """Run a program in its own mount namespace, and return the JSON value in its last line."""
    try:
        process = run(["unshare", "--mount", *command], env={**os.environ, **env})
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if process.returncode and "unshare failed" in process.stderr:
        pytest.skip("needs the right to make a mount namespace")
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of calls on a host with such device files."""
    folder = tmp_path_factory.mktemp("guard")
    for name in ("dev", "files"):
        (folder / name).mkdir(mode=0o700)
    env = {**Host(folder / "host", gpus=2).env, **guard_env(folder)}
    script = [sys.executable, str(Path(__file__).with_name("guard_calls.py")), str(folder / "files"), *FILES]
    result: dict[str, Any] = run_with_own_mounts(["sh", "-c", DEV, "sh", str(folder), *script], env)
    return result


@needs_landlock
class TestWorker:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_worker_without_a_gpu_can_open_no_device(self, report: dict[str, Any], method: str) -> None:
        assert report[f"never, {method}"] == {"process": [], "thread": [], "program": [], "link": []}

    @pytest.mark.parametrize("method", METHODS)
    def test_a_worker_can_open_only_the_gpu_of_its_lease(self, report: dict[str, Any], method: str) -> None:
        expected = ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"]
        assert report[f"GPU 1, {method}"] == dict.fromkeys(("process", "thread", "program", "link"), expected)

    @pytest.mark.skipif(bool(confinement.problem()), reason=f"no confinement: {confinement.problem()}")
    @pytest.mark.parametrize(
        "call", ["never, forkserver", "never, spawn", "GPU 1, forkserver", "GPU 1, spawn"]
    )
    def test_a_confined_worker_can_open_the_same_devices(self, report: dict[str, Any], call: str) -> None:
        attempts = report[call].items()
        assert report[f"confined, {call}"] == {
            attempt: [path for path in paths if path in CONFINED] for attempt, paths in attempts
        }

    @pytest.mark.parametrize(
        ("action", "expected"),
        {
            "descriptor of the caller": "EBADF",
            "new file of the device": "EACCES",
            "other work with files": "text",  # is allowed
            "open rulesets": 0,  # the worker could add rules to an open ruleset
            "another mount of /dev": {"process": [], "thread": [], "program": [], "link": []},
        }.items(),
    )
    def test_other_actions_of_a_guarded_worker(
        self, report: dict[str, Any], action: str, expected: object
    ) -> None:
        assert report[action] == expected
        assert report["off"]["process"] == FILES

    def test_a_call_without_a_guard_is_reported(self, report: dict[str, Any]) -> None:
        [line] = report["guard messages"]
        assert line.startswith("no GPU guard:") and "it runs in its caller's own process" in line
        assert "a plain flwr-clientapp imports" in str(report["outside of workers"])
        assert "this call has no worker of its own" in report["without a worker"]


@needs_landlock
@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its account")
def test_a_guarded_worker_starts_no_fork_server(tmp_path: Path) -> None:
    env = guard_env(tmp_path, tmp_path / "nvidia9")
    process = run_python(_NESTED, env={**os.environ, **env})
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["auto"] == 7
    assert "a worker under the GPU guard cannot start a fork server" in report["forkserver"]
    assert report["servers"] == []


_NESTED = """
import json, guard_tasks
from flower_gpu import run_in_worker
from flower_gpu.workers.forkserver import control
result = run_in_worker("guard_tasks:nested", start_method="spawn", gpu="never")
print(json.dumps({**result, "servers": [str(server) for server in control.status()]}))
"""


@needs_landlock
@pytest.mark.skipif(bool(confinement.problem()), reason=f"no confinement: {confinement.problem()}")
def test_a_dead_disk_does_not_block_workers(tmp_path: Path) -> None:
    """The disk is mounted directly below the root folder, and no app has requested it."""
    device = tmp_path / "dev" / "nvidia9"
    program = Path(__file__).with_name("dead_disk_calls.py")
    report = run_with_own_mounts([sys.executable, str(program), str(device)], guard_env(tmp_path, device))
    if "skip" in report:
        pytest.skip(report["skip"])
    assert report == dict.fromkeys(("forkserver", "spawn", "fork", "confined"), False)


# Agents of monitoring services also start a thread in each Python process.
_STARTS_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
_BESIDE_A_THREAD = """
import json, logging, os, sys
from flower_gpu import run_in_worker
from flower_gpu.calls.grants import guard
lines = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("flwr.flower_gpu").addHandler(handler)
[device] = sys.argv[1:]
opened = [
    run_in_worker("guard_tasks:paths_opened", [device], start_method=method, gpu="never")["process"]
    for method in ("forkserver", "spawn", "spawn")
]
os.environ["FLOWER_GPU_GUARD"] = "require"
try:
    run_in_worker("guard_tasks:paths_opened", [device], start_method="spawn", gpu="never")
except Exception as error:
    refused = str(error)
print(json.dumps([opened, [line for line in lines if "guard" in line], guard.describe(), refused]))
"""


@needs_landlock
def test_a_guard_that_cannot_be_set_is_reported(tmp_path: Path, run_script: Any) -> None:
    """A forked worker is guarded, because a fork has one thread."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_STARTS_THREAD)
    device = tmp_path / "nvidia9"
    env = guard_env(tmp_path, device) | {"FLOWER_GPU_RUN_DIR": str(tmp_path)}
    env["PYTHONPATH"] = f"{tmp_path / 'site'}:{env['PYTHONPATH']}"
    process = run_script(_BESIDE_A_THREAD, str(device), env=env)
    opened, lines, described, refused = json.loads(process.stdout.splitlines()[-1])
    reason = "another thread ran before the process could be restricted"
    assert opened == [[], [str(device)], [str(device)]]
    [line] = lines
    assert line.startswith("no GPU guard: calls can use any GPU of this host") and reason in line
    assert "keeps forked workers" in described and reason in described
    assert "--gpu-guard require" in refused and reason in refused
    finished = [
        event for event in trace.read(tmp_path / trace.FILE_NAME) if event["event"] == "worker_finished"
    ]
    assert [event.get("no_guard") for event in finished] == [None, reason, reason, None]


def test_the_guard_does_not_need_root(run_script: Any) -> None:
    process = run_script(
        """
        import os
        from flower_gpu import landlock
        os.setgid(65534), os.setuid(65534)
        with landlock.without(["/dev/zero", "/dev/full"], ["/dev/full"]) as rules:
            rules.restrict_self()
        open("/dev/full").close()
        try:
            open("/dev/zero")
        except PermissionError:
            print("refused")
        """
    )
    assert process.stdout == "refused\n"


def test_device_files_of_a_mig_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minors = tmp_path / "mig-minors"
    monkeypatch.setattr(nvidia, "_MIG_MINORS", minors)
    assert nvidia.files_of_mig(0, 1, 0) is None
    minors.write_text(
        "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu1/gi1/access 147\n"
    )
    caps = ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")
    assert nvidia.files_of_mig(0, 1, 0) == ("/dev/nvidia0", *caps)
    assert nvidia.files_of_mig(1, 1, 0) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (errno.ENOSYS, "the kernel has no Landlock"),
        (errno.EOPNOTSUPP, "not among the kernel's security modules"),
        (errno.EPERM, "the container forbids Landlock"),
        (0, "Landlock 1 keeps programs from moving files between folders"),
    ],
)
def test_a_kernel_without_a_usable_landlock(
    answer: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(number: int, *args: object) -> int:
        if answer:
            raise OSError(answer, os.strerror(answer))
        return 1

    monkeypatch.setattr(landlock, "_call", call)
    assert reason in str(guard.problem({}))
    guard.check({})
    with pytest.raises(errors.ConfigError, match=reason):
        guard.check({"FLOWER_GPU_GUARD": "require"})
    monkeypatch.setenv("FLOWER_GPU_GUARDED", "/dev/full")
    assert guard.describe().startswith("no GPU guard: apps can use any GPU of this host")
    for count in ([], ["--count", "2"]):
        assert cli.main(["supernode", *count, "--gpu-guard", "require", "--", "--insecure"]) == 2
        assert "--gpu-guard require" in capsys.readouterr().err
