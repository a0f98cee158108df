"""What a worker leaves behind: sockets, which other accounts cannot reach, folders, and processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forkservers
import pytest
from forkservers import Client, only_server
from processes import is_running, running_in_groups, wait_until
from strangers import addresses_of, needs_root, reached_by_a_stranger
from worker_lines import Caller

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerDiedError, WorkerTimeoutError
from flower_gpu.workers import state_folder

pytestmark = forkservers.marks()

WAIT = "left_tasks:wait_with_sockets"
# Number of sockets: a Listener, a Manager, multiprocessing's fork server, and a process that shares
# descriptors.
SOCKETS = 4


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    with forkservers.own_servers(light=True) as servers_folder:
        # Start the server now, so that calls with a time limit do not wait for it.
        run_in_worker("os:getpid", start_method="forkserver")
        yield servers_folder.parent  # Other accounts may enter this folder.


def folders_of_workers() -> list[Path]:
    return list((state_folder.state_dir() / "sockets").iterdir())


def check_sockets(tmp_path: Path, call: Callable[[str, str], Any]) -> None:
    """Check that another account cannot reach the sockets of a worker that runs :data:`WAIT`."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(call(str(ready), str(go))))
    thread.start()
    try:
        assert wait_until(lambda: ready.exists() or not thread.is_alive(), 90)
        pid = int(ready.read_text())
        addresses = addresses_of(running_in_groups(pid))
        assert len(addresses) == SOCKETS, addresses
        (socket_folder,) = (path for path in folders_of_workers() if path.name.endswith(f"-{pid}"))
        folders = [state_folder.state_dir(), socket_folder.parent, socket_folder]
        assert reached_by_a_stranger(addresses, folders) == []
        assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    finally:
        go.touch()
        thread.join()
    assert values == ["done"]


@needs_root
def test_sockets_of_a_worker_cannot_be_reached(start_method: str, tmp_path: Path) -> None:
    check_sockets(tmp_path, lambda *args: run_in_worker(WAIT, *args, start_method=start_method))
    assert folders_of_workers() == []


@needs_root
def test_the_socket_of_a_fork_server_cannot_be_reached(folder: Path) -> None:
    server = run_in_worker("tasks_forkserver:server", start_method="forkserver")
    addresses = addresses_of([server])
    assert len(addresses) == 1
    file = state_folder.state_dir() / f"{only_server().name}.socket"
    assert reached_by_a_stranger([*addresses, (addresses[0][0], str(file))], [state_folder.state_dir()]) == []


@needs_root
def test_unprotected_sockets_and_folders_can_be_reached() -> None:
    """This shows that the check itself works."""
    from multiprocessing.connection import Listener

    with Listener("\0flower-gpu-test"):
        addresses = addresses_of([os.getpid()])
        assert [address for _, address in addresses] == ["\0flower-gpu-test"]
        assert reached_by_a_stranger(addresses, [Path("/")]) == ["\0flower-gpu-test", "/"]


def test_a_killed_worker_leaves_no_folder(start_method: str) -> None:
    with pytest.raises(WorkerDiedError):
        run_in_worker("left_tasks:end_with_sockets", start_method=start_method)
    assert folders_of_workers() == []


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_killed_caller_leaves_no_folder(start_method: str, tmp_path: Path) -> None:
    """The fork server removes it at once. With ``spawn``, the next call removes it."""
    ready = tmp_path / "ready"
    with Client() as caller:
        caller.send(WAIT, str(ready), str(tmp_path / "go"), start_method=start_method)
        assert wait_until(ready.exists, 90)
        pid = int(ready.read_text())
        os.kill(caller.pid, signal.SIGKILL)
        assert wait_until(lambda: not running_in_groups(pid))
    if start_method == "spawn":
        # Threads of the killed process may end late, so several calls may be needed.
        assert wait_until(
            lambda: run_in_worker("os:getpid", start_method="spawn") and not folders_of_workers()
        )
    else:
        forkservers.release_servers()
        server = only_server().pid
        os.kill(server, signal.SIGTERM)
        assert wait_until(lambda: not is_running(server))
        assert folders_of_workers() == []


def test_the_state_folder_may_have_a_long_name(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    """The path is longer than the address of a socket may be."""
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(folder / ("long" * 30)))
    (tmp_path / "go").touch()
    assert run_in_worker(WAIT, str(tmp_path / "ready"), str(tmp_path / "go"), start_method="spawn") == "done"
    assert folders_of_workers() == []


def test_only_folders_of_workers_are_removed(folder: Path) -> None:
    parent = state_folder.state_dir() / "sockets"
    others = [parent / "mine", parent / "12-mine", parent / "notes.txt"]
    for path in others:
        path.mkdir(parents=True)
    parent.chmod(0o755)
    unused = parent / "12-34"
    unused.mkdir()
    state_folder.remove_left_socket_folders()
    # Other accounts could have changed the folder, so nothing in it is removed.
    assert sorted(parent.iterdir()) == sorted([*others, unused])
    parent.chmod(0o700)
    state_folder.remove_left_socket_folders()
    assert sorted(parent.iterdir()) == sorted(others)


# Processes in their own sessions ----------------------------------------------------------------------------

ERRORS = {"abort": WorkerDiedError, "hang": WorkerTimeoutError}


def pids_of(folder: Path) -> list[int]:
    """Return the pids of the processes that have started, which are four in the end."""
    return [int(text) for path in folder.iterdir() if (text := path.read_text())]


@pytest.mark.parametrize("end", ["return", "abort", "hang"])
def test_processes_in_other_sessions_end_with_the_worker(end: str, tmp_path: Path) -> None:
    # A short limit keeps the test short. On a busy machine, the call is repeated with a longer limit.
    for timeout_s in (2, 10, 60) if end == "hang" else (60,):
        folder = tmp_path / f"{timeout_s}"
        folder.mkdir()
        with pytest.raises(ERRORS[end]) if end in ERRORS else nullcontext():
            living = run_in_worker(
                "left_tasks:leave", str(folder), end, start_method="forkserver", timeout_s=timeout_s
            )
            assert living == [True] * 4
        pids = pids_of(folder)
        if len(pids) == 4:
            break
    assert len(pids) == 4
    assert wait_until(lambda: not any(map(is_running, pids))), pids


def test_processes_in_other_sessions_outlive_other_workers(caller: Caller, tmp_path: Path) -> None:
    """Processes of a worker that stays are not ended when workers of other lines end."""
    line, other = caller.line(), caller.line()
    assert caller.run("left_tasks:leave", str(tmp_path), "return", line=line, calls=3) == [True] * 4
    for _ in range(3):
        caller.run("os:getpid", line=other)
    pids = pids_of(tmp_path)
    assert len(pids) == 4 and all(map(is_running, pids))
    line.retire()
    assert wait_until(lambda: not any(map(is_running, pids))), pids


def test_a_fork_server_started_by_a_worker_stays() -> None:
    """Other processes may use it already."""
    pid = run_in_worker("left_tasks:start_server", "another", start_method="forkserver")
    assert isinstance(pid, int)
    for _ in range(3):  # These calls make the fork server look for orphans.
        run_in_worker("os:getpid", start_method="forkserver")
    assert is_running(pid)
