"""Our ``flwr-clientapp`` beside Flower's own: what starts it, and the app in it, find no difference.

And what is ours alone: leases, also where the fork server is missing, broken or poisoned.
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
from launched import StubHost
from live_processes import is_running
from waiting import until

from flower_gpu.gpu import guard
from flower_gpu.leases.admission import SHARED_PART
from flower_gpu.leases.lease import Lease
from flower_gpu.workers.forkserver import client, control

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what Flower builds and serves apps with
    pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3"),
]

OURS = (FAST, LEASED)
HEAVY = {"torch", "numpy", "flwr", "ray", "sklearn", "grpc", "httpx", "rich", "asyncio", "pynvml", "psutil"}

# Tells, at the end of the process that the shell script has become, what it has imported.
PROBE = """
import atexit, os, sys

def tell():
    if str(os.getpid()) == open(os.environ["PROBE_PID"]).read():
        open(os.environ["PROBE_MODULES"], "w").write(" ".join(sys.modules))

atexit.register(tell)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[SuperNode]:
    with SuperNode() as found:
        yield found


@pytest.fixture
def host(tmp_path: Path) -> StubHost:
    """A host with two GPUs that only NVML has."""
    return StubHost(tmp_path / "host", gpus=2)


@pytest.fixture
def commands(tmp_path: Path, host: StubHost) -> Commands:
    return Commands(tmp_path, host.env)


def test_the_small_start_imports_nothing_heavy(commands: Commands, node: SuperNode, tmp_path: Path) -> None:
    site, pid, modules = tmp_path / "site", tmp_path / "pid", tmp_path / "modules"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PROBE)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "PROBE_PID": str(pid), "PROBE_MODULES": str(modules)}
    process = commands.start(LEASED, node.hand_out({}).arguments, env=env)
    pid.write_text(str(process.pid))
    done = finished(process)
    assert done.returncode == 0, done.stderr
    found = set(modules.read_text().split())
    assert "flower_gpu.flower.flwr_clientapp" in found
    assert not {name.partition(".")[0] for name in found} & HEAVY


def test_wrong_arguments_are_answered_as_by_flower(commands: Commands) -> None:
    wrong = ("--token", "a", "--parent-pid", "first")
    expected, found = map(finished, [commands.start(way, wrong) for way in (FLOWERS, LEASED)])
    assert found.returncode == expected.returncode
    # The usage before it is wrapped by the length of the command's name.
    assert found.stderr.rpartition("error: ")[2] == expected.stderr.rpartition("error: ")[2] != ""


def test_an_app_finds_the_process_that_it_has_with_flower(
    commands: Commands, node: SuperNode, tmp_path: Path
) -> None:
    """And what it writes comes out: to a file by stdout, and to a pipe by stderr."""
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

    told, written = {}, {}
    for way in WAYS:
        with (tmp_path / "stdout").open("wb") as file:
            options = {
                "cwd": folder,
                "env": {**odd, "PWD": str(folder)},
                "preexec_fn": set_up,
                "stdout": file,
            }
            told[way], done = commands.tell(way, node, config, **options)
        stdout = (tmp_path / "stdout").read_bytes().decode()
        # What Flower says of the app's installation comes from the first of them.
        written[way] = (stdout[stdout.index("line one") :], done.stderr)
    assert written[FAST] == written[LEASED] == written[FLOWERS]
    environs = {way: one.pop("environ") for way, one in told.items()}
    for one in told.values():
        del one["pid"]
        one["executable"] = str(Path(one["executable"]).parent)
    assert told[FAST] == told[LEASED] == told[FLOWERS]
    expected = environs[FLOWERS]
    for way, added in (
        (FAST, set()),
        (LEASED, {"FLOWER_GPU_LEASE", "FLOWER_GPU_DEVICES", "CUDA_VISIBLE_DEVICES"}),
    ):
        found = environs[way]
        changed = {name for name in {**expected, **found} if expected.get(name) != found.get(name)}
        assert changed - {"OMP_NUM_THREADS"} == {"FLOWER_GPU_SUPERNODE"} | added
        assert all(found[name] == "" for name in added)  # the run has not asked for a GPU


@pytest.mark.parametrize("way", OURS)
def test_an_app_finds_nothing_on_stdin_and_runs_where_all_standard_streams_are_closed(
    commands: Commands, node: SuperNode, way: str
) -> None:
    """Unlike Flower's: apps of several SuperNodes would take each other's lines."""
    assert commands.tell(way, node, {"read": True}, input="some words")[0]["stdin"] == ""
    closed = ("/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    told, done = commands.tell(way, node, wrapper=closed)
    assert told["cwd"] == str(commands.folder)
    assert done.stdout == done.stderr == ""


ENDS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"raise": "not today"}, {}, "ZeroDivisionError: not today"),
    ({}, {"WATCHED_APP_FAILS": "1"}, "this app cannot be loaded"),
    ({"kill": 1}, {}, "was killed by SIGKILL"),
]

