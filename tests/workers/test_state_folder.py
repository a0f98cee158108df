"""The folder of fork servers, footprints and runs, and the user's own files next to it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forkservers import CallError, Client, only_server
from processes import is_running, wait_until

from flower_gpu.apps import recording
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import Key
from flower_gpu.workers import state_folder
from flower_gpu.workers.forkserver import control, sockets

NAME = "0123456789abcdef0123"
KEY = Key("app:fit", "weights", "gpu", ())
# Files of the user. The second half have the same names as our own files.
USER_FILES = (
    "thesis.tex",
    ".bashrc",
    "data/train.npy",
    "runs/one.json",
    "ledger/accounts.csv",
    "commands/run",
    "footprints.json",
    "footprints.json.new",
    f"runs/{NAME[:16]}.json",
    *(f"{NAME}.{ending}" for ending in ("socket", "lock", "log", "libraries", "4711")),
    f".{NAME}.4711",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a user has filled long ago."""
    folder = tmp_path / "home"
    for name in USER_FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"all of {name}")
        os.utime(path, (0, 0))
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(0o755)
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(folder))
    monkeypatch.setenv("LIGHT_SERVERS", "1")
    yield folder
    control.stop(wait_s=20)


def test_files_of_the_user_in_the_state_folder_stay_unchanged(home: Path) -> None:
    with Client() as caller:
        server = caller.call("tasks_forkserver:server")
        assert only_server().pid == server
        sockets.remove_old_files()
        Footprints().learn(KEY, 1 << 30)
        assert recording.running_runs() == []
        with recording.registered(home / "data", "simulate", "app"):
            assert len(recording.running_runs()) == 1
    others = [path for path in home.rglob("*") if state_folder.state_dir() not in (path, *path.parents)]
    assert sorted(str(path.relative_to(home)) for path in others if path.is_file()) == sorted(USER_FILES)
    for name in USER_FILES:
        assert (home / name).read_text() == f"all of {name}"
        assert stat.S_IMODE((home / name).parent.stat().st_mode) == 0o755, name
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    assert stat.S_IMODE(state_folder.state_dir().stat().st_mode) == 0o700
    assert {path.name for path in home.iterdir()} - {name.partition("/")[0] for name in USER_FILES} == {
        state_folder.state_dir().name
    }


def test_only_old_files_of_ended_servers_are_removed(home: Path) -> None:
    folder = sockets.folder()
    Footprints().learn(KEY, 1 << 30)
    names = [f"{number:020x}" for number in range(6)]
    gone, new, listening, draining, starting, killed = names
    for name in (gone, draining, starting):
        for ending in ("log", "lock", "libraries", "4711"):
            (folder / f"{name}.{ending}").touch()
    (folder / f".{gone}.4711").touch()
    (folder / f"{new}.log").touch()
    (folder / f"{listening}.lock").touch()
    (folder / "notes.log").touch()
    listener = sockets.listen(listening)
    sockets.listen(killed).close()
    log = sockets.open_log(draining)  # A server that waits for its last worker has its log open.
    with sockets.locked(starting, deadline=None):
        for path in folder.iterdir():
            if not path.name.startswith(new):
                os.utime(path, (0, 0))
        sockets.remove_old_files()
    kept = sorted(path.name for path in folder.iterdir())
    assert [name for name in kept if name.startswith((gone, f".{gone}", killed))] == []
    assert [name for name in kept if name.startswith((new, listening))] == [
        f"{new}.log",
        f"{listening}.lock",
        f"{listening}.socket",
    ]
    for name in (draining, starting):
        assert len([file for file in kept if file.startswith(name)]) == 4
    assert {"notes.log", "footprints.json"} <= set(kept)
    assert Footprints().get(KEY) == 1 << 30
    os.close(log)
    listener.close()


def test_a_draining_server_keeps_its_log(home: Path, tmp_path: Path) -> None:
    with Client() as caller:
        caller.send("tasks_forkserver:wait", str(tmp_path / "started"), str(tmp_path / "go"))
        assert wait_until((tmp_path / "started").exists)
        name = only_server().name
        (server,) = control.stop()
        assert is_running(server)
        for path in sockets.folder().glob(f"{name}.*"):
            os.utime(path, (0, 0))
        sockets.remove_old_files()
        assert (sockets.folder() / f"{name}.log").exists()
        (tmp_path / "go").touch()
        assert caller.receive() == server
    assert wait_until(lambda: not is_running(server))
    sockets.remove_old_files()
    assert list(sockets.folder().glob(f"{name}.*")) == []


def test_a_removed_lock_file_is_created_again(home: Path) -> None:
    """Otherwise two processes could hold the lock, each with its own file."""
    with sockets.locked(NAME, deadline=None):
        program = (
            "import sys\nfrom flower_gpu.workers.forkserver import sockets\n"
            f"print('waits', flush=True)\nwith sockets.locked({NAME!r}, None):\n"
            "    print('has it', flush=True)\n    sys.stdin.readline()"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdin is not None and other.stdout is not None
        path = sockets.folder() / f"{NAME}.lock"
        assert other.stdout.readline() == "waits\n"
        descriptors = f"/proc/{other.pid}/fd"
        assert wait_until(lambda: str(path) in [str(fd.readlink()) for fd in Path(descriptors).iterdir()])
        path.unlink()
    assert other.stdout.readline() == "has it\n"
    with pytest.raises(TimeoutError), sockets.locked(NAME, deadline=time.monotonic() - 1):
        pass
    other.communicate("\n", timeout=60)


def test_a_relative_folder_is_relative_to_the_caller(tmp_path: Path) -> None:
    with Client(env={"FLOWER_GPU_STATE_DIR": "in/here", "LIGHT_SERVERS": "1"}) as caller:
        caller.do(f"os.chdir({str(tmp_path)!r})")
        try:
            server = caller.call("tasks_forkserver:server")
            assert caller.call("tasks_forkserver:server") == server
            (folder,) = (tmp_path / "in" / "here").iterdir()
            assert len(list(folder.glob("*.socket"))) == 1
        finally:
            caller.do("from flower_gpu.workers.forkserver import control; control.stop(wait_s=20)")


def test_a_folder_that_others_can_write_to_is_refused_and_not_changed(home: Path) -> None:
    home.chmod(0o775)
    before = sorted(home.iterdir())
    with Client() as caller, pytest.raises(CallError, match="chmod go-w it, or set FLOWER_GPU_STATE_DIR"):
        caller.call("tasks_forkserver:server")
    assert (stat.S_IMODE(home.stat().st_mode), sorted(home.iterdir())) == (0o775, before)


def test_in_a_sticky_folder_each_account_has_its_own(home: Path) -> None:
    home.chmod(0o1777)
    assert sockets.folder().parent == home
    assert stat.S_IMODE(home.stat().st_mode) == 0o1777
