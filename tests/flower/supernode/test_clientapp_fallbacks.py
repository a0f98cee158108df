"""Messages where the fork server is missing, broken or poisoned: Flower's own code runs, with a lease."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clientapp_commands import FAST, LEASED, Commands
from clientapp_supernode import SuperNode
from nvml_stub import Host

from flower_gpu.workers.forkserver import client, control

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what Flower builds and serves apps with
    pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3"),
]

WITHOUT = "flwr-clientapp starts without the fork server, which is slower: "


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


def broken_python(commands: Commands, state: Path) -> dict[str, object]:
    site = commands.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\nif 'forkserver' in ''.join(sys.orig_argv): os._exit(3)\n"
    )
    return {"env": {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}}


CASES: list[tuple[Callable[[Commands, Path], dict[str, object]], str]] = [
    (broken_folder, "must be a folder of this user that nobody else can write to"),
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


def test_without_the_operators_rule_such_a_message_has_no_lease(
    commands: Commands, node: SuperNode, own_state: Path
) -> None:
    commands.env["FLOWER_GPU_STATE_DIR"] = str(own_state)
    commands.program_of_ours()
    options = broken_folder(commands, own_state)
    told, done = commands.tell(FAST, node, run_config={"use-gpu": True}, **options)
    assert WITHOUT in done.stderr
    assert "FLOWER_GPU_LEASE" not in told["environ"]


def test_an_environment_that_is_built_at_run_time_is_left_to_flower(commands: Commands) -> None:
    done = commands.run(LEASED, ("--allow-runtime-dependency-installation", "--help"))
    assert done.returncode == 0
    assert f"{WITHOUT}the app's environment is built at run time" in done.stderr
    assert done.stdout.startswith("usage: flwr-clientapp ")