# What Flower's own sends no reply for, so that the server waits for ever.
SILENT_ENDS: list[tuple[dict[str, Any], str]] = [
    ({"exit": 3}, "sys.exit"),
    ({"return": "nothing"}, "the function returned nothing, not a Message"),
    ({"return": "another"}, "returned a Message that is not a reply to it"),
]


@pytest.mark.parametrize(("config", "env", "words"), ENDS, ids=lambda value: str(value)[:20])
def test_an_app_that_fails_ends_as_with_flower(
    commands: Commands, node: SuperNode, config: dict[str, Any], env: dict[str, str], words: str
) -> None:
    # Of one that is killed nothing is said.
    ends: dict[str, Any] = {FLOWERS: (128 + signal.SIGKILL, ("", ""), [])} if "kill" in config else {}
    for way in OURS if ends else WAYS:
        handed = node.hand_out(config)
        done = commands.run(way, handed.arguments, env=env)
        replies = node.replies(handed)
        ends[way] = (status(done.returncode), node.status(handed), [reply.error for reply in replies])
        if way == LEASED:
            assert words in done.stderr, done.stderr
    assert str(ends[FAST]) == str(ends[FLOWERS])
    # With a lease nothing of the app runs in the process that reports: the SuperNode hears of its end.
    code, (sub_status, details), (error,) = ends[LEASED]
    assert (code, sub_status) == (1, "failed")
    if ends[FLOWERS][2]:
        assert (code, sub_status) == (ends[FLOWERS][0], ends[FLOWERS][1][0])
        assert error.code == ends[FLOWERS][2][0].code
    if "WATCHED_APP_FAILS" not in env:
        assert words in details and words in error.reason


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize(("config", "words"), SILENT_ENDS, ids=lambda value: str(value)[:25])
def test_the_server_is_told_of_an_app_that_gives_no_reply(
    commands: Commands, node: SuperNode, way: str, config: dict[str, Any], words: str
) -> None:
    handed = node.hand_out(config)
    done = commands.run(way, handed.arguments)
    (reply,) = node.replies(handed)
    assert words in reply.error.reason, done.stderr
    assert status(done.returncode) == 1
    sub_status, details = node.status(handed)
    assert sub_status == "failed" and words in details


@pytest.mark.skipif(guard.problem() is not None, reason=str(guard.problem()))
def test_an_app_opens_no_gpu_without_a_lease(commands: Commands, node: SuperNode) -> None:
    handed = node.hand_out({"open": "/dev/full"})
    done = commands.run(LEASED, handed.arguments, env={"FLOWER_GPU_GUARDED": "/dev/full"})
    (reply,) = node.replies(handed)
    assert "PermissionError: [Errno 13]" in reply.error.reason, done.stderr
    assert "it could be opened" not in done.stdout


def test_a_signal_ends_a_message_as_with_flower(commands: Commands, node: SuperNode) -> None:
    ends = []
    for way, number in (
        (FLOWERS, signal.SIGTERM),
        *((way, signal.SIGINT) for way in OURS),
        (LEASED, signal.SIGTERM),
    ):
        process, handed, app = commands.at_work(way, node)
        process.send_signal(number)
        done = finished(process)
        until(lambda app=app: not is_running(app))
        ends.append((status(done.returncode), node.status(handed), "Task stopped" in done.stderr))
        assert node.replies(handed) == []
    assert ends[1:] == ends[:1] * 3


@pytest.mark.parametrize("way", OURS)
def test_a_killed_start_takes_what_it_has_started_along(
    commands: Commands, node: SuperNode, host: StubHost, way: str
) -> None:
    process, handed, app = commands.at_work(way, node, run_config={"use-gpu": True})
    assert app != process.pid
    assert len(host.status().holders) == (way == LEASED)
    process.kill()
    assert finished(process).returncode == -signal.SIGKILL
    until(lambda: not is_running(app) and not host.status().holders)
    assert node.status(handed) == ("", "")  # as with Flower's own, its SuperNode notices by the heartbeats
    commands.tell(way, node)


@pytest.mark.parametrize("way", OURS)
def test_the_end_of_the_supernode_ends_a_message(commands: Commands, node: SuperNode, way: str) -> None:
    with subprocess.Popen(["sleep", "100"]) as parent:
        process, handed, app = commands.at_work(way, node, "--parent-pid", str(parent.pid))
        parent.kill()
    done = finished(process)
    assert not is_running(app)
    assert (done.returncode, node.status(handed)[0]) == (0, "failed")
    assert "Task stopped" in done.stderr


def test_who_finds_no_supernode_tries_again_until_told_to_stop(commands: Commands) -> None:
    nobody = ("--insecure", "--token", "a", "--runtime-api-address", "127.0.0.1:9")
    processes = {way: commands.start(way, nobody) for way in (FLOWERS, LEASED)}
    for process in processes.values():
        assert process.stderr is not None
        read = ""
        while "retrying" not in read:
            line = process.stderr.readline()
            assert line, read
            read += line
        time.sleep(0.3)  # a signal in the middle of the line may get lost in Flower's logging
        process.terminate()
    ends = {way: finished(process) for way, process in processes.items()}
    assert all("Task stopped" in done.stderr for done in ends.values())
    assert len({status(done.returncode) for done in ends.values()}) == 1, ends


