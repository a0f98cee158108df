"""A hostile app and an ordinary app with named data under ``flower-gpu supernode --confine``."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from how_to_pages import first_command
from live_processes import processes_with
from run_programs import run_python
from supernode_host import COMMAND, Federation, Process, results_of
from waiting import until

import flower_gpu
from flower_gpu.launch import ports
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]

HOSTILE = Path(__file__).parent / "hostile_app"
TRY = """
import json, sys
from hostile_app.attempts import attempts
print(json.dumps(attempts(json.load(open(sys.argv[1])))))
"""

#: Attempts that are not refused, with the line that `--confine` prints about them.
ALLOWED = {
    "connect to a socket with a path": "connecting to Unix sockets that have a path",
    "read a file in /dev/shm": "reading, changing and leaving files in /dev/shm",
    "change a file in /dev/shm": "reading, changing and leaving files in /dev/shm",
    "set the date of a file there to now": "setting the dates of this account's files to now",
    "read the data": "they may also read ",
    "see the name and size of a file": "names, sizes and dates of files anywhere, and command lines",
    "see a command line": "names, sizes and dates of files anywhere, and command lines",
}
#: Attempts that succeed without confinement for an ordinary account on an ordinary kernel.
POSSIBLE = {
    *("read a file of the account", "read it in a thread", "read it in another program", "read it by a link"),
    *("read it by a hard link", "read it by another worker", "read it with an empty environment"),
    *("list a folder of the account", "read an SSH key", "read the SuperNode's key"),
    *("read another client's data", "list the ledger", "list the state folder"),
    *("lock the ledger", "write a file of the account", "make a file there", "make a folder there"),
    *("empty a file there", "remove a file there", "rename a file there", "change the mode of a file there"),
    *("write to the Python environment", "connect by TCP", "connect by TCP in a thread"),
    *("connect by TCP in another program", "listen at a TCP port", "send by UDP"),
    *("connect to an abstract socket", "signal a process", "signal the caller", "signal by a pidfd"),
    *("signal it in another program", "read a process's environment", "list a process's files"),
    *("set a limit of a process", "share memory of System V", "listen at a port that the kernel chooses"),
    *("set the date of a file there", "write to the data", "set the date of the data"),
    *("leave a setuid program", "join the group of a process"),
    *("lower the priority of a process", "let a process run on idle cores only"),
    *("have a process killed first",),
}


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A SuperLink and one fork server for all SuperNodes of these tests."""
    with Federation(tmp_path_factory.mktemp("confined")) as federation:
        (federation.folder / "data").mkdir()
        yield federation


@contextmanager
def targets(fed: Federation, leaves: bool) -> Iterator[dict[str, Any]]:
    """Yield files, sockets and processes of this host that no app should be able to reach."""
    home = fed.folder / "outside"
    home.mkdir(exist_ok=True)
    for name in ("secret", "data-of-client-1", "node.key", "victim-0", "victim-1", "victim-2"):
        (home / name).write_text("not for apps")
    (fed.folder / "data" / "of-client-0").write_text("for this app")
    ssh = fed.folder / ".ssh"
    ssh.mkdir(exist_ok=True)
    (ssh / "id_ed25519").write_text("not for apps")
    shared = Path(f"/dev/shm/flower-gpu-test-{os.getpid()}")
    shared.write_text("somebody's")
    abstract = f"flower-gpu-test-{os.getpid()}"
    ledger = Path(fed.host.env["FLOWER_GPU_LEDGER_DIR"])
    leases, mutex = ledger / f"flower-gpu-leases-{os.getuid()}", ledger / "flower-gpu-leases.mutex"
    leases.mkdir(exist_ok=True)
    mutex.touch()
    (home / "s").unlink(missing_ok=True)
    with ExitStack() as stack:
        stack.callback(shared.unlink)
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind("\0" + abstract)
        path = stack.enter_context(socket.socket(socket.AF_UNIX))
        path.bind(str(home / "s"))
        for server in (hidden, path, listening):
            server.listen(50)
        with suppress(OSError):  # the listening side has to allow TCP fast open
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 5)
        victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        yield {
            "secret": str(home / "secret"),
            "data": str(home / "data-of-client-1"),
            "named": str(fed.folder / "data" / "of-client-0"),
            "key": str(home / "node.key"),
            "victims": [str(home / f"victim-{number}") for number in range(3)],
            "ssh": str(ssh / "id_ed25519"),
            "ledger": str(leases),
            "mutex": str(mutex),
            "state": str(fed.state / f"flower-gpu-{os.getuid()}"),
            "package": flower_gpu.__file__,
            "port": listening.getsockname()[1],
            "abstract": abstract,
            "socket": str(home / "s"),
            "pid": victim.pid,
            "shared": str(shared),
            "disk": next(
                (disk for disk in ("/dev/vda", "/dev/sda", "/dev/nvme0n1") if Path(disk).exists()), ""
            ),
            "leaves": leaves,
        }


