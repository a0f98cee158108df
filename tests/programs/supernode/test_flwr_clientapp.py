"""Our ``flwr-clientapp`` behaves like Flower's for the SuperNode that starts it and for the app.

It adds leases, which also work if the fork server is missing or broken.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clientapp_commands import FAST, FLOWERS, LEASED, WAYS, Commands, finished, status
from clientapp_supernode import SuperNode
from live_processes import is_running
from nvml_stub import Host
from waiting import until

from flower_gpu.calls.grants import guard
from flower_gpu.leases.admission import SHARED_PART
from flower_gpu.leases.lease import Lease
from flower_gpu.workers.forkserver import client, control

pytestmark = [
    pytest.mark.timeout(180),
    # Libraries with which Flower builds and serves apps emit them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3"),
]

OURS = (FAST, LEASED)
HEAVY = {"torch", "numpy", "flwr", "ray", "sklearn", "grpc", "httpx", "rich", "asyncio", "pynvml", "psutil"}

# Writes the imported modules to a file when the process ends that the shell script has become.
PROBE = """
import atexit, os, sys

def tell():
    if str(os.getpid()) == open(os.environ["PROBE_PID"]).read():
        open(os.environ["PROBE_MODULES"], "w").write(" ".join(sys.modules))

atexit.register(tell)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[SuperNode]:
    with SuperNode() as supernode:
        yield supernode


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with two GPUs that exist only in the stub of NVML."""
    return Host(tmp_path / "host", gpus=2)


@pytest.fixture
def commands(tmp_path: Path, host: Host) -> Commands:
    return Commands(tmp_path, host.env)


def test_the_fast_start_imports_no_large_libraries(
    commands: Commands, node: SuperNode, tmp_path: Path
) -> None:
    site, pid, modules = tmp_path / "site", tmp_path / "pid", tmp_path / "modules"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PROBE)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "PROBE_PID": str(pid), "PROBE_MODULES": str(modules)}
    process = commands.start(LEASED, node.hand_out({}).arguments, env=env)
    pid.write_text(str(process.pid))
    completed = finished(process)
    assert completed.returncode == 0, completed.stderr
    imported = set(modules.read_text().split())
    assert "flower_gpu.programs.flwr_clientapp" in imported
    assert not {name.partition(".")[0] for name in imported} & HEAVY


def test_wrong_arguments_cause_the_same_error_as_in_flower(commands: Commands) -> None:
    wrong = ("--token", "a", "--parent-pid", "first")
    expected, actual = map(finished, [commands.start(way, wrong) for way in (FLOWERS, LEASED)])
    assert actual.returncode == expected.returncode
    # The usage text before the error differs, because its line breaks depend on the length of the command.
    assert actual.stderr.rpartition("error: ")[2] == expected.stderr.rpartition("error: ")[2] != ""


def test_an_app_runs_in_the_same_kind_of_process_as_with_flower(
    commands: Commands, node: SuperNode, tmp_path: Path
) -> None:
    """The output of the app also arrives: its stdout in a file, and its stderr in a pipe."""
    folder = tmp_path / 'a folder\'s "name"'
    folder.mkdir()
    odd = {"EMPTY": "", "ODD": "a 'b' \"c\"\\\n$HOME \u00e9", "PYTHONUNBUFFERED": "1", "LONG": "x" * 100_000}
    config = {"print": "line one\r\nline two \u00e9\u4e2d\U0001f600 " + "x" * 200_000, "complain": "oh no"}
    (processor, *_) = os.sched_getaffinity(0)

    def set_up() -> None:
        os.umask(0o27)
        os.nice(1)
        os.sched_setaffinity(0, {processor})
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    reports, written = {}, {}
    for way in WAYS:
        with (tmp_path / "stdout").open("wb") as file:
            options = {
                "cwd": folder,
                "env": {**odd, "PWD": str(folder)},
                "preexec_fn": set_up,
                "stdout": file,
            }
            reports[way], completed = commands.handle(way, node, config, **options)
        stdout = (tmp_path / "stdout").read_bytes().decode()
        # Only the first command installs the app, so Flower's lines about that are left out.
        written[way] = (stdout[stdout.index("line one") :], completed.stderr)
    assert written[FAST] == written[LEASED] == written[FLOWERS]
    environs = {way: report.pop("environ") for way, report in reports.items()}
    for report in reports.values():
        del report["pid"]
        report["executable"] = str(Path(report["executable"]).parent)
    assert reports[FAST] == reports[LEASED] == reports[FLOWERS]
    expected = environs[FLOWERS]
    for way, added in (
        (FAST, set()),
        (LEASED, {"FLOWER_GPU_LEASE", "FLOWER_GPU_DEVICES", "CUDA_VISIBLE_DEVICES"}),
    ):
        actual = environs[way]
        changed = {name for name in {**expected, **actual} if expected.get(name) != actual.get(name)}
        assert changed - {"OMP_NUM_THREADS"} == {"FLOWER_GPU_SUPERNODE"} | added
        assert all(actual[name] == "" for name in added), "the run has not asked for a GPU"


@pytest.mark.parametrize("way", OURS)
def test_stdin_of_an_app_is_empty_and_the_standard_streams_may_be_closed(
    commands: Commands, node: SuperNode, way: str
) -> None:
    """Flower's command passes stdin on, so apps of several SuperNodes would take lines from each other."""
    assert commands.handle(way, node, {"read": True}, input="some words")[0]["stdin"] == ""
    closed = ("/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    report, completed = commands.handle(way, node, wrapper=closed)
    assert report["cwd"] == str(commands.folder)
    assert completed.stdout == completed.stderr == ""


ENDS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"raise": "not today"}, {}, "ZeroDivisionError: not today"),
    ({}, {"WATCHED_APP_FAILS": "1"}, "this app cannot be loaded"),
    ({"kill": 1}, {}, "was killed by SIGKILL"),
]

