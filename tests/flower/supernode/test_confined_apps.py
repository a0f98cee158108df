"""A hostile app under ``flower-gpu supernode --confine``, and the same app without it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from live_processes import processes_with
from supernode_host import Federation
from waiting import until

import flower_gpu
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]

HOSTILE = Path(__file__).parent / "hostile_app"

#: What is not refused, by the lines of the list that `--confine` prints.
ALLOWED = {
    "connect to a socket with a path": "connecting to Unix sockets that have a path",
    "read a file in /dev/shm": "reading, changing and leaving files in /dev/shm",
    "change a file in /dev/shm": "reading, changing and leaving files in /dev/shm",
    "set the date of a file there to now": "setting the dates of this account's files to now",
    "read the data": "they may also read ",
    "see the name and size of a file": "names, sizes and dates of files anywhere, and command lines",
    "see a command line": "names, sizes and dates of files anywhere, and command lines",
}
#: What an ordinary account on an ordinary kernel can do: so the attempts are real ones.
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


@contextmanager
def targets(fed: Federation, leaves: bool) -> Iterator[dict[str, Any]]:
    """Yield what there is on this host that no app should get at."""
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
    with ExitStack() as stack:
        stack.callback(shared.unlink)
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind("\0" + abstract)
        path = stack.enter_context(socket.socket(socket.AF_UNIX))
        path.bind(str(home / "s"))
        for each in (hidden, path, listening):
            each.listen(50)
        with suppress(OSError):  # fast open has to be allowed where somebody listens
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
            "ledger": str(next(Path(fed.host.env["FLOWER_GPU_LEDGER_DIR"]).glob("flower-gpu-leases-*/"))),
            "mutex": str(Path(fed.host.env["FLOWER_GPU_LEDGER_DIR"]) / "flower-gpu-leases.mutex"),
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


def found_by(fed: Federation, leaves: bool, *options: str) -> tuple[dict[str, str], str]:
    """Return what the app could do under SuperNodes with these options, and what they have printed."""
    (fed.folder / "data").mkdir()
    nodes = fed.supernodes(1, *options)
    until(lambda: (fed.state / f"flower-gpu-{os.getuid()}").exists(), "the state folder is there")
    made = Path(fed.host.env["FLOWER_GPU_LEDGER_DIR"])
    (made / f"flower-gpu-leases-{os.getuid()}").mkdir(exist_ok=True)
    (made / "flower-gpu-leases.mutex").touch()
    with targets(fed, leaves) as given:
        told = fed.folder / "targets.json"
        told.write_text(json.dumps(given))
        run = fed.run(HOSTILE, targets=str(told), found=str(fed.folder / "found.json"))
        assert run.wait(200) == 0, run.output
        replies = json.loads((fed.folder / "found.json").read_text())
    output = nodes.output
    nodes.end()
    assert "error" not in replies[0], replies[0]
    return replies[0], output


def test_a_confined_app_gets_at_nothing_but_what_is_listed(tmp_path: Path) -> None:
    with Federation(tmp_path) as fed:
        data = str(fed.folder / "data")
        found, output = found_by(fed, True, "--confine", "--data-dir", data, "--gpu", "never")
        own, left = found.pop("own"), json.loads(found.pop("left"))
        assert len(left) >= 2, left
        could = {name for name, how in found.items() if how == "done"}
        assert could <= set(ALLOWED), found
        for name in could:
            assert ALLOWED[name] in output, (name, output)
        assert set(POSSIBLE) <= set(found)
        assert "not for apps" not in json.dumps(found)
        # What it left is gone, and nothing else is.
        folder, state = Path(json.loads(own)), fed.state / f"flower-gpu-{os.getuid()}"
        assert folder.parent.parent == state / "confined"
        assert not list(folder.parent.parent.iterdir())
        until(lambda: not processes_with("TMPDIR", folder), "the processes that were left have ended")
        until(lambda: not list((state / "sockets").iterdir()), "so are the folders of sockets")
        outside = fed.folder / "outside"
        assert {path.name for path in outside.iterdir()} == {
            *("secret", "data-of-client-1", "node.key", "victim-0", "victim-1", "victim-2", "s")
        }
        assert {path.read_text() for path in outside.glob("victim-*")} == {"not for apps"}


def test_the_same_app_without_confinement(tmp_path: Path) -> None:
    with Federation(tmp_path) as fed:
        found, _ = found_by(fed, False, "--gpu", "never")
        assert {name: found[name] for name in POSSIBLE if found[name] != "done"} == {}