def targets_file(fed: Federation, values: dict[str, Any]) -> str:
    path = fed.folder / "targets.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_nodes_started_as_in_the_docs_train_and_a_confined_app_can_only_do_the_listed_actions(
    fed: Federation,
) -> None:
    """One of the two nodes is confined. Its data folder is named."""
    state = fed.state / f"flower-gpu-{os.getuid()}"
    labels = torch.arange(64) % 4
    for partition in range(2):
        torch.save((torch.eye(4).repeat(1, 4)[labels], labels), fed.folder / "data" / f"{partition}.pt")
    with fed.one_test():
        node = start_with_command_of_page(fed, "confine.md", "--node-config partition-id=1")
        until(state.exists, "the state folder exists")
        with targets(fed, leaves=True) as values:
            results_file = fed.folder / "found.json"
            run = fed.run(HOSTILE, targets=targets_file(fed, values), found=str(results_file))
            assert run.wait(200) == 0, run.output
        [results] = json.loads(results_file.read_text())
        assert "error" not in results, results
        node_output = node.output

        start_with_command_of_page(fed, "supernodes.md")
        run = fed.run(data_folder=str(fed.folder / "data"), num_server_rounds=2)
        assert run.wait(200) == 0, run.output
        for server_round in (1, 2):
            assert results_of(run, server_round) == ("2 results and 0 failures", [])
        losses = [float(loss) for loss in re.findall(r"'train_loss': ([0-9.]+)", run.server_output)]
        assert losses[0] > losses[1], run.server_output

    assert f"apps are confined; they may also read {fed.folder / 'data'}. " in node_output
    worker_folder, leftovers = results.pop("own"), json.loads(results.pop("left"))
    assert len(leftovers) >= 2, leftovers
    succeeded = {name for name, result in results.items() if result == "done"}
    assert succeeded <= set(ALLOWED), results
    for name in succeeded:
        assert ALLOWED[name] in node_output, (name, node_output)
    assert set(POSSIBLE) <= set(results)
    assert "not for apps" not in json.dumps(results)
    # The leftovers of the app are removed, and all other files are still there.
    folder = Path(json.loads(worker_folder))
    assert folder.parent.parent == state / "confined"
    assert not list(folder.parent.parent.iterdir())
    until(lambda: not processes_with("TMPDIR", folder), "the processes that the app left have ended")
    until(lambda: not list((state / "sockets").iterdir()), "the folders of sockets are removed")
    outside = fed.folder / "outside"
    assert {path.name for path in outside.iterdir()} == {
        *("secret", "data-of-client-1", "node.key", "victim-0", "victim-1", "victim-2", "s")
    }
    assert {path.read_text() for path in outside.glob("victim-*")} == {"not for apps"}


def start_with_command_of_page(fed: Federation, page: str, more: str = "") -> Process:
    """Start a SuperNode with the first command of a page."""
    port = str(ports.free_ports(1)[0])
    line = first_command(page, superlink=f"127.0.0.1:{fed.port}", port=port, data="data")
    if "--port" not in line:
        line += f" --port {port}"
    return fed.start(page, *COMMAND, *shlex.split(f"{line} {more}")[1:])


def test_the_attempts_succeed_without_confinement(fed: Federation) -> None:
    with targets(fed, leaves=False) as values:
        env = {**fed.env, "PYTHONPATH": str(HOSTILE)}
        completed = run_python(TRY, targets_file(fed, values), env=env)
    assert completed.returncode == 0, completed.stderr
    results = json.loads(completed.stdout)
    assert {name: results[name] for name in POSSIBLE if results[name] != "done"} == {}
