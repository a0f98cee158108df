"""No process of another account reaches a socket of ours, nor one that a library makes in our processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkservers
import pytest
from forkservers import Client, only_server
from processes import is_running, running_in_group, wait_until
from strangers import addresses_of, needs_root, reached_by_a_stranger

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerDiedError
from flower_gpu.workers import state_folder

pytestmark = forkservers.marks()

WAIT = "tasks_sockets:wait_with_sockets"
# Of a Listener, a Manager, the fork server of multiprocessing, and a process that shares descriptors.
SOCKETS = 4


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    with forkservers.own_servers(light=True) as found:
        yield found.parent  # others may enter that


def folders_of_workers() -> list[Path]:
    return list((state_folder.state_dir() / "sockets").iterdir())


def look_at(tmp_path: Path, call: Callable[[str, str], Any]) -> None:
    """Look, as another account, at a worker that does :data:`WAIT`; then nothing of it is left."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(call(str(ready), str(go))))
    thread.start()
    try:
        assert wait_until(lambda: ready.exists() or not thread.is_alive(), 90)
        pid = int(ready.read_text())
        found = addresses_of(running_in_group(pid))
        assert len(found) == SOCKETS, found
        (own,) = (path for path in folders_of_workers() if path.name.endswith(f"-{pid}"))
        folders = [state_folder.state_dir(), own.parent, own]
        assert reached_by_a_stranger(found, folders) == []
        assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    finally:
        go.touch()
        thread.join()
    assert values == ["done"]


@needs_root
def test_a_worker(start_method: str, tmp_path: Path) -> None:
    look_at(tmp_path, lambda *args: run_in_worker(WAIT, *args, start_method=start_method))
    assert folders_of_workers() == []


@needs_root
def test_a_fork_server(folder: Path) -> None:
    server = run_in_worker("tasks_forkserver:server", start_method="forkserver")
    found = addresses_of([server])
    assert len(found) == 1
    file = state_folder.state_dir() / f"{only_server().name}.socket"
    assert reached_by_a_stranger([*found, (found[0][0], str(file))], [state_folder.state_dir()]) == []


@needs_root
def test_a_stranger_reaches_what_has_no_permissions() -> None:
    """The look itself: it finds what can be reached."""
    from multiprocessing.connection import Listener

    with Listener("\0flower-gpu-test"):
        found = addresses_of([os.getpid()])
        assert [address for _, address in found] == ["\0flower-gpu-test"]
        assert reached_by_a_stranger(found, [Path("/")]) == ["\0flower-gpu-test", "/"]


def test_a_killed_worker_leaves_no_folder(start_method: str) -> None:
    with pytest.raises(WorkerDiedError):
        run_in_worker("tasks_sockets:end_with_sockets", start_method=start_method)
    assert folders_of_workers() == []


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_killed_caller_leaves_no_folder(start_method: str, tmp_path: Path) -> None:
    """The fork server tidies up at once, and whoever spawns a worker next."""
    ready = tmp_path / "ready"
    with Client() as caller:
        caller.send(WAIT, str(ready), str(tmp_path / "go"), start_method=start_method)
        assert wait_until(ready.exists, 90)
        pid = int(ready.read_text())
        os.kill(caller.pid, signal.SIGKILL)
        assert wait_until(lambda: not running_in_group(pid))
    if start_method == "spawn":
        # Not always the very next one: threads of what was killed may end a little later.
        assert wait_until(
            lambda: run_in_worker("os:getpid", start_method="spawn") and not folders_of_workers()
        )
    else:
        forkservers.leave()
        server = only_server().pid
        os.kill(server, signal.SIGTERM)
        assert wait_until(lambda: not is_running(server))
        assert folders_of_workers() == []


def test_a_folder_with_a_long_name(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    """Longer than an address of a socket."""
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(folder / ("long" * 30)))
    (tmp_path / "go").touch()
    assert run_in_worker(WAIT, str(tmp_path / "ready"), str(tmp_path / "go"), start_method="spawn") == "done"
    assert folders_of_workers() == []


def test_what_is_not_a_workers_stays(folder: Path) -> None:
    parent = state_folder.state_dir() / "sockets"
    others = [parent / "mine", parent / "12-mine", parent / "notes.txt"]
    for path in others:
        path.mkdir(parents=True)
    parent.chmod(0o755)
    unused = parent / "12-34"
    unused.mkdir()
    state_folder.remove_left_socket_folders()
    assert sorted(parent.iterdir()) == sorted([*others, unused])  # others could have changed it
    parent.chmod(0o700)
    state_folder.remove_left_socket_folders()
    assert sorted(parent.iterdir()) == sorted(others)