# Flower's command sends no reply in these cases, so the server waits for ever.
SILENT_ENDS: list[tuple[dict[str, Any], str]] = [
    ({"exit": 3}, "sys.exit"),
    ({"return": "nothing"}, "the function returned nothing, not a Message"),
    ({"return": "another"}, "returned a Message that is not a reply to it"),
]


@pytest.mark.parametrize(("config", "env", "words"), ENDS, ids=lambda value: str(value)[:20])
def test_an_app_that_fails_is_reported_as_by_flower(
    commands: Commands, node: SuperNode, config: dict[str, Any], env: dict[str, str], words: str
) -> None:
    # Flower's command reports nothing about an app that is killed.
    ends: dict[str, Any] = {FLOWERS: (128 + signal.SIGKILL, ("", ""), [])} if "kill" in config else {}
    for way in OURS if ends else WAYS:
        pending = node.hand_out(config)
        completed = commands.run(way, pending.arguments, env=env)
        replies = node.replies(pending)
        ends[way] = (status(completed.returncode), node.status(pending), [reply.error for reply in replies])
        if way == LEASED:
            assert words in completed.stderr, completed.stderr
    assert str(ends[FAST]) == str(ends[FLOWERS])
    # With a lease the app runs in another process, so the command survives and reports the end to the
    # SuperNode.
    code, (sub_status, details), (error,) = ends[LEASED]
    assert (code, sub_status) == (1, "failed")
    if ends[FLOWERS][2]:
        assert (code, sub_status) == (ends[FLOWERS][0], ends[FLOWERS][1][0])
        assert error.code == ends[FLOWERS][2][0].code
    if "WATCHED_APP_FAILS" not in env:
        assert words in details and words in error.reason


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize(("config", "words"), SILENT_ENDS, ids=lambda value: str(value)[:25])
def test_the_server_gets_an_error_if_an_app_gives_no_reply(
    commands: Commands, node: SuperNode, way: str, config: dict[str, Any], words: str
) -> None:
    pending = node.hand_out(config)
    completed = commands.run(way, pending.arguments)
    (reply,) = node.replies(pending)
    assert words in reply.error.reason, completed.stderr
    assert status(completed.returncode) == 1
    sub_status, details = node.status(pending)
    assert sub_status == "failed" and words in details