# Leases ---------------------------------------------------------------------------------------------------

OFFERED = {"FLOWER_GPU_POLICY": "force", "FLOWER_GPU_IDS": "1", "FLOWER_GPU_NUM_GPUS": "0.5"}
SAYS = {"gpu": "force", "gpu-ids": 0, "num-gpus": 2, "gpu-memory": "1GiB"}


def test_what_the_node_says_goes_before_what_messages_and_the_app_say(
    commands: Commands, node: SuperNode, host: StubHost
) -> None:
    """The app has a mod that wants two GPUs."""
    commands.env["WATCHED_APP_ASKS"] = "2"
    found = []
    for wanted, env, node_config in (
        (True, OFFERED, {}),
        (False, OFFERED, {}),
        (True, {"FLOWER_GPU_POLICY": "never"}, {}),
        (True, {"FLOWER_GPU_POLICY": "force"}, {"gpu": "never"}),
        (False, {}, {}),
        (True, {"FLOWER_GPU_NUM_GPUS": "0.25"}, {"gpu-ids": 0}),
    ):
        told, _ = commands.tell(LEASED, node, {**SAYS, "use-gpu": wanted}, node_config=node_config, env=env)
        lease = Lease.from_environment(told["environ"])
        shares = lease.shares if lease is not None else ()
        assert told["environ"]["CUDA_VISIBLE_DEVICES"] == ",".join(share.uuid for share in shares)
        found.append([(share.index, share.memory_bytes >> 20) for share in shares])
    whole = int((16 * 1024 - 256) * SHARED_PART)
    assert found == [[(1, whole // 2)]] * 2 + [[]] * 3 + [[(0, whole // 4)]]


@pytest.mark.parametrize("way", [FLOWERS, FAST])
def test_a_mod_forks_no_app_that_has_started_threads(commands: Commands, node: SuperNode, way: str) -> None:
    """A fork would wait for them for ever. Flower's own threads do not count."""
    env = {"WATCHED_APP_ASKS": "1", "FLOWER_GPU_POLICY": "never", "FLOWER_GPU_TIMEOUT_S": "60"}
    # The telemetry of Flower has a thread, too. It reaches nobody here.
    env |= {"FLWR_TELEMETRY_ENABLED": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    for more, parent in (({}, "flwr-clientapp"), ({"WATCHED_APP_STARTS_THREADS": "1"}, "forkserver.program")):
        _, done = commands.tell(way, node, {"submit": True}, env={**env, **more})
        (line,) = re.findall("a fork of (.*)", done.stdout)
        assert "done by a thread" in done.stdout
        assert parent in line or (way, parent) == (FAST, "flwr-clientapp"), line


def test_a_required_gpu_that_is_gone_and_a_message_that_takes_too_long_fail(
    commands: Commands, node: SuperNode, host: StubHost
) -> None:
    host.set(0, lost=True)
    required = {"FLOWER_GPU_POLICY": "require", "FLOWER_GPU_IDS": "0"}
    for config, env, words in (
        ({}, required, "GPU 0"),
        ({"wait": str(commands.folder / "waits")}, {"FLOWER_GPU_TIMEOUT_S": "1"}, "within timeout_s=1"),
    ):
        handed = node.hand_out(config)
        done = commands.run(LEASED, handed.arguments, env=env)
        (reply,) = node.replies(handed)
        assert "train of client 3: " in reply.error.reason and words in reply.error.reason, done.stderr
    assert not is_running(int((commands.folder / "waits").read_text()))


# Without the fork server: Flower's own code runs ----------------------------------------------------------


@pytest.fixture
def own_state(tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of the test's own; its fork servers end with it."""
    folder = tmp_path / "state"
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(folder))
    commands.env["FLOWER_GPU_STATE_DIR"] = str(folder)
    commands.program_of_ours()  # is there before something breaks
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
def test_where_there_can_be_no_fork_server_a_message_has_a_lease_by_the_operators_rule_all_the_same(
    commands: Commands,
    node: SuperNode,
    host: StubHost,
    own_state: Path,
    way: str,
    break_it: Callable[[Commands, Path], None],
    reason: str,
) -> None:
    break_it(commands, own_state)
    told, done = commands.tell(way, node, {"print": "the app's"}, run_config={"use-gpu": True})
    without = "flwr-clientapp starts without the fork server, which is slower: "
    (line,) = [line for line in done.stderr.splitlines() if without in line]
    assert line.startswith("flower-gpu: ") and reason in line
    assert "the app's" in done.stdout
    assert bool(told["environ"].get("FLOWER_GPU_LEASE")) == (way == LEASED)
    if way == LEASED:
        assert told["environ"]["CUDA_VISIBLE_DEVICES"] in host.uuids
        assert control.status() == []
