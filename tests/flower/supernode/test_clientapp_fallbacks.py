"""Messages where the fork server is missing, broken or poisoned: Flower's own code runs, with a lease."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from clientapp_commands import FAST, LEASED, Commands, until
from clientapp_supernode import SuperNode
from live_processes import is_running
from nvml_stub import Host

from flower_gpu.workers import state_folder
from flower_gpu.workers.forkserver import client, control

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what Flower builds and serves apps with
    pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3"),
]

WITHOUT = "flwr-clientapp starts without the fork server, which is slower: "
WITHOUT_PIDFD = str(Path(__file__).with_name("clientapp_without_pidfd.py"))


@pytest.fixture(scope="module")
def node() -> Iterator[SuperNode]:
    with SuperNode() as found:
        yield found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host", gpus=1)


@pytest.fixture
def commands(tmp_path: Path, host: Host) -> Commands:
    """Commands on a host with a GPU that only NVML has."""
    return Commands(tmp_path, {**host.env, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"})


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of the test's own; its fork servers end with it."""
    folder = tmp_path / "state"
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(folder))
    yield folder
    folder.chmod(0o700)
    control.stop(wait_s=20)


def broken_folder(commands: Commands, state: Path) -> dict[str, object]:
    state.chmod(0o777)
    return {}


def another_folder(commands: Commands, state: Path) -> dict[str, object]:
    (commands.folder / "file").touch()
    return {"env": {"FLOWER_GPU_STATE_DIR": str(commands.folder / "file")}}


def no_folder(commands: Commands, state: Path) -> dict[str, object]:
    return {"env": {"FLOWER_GPU_STATE_DIR": "/proc/nothing"}}


def old_kernel(commands: Commands, state: Path) -> dict[str, object]:
    return {"wrapper": (sys.executable, WITHOUT_PIDFD)}


def broken_python(commands: Commands, state: Path) -> dict[str, object]:
    site = commands.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\nif 'forkserver' in ''.join(sys.orig_argv): os._exit(3)\n"
    )
    return {"env": {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}}


CASES: list[tuple[Callable[[Commands, Path], dict[str, object]], str]] = [
    (broken_folder, "must be a folder of this user that nobody else can write to"),
    (another_folder, "must be a folder of this user that nobody else can write to"),
    (no_folder, "/proc/nothing"),
    (old_kernel, "this platform has no fork server"),
    (broken_python, "the fork server could not be started: it ended"),
]


@pytest.mark.parametrize(("break_it", "reason"), CASES, ids=[case[0].__name__ for case in CASES])
def test_where_there_can_be_no_fork_server_the_message_has_its_lease_all_the_same(
    commands: Commands,
    node: SuperNode,
    host: Host,
    own_state: Path,
    break_it: Callable[[Commands, Path], dict[str, object]],
    reason: str,
) -> None:
    commands.env["FLOWER_GPU_STATE_DIR"] = str(own_state)
    commands.program_of_ours()  # is there before something breaks
    options = break_it(commands, own_state)
    told, done = commands.tell(LEASED, node, {"print": "the app's"}, run_config={"use-gpu": True}, **options)
    (line,) = [line for line in done.stderr.splitlines() if WITHOUT in line]
    assert line.startswith("flower-gpu: ") and reason in line
    assert told["environ"]["CUDA_VISIBLE_DEVICES"] == host.uuids[0]
    assert told["environ"]["FLOWER_GPU_LEASE"]
    assert "the app's" in done.stdout
    assert control.status() == []


def test_without_the_operators_rule_such_a_message_has_no_lease(commands: Commands, node: SuperNode) -> None:
    told, done = commands.tell(
        FAST, node, run_config={"use-gpu": True}, wrapper=(sys.executable, WITHOUT_PIDFD)
    )
    assert WITHOUT in done.stderr
    assert "FLOWER_GPU_LEASE" not in told["environ"]


def test_an_environment_that_is_built_at_run_time_is_left_to_flower(commands: Commands) -> None:
    done = commands.run(LEASED, ("--allow-runtime-dependency-installation", "--help"))
    assert done.returncode == 0
    assert f"{WITHOUT}the app's environment is built at run time" in done.stderr
    assert done.stdout.startswith("usage: flwr-clientapp ")


def server_at_rest() -> control.Status:
    """Return the one fork server, once no fork of it learns what the last message had to import."""
    found: list[control.Status] = []

    def rests() -> bool:
        found[:] = control.status()
        return len(found) == 1 and not found[0].workers and not children(found[0].pid)

    until(rests)
    return found[0]


def children(parent: int) -> list[int]:
    """Return the processes that another one has started, and not reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it went meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def test_a_server_that_was_killed_or_hangs_is_replaced(
    commands: Commands, node: SuperNode, own_state: Path
) -> None:
    commands.env["FLOWER_GPU_STATE_DIR"] = str(own_state)
    commands.tell(LEASED, node)
    for number in (signal.SIGKILL, signal.SIGSTOP):  # one that hangs is given 20 s to answer
        broken = server_at_rest().pid
        os.kill(broken, number)
        _, done = commands.tell(LEASED, node)
        assert WITHOUT not in done.stderr
        assert server_at_rest().pid != broken
        assert not is_running(broken)


def test_what_a_server_has_learned_and_cannot_take_is_forgotten(
    commands: Commands, node: SuperNode, own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = commands.folder / "site-packages"
    site.mkdir()
    (site / "poison.py").write_text("import os; os._exit(7)\n")
    monkeypatch.syspath_prepend(str(site))  # our command finds it there, too
    commands.env["FLOWER_GPU_STATE_DIR"] = str(own_state)
    commands.program_of_ours()
    # A server that has learned which variables libraries read may be followed by one of another name.
    for _ in range(2):
        commands.tell(LEASED, node)
        until(lambda: not any(one.workers or children(one.pid) for one in control.status()))
        control.stop(wait_s=20)
    commands.tell(LEASED, node)
    server = server_at_rest()
    learned = state_folder.state_dir() / f"{server.name}.libraries"
    for text in (json.dumps(["poison", "flwr"]), "not JSON {"):
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not is_running(server.pid))  # noqa: B023 - called at once
        learned.write_text(text)
        _, done = commands.tell(LEASED, node)
        assert WITHOUT not in done.stderr
        server = server_at_rest()
        assert f"{server.name}.libraries" == learned.name
        assert "poison" not in server.libraries and "poison" not in learned.read_text()