@pytest.mark.skipif(guard.problem() is not None, reason=str(guard.problem()))
def test_an_app_without_a_lease_cannot_open_a_gpu(commands: Commands, node: SuperNode) -> None:
    pending = node.hand_out({"open": "/dev/full"})
    completed = commands.run(LEASED, pending.arguments, env={"FLOWER_GPU_GUARDED": "/dev/full"})
    (reply,) = node.replies(pending)
    assert "PermissionError: [Errno 13]" in reply.error.reason, completed.stderr
    assert "it could be opened" not in completed.stdout


def test_a_signal_ends_a_message_as_in_flower(commands: Commands, node: SuperNode) -> None:
    ends = []
    for way, number in (
        (FLOWERS, signal.SIGTERM),
        *((way, signal.SIGINT) for way in OURS),
        (LEASED, signal.SIGTERM),
    ):
        process, pending, app = commands.at_work(way, node)
        process.send_signal(number)
        completed = finished(process)
        until(lambda app=app: not is_running(app))
        ends.append((status(completed.returncode), node.status(pending), "Task stopped" in completed.stderr))
        assert node.replies(pending) == []
    assert ends[1:] == ends[:1] * 3


@pytest.mark.parametrize("way", OURS)
def test_killing_the_command_also_ends_its_app(
    commands: Commands, node: SuperNode, host: Host, way: str
) -> None:
    process, pending, app = commands.at_work(way, node, run_config={"use-gpu": True})
    assert app != process.pid
    assert len(host.status().holders) == (way == LEASED)
    process.kill()
    assert finished(process).returncode == -signal.SIGKILL
    until(lambda: not is_running(app) and not host.status().holders)
    # The SuperNode notices a killed command only by missing heartbeats, as in Flower.
    assert node.status(pending) == ("", "")
    commands.handle(way, node)


@pytest.mark.parametrize("way", OURS)
def test_the_end_of_the_supernode_ends_a_message(commands: Commands, node: SuperNode, way: str) -> None:
    with subprocess.Popen(["sleep", "100"]) as parent:
        process, pending, app = commands.at_work(way, node, "--parent-pid", str(parent.pid))
        parent.kill()
    completed = finished(process)
    assert not is_running(app)
    assert (completed.returncode, node.status(pending)[0]) == (0, "failed")
    assert "Task stopped" in completed.stderr


def test_a_command_without_a_supernode_retries_until_it_is_stopped(commands: Commands) -> None:
    arguments = ("--insecure", "--token", "a", "--runtime-api-address", "127.0.0.1:9")
    processes = {way: commands.start(way, arguments) for way in (FLOWERS, LEASED)}
    for process in processes.values():
        assert process.stderr is not None
        read = ""
        while "retrying" not in read:
            line = process.stderr.readline()
            assert line, read
            read += line
        time.sleep(0.3)  # Flower's logging may swallow a signal that arrives while it writes
        process.terminate()
    ends = {way: finished(process) for way, process in processes.items()}
    assert all("Task stopped" in end.stderr for end in ends.values())
    assert len({status(end.returncode) for end in ends.values()}) == 1, ends


# Leases ---------------------------------------------------------------------------------------------------

NODE_ENV = {"FLOWER_GPU_POLICY": "force", "FLOWER_GPU_IDS": "1", "FLOWER_GPU_NUM_GPUS": "0.5"}
MESSAGE_CONFIG = {"gpu": "force", "gpu-ids": 0, "num-gpus": 2, "gpu-memory": "1GiB"}


def test_options_of_the_node_override_those_of_messages_and_of_the_app(
    commands: Commands, node: SuperNode, host: Host
) -> None:
    """The app has a mod that asks for two GPUs."""
    commands.env["WATCHED_APP_ASKS"] = "2"
    granted = []
    for wanted, env, node_config in (
        (True, NODE_ENV, {}),
        (False, NODE_ENV, {}),
        (True, {"FLOWER_GPU_POLICY": "never"}, {}),
        (True, {"FLOWER_GPU_POLICY": "force"}, {"gpu": "never"}),
        (False, {}, {}),
        (True, {"FLOWER_GPU_NUM_GPUS": "0.25"}, {"gpu-ids": 0}),
    ):
        config = {**MESSAGE_CONFIG, "use-gpu": wanted}
        report, _ = commands.handle(LEASED, node, config, node_config=node_config, env=env)
        lease = Lease.from_environment(report["environ"])
        shares = lease.shares if lease is not None else ()
        assert report["environ"]["CUDA_VISIBLE_DEVICES"] == ",".join(share.uuid for share in shares)
        granted.append([(share.index, share.memory_bytes >> 20) for share in shares])
    full_mib = int((16 * 1024 - 256) * SHARED_PART)
    assert granted == [[(1, full_mib // 2)]] * 2 + [[]] * 3 + [[(0, full_mib // 4)]]


@pytest.mark.parametrize("way", [FLOWERS, FAST])
def test_a_mod_does_not_fork_an_app_with_threads(commands: Commands, node: SuperNode, way: str) -> None:
    """A fork would wait for ever for threads that exist only in its parent. Flower's threads do not count."""
    env = {"WATCHED_APP_ASKS": "1", "FLOWER_GPU_POLICY": "never", "FLOWER_GPU_TIMEOUT_S": "60"}
    # The telemetry of Flower has a thread, too. The proxy does not exist, so no data leave this host.
    env |= {"FLWR_TELEMETRY_ENABLED": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    for more, parent in (({}, "flwr-clientapp"), ({"WATCHED_APP_STARTS_THREADS": "1"}, "forkserver.program")):
        _, completed = commands.handle(way, node, {"submit": True}, env={**env, **more})
        (line,) = re.findall("a fork of (.*)", completed.stdout)
        assert "done by a thread" in completed.stdout
        assert parent in line or (way, parent) == (FAST, "flwr-clientapp"), line


def test_a_lost_required_gpu_and_a_timeout_fail_the_message(
    commands: Commands, node: SuperNode, host: Host
) -> None:
    host.set(0, lost=True)
    required = {"FLOWER_GPU_POLICY": "require", "FLOWER_GPU_IDS": "0"}
    for config, env, words in (
        ({}, required, "GPU 0"),
        ({"wait": str(commands.folder / "waits")}, {"FLOWER_GPU_TIMEOUT_S": "1"}, "within timeout_s=1"),
    ):
        pending = node.hand_out(config)
        completed = commands.run(LEASED, pending.arguments, env=env)
        (reply,) = node.replies(pending)
        assert "train of client 3: " in reply.error.reason and words in reply.error.reason, completed.stderr
    assert not is_running(int((commands.folder / "waits").read_text()))


# Without the fork server, where Flower's code runs --------------------------------------------------------


@pytest.fixture
def private_state(tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for one test. Its fork servers end with the test."""
    folder = tmp_path / "state"
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(folder))
    commands.env["FLOWER_GPU_STATE_DIR"] = str(folder)
    commands.program_of_ours()  # must exist before the test breaks the folder
    yield folder
    folder.chmod(0o700)
    control.stop(wait_s=20)


def broken_folder(commands: Commands, state: Path) -> None:
    state.chmod(0o777)


def broken_python(commands: Commands, state: Path) -> None:
    site = commands.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\nif 'forkserver' in ''.join(sys.orig_argv): os._exit(3)\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    commands.env["PYTHONPATH"] = path


@pytest.mark.parametrize(
    ("way", "break_it", "reason"),
    [
        (FAST, broken_folder, "must be a folder of this user that no other user can write to"),
        (LEASED, broken_python, "the fork server could not be started: it ended"),
    ],
    ids=OURS,
)
def test_without_a_fork_server_the_rule_of_the_operator_still_decides_about_leases(
    commands: Commands,
    node: SuperNode,
    host: Host,
    private_state: Path,
    way: str,
    break_it: Callable[[Commands, Path], None],
    reason: str,
) -> None:
    break_it(commands, private_state)
    report, completed = commands.handle(way, node, {"print": "the app's"}, run_config={"use-gpu": True})
    without = "flwr-clientapp starts without the fork server, which is slower: "
    (line,) = [line for line in completed.stderr.splitlines() if without in line]
    assert line.startswith("flower-gpu: ") and reason in line
    assert "the app's" in completed.stdout
    assert bool(report["environ"].get("FLOWER_GPU_LEASE")) == (way == LEASED)
    if way == LEASED:
        assert report["environ"]["CUDA_VISIBLE_DEVICES"] in host.uuids
        assert control.status() == []
