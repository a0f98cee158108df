"""A confined worker can use neither the sockets of fork servers nor those of other workers."""

from __future__ import annotations

import os
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forkservers
import pytest
import socket_attacks
from forkservers import Client, call_server, only_server, until_only
from processes import SUPERVISED, is_running, wait_until

from flower_gpu import landlock, run_in_worker
from flower_gpu.calls import grants
from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.workers import state_folder, thread_names
from flower_gpu.workers.call import Call
from flower_gpu.workers.caller import run
from flower_gpu.workers.confinement import Confinement
from flower_gpu.workers.forkserver import client, control, identity, sockets


def _can_confine() -> bool:
    try:
        return landlock.version() >= landlock.TRUNCATE_VERSION
    except landlock.LandlockUnavailableError:
        return False


pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3"),
    pytest.mark.skipif(not _can_confine(), reason="needs Landlock 3 (Linux 6.2)"),
]
FORKSERVER = {"start_method": "forkserver"}
#: The fields of a server's status report.
ANSWER = str(sorted(set(vars(control.Status)["__dataclass_fields__"]) - {"name", "memory_bytes"}))


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    with forkservers.own_servers(light=True) as path:
        yield path


@pytest.fixture(autouse=True)
def _own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def holder(folder: Path) -> Iterator[tuple[int, int]]:
    """This process holds the file with the proof open, as each caller does for a moment."""
    call_server()
    descriptor = os.open(folder / sockets.PROOF, os.O_RDONLY)
    yield os.getpid(), descriptor
    os.close(descriptor)


def test_only_the_account_may_open_the_file(holder: tuple[int, int]) -> None:
    status = os.fstat(holder[1])
    assert (status.st_mode & 0o7777, status.st_uid, status.st_size) == (0o600, os.getuid(), 0)


def test_a_confined_worker_cannot_prove_that_it_is_a_caller(holder: tuple[int, int]) -> None:
    """It cannot open the file with the proof, and the server refuses every other file."""
    before = only_server()
    results = run_in_worker("socket_attacks:attempts", before.name, holder, confined=True, **FORKSERVER)
    assert results == {
        "nothing": "closed",
        "opened": "PermissionError",
        "opened for reading and writing": "PermissionError",
        "opened by its path only": "closed",
        "opened for ioctl only": "closed",
        "opened by its path, then through /proc": "PermissionError",
        "another file": "closed",
        "a memory file": "closed",
        "a folder": "closed",
        "two files": "closed",
        "linked": "OSError",
        "replaced by a file of its own": "PermissionError",
        "created anew": "PermissionError",
        "by another process's /proc": "PermissionError",
        "by another process's pidfd": "PermissionError",
    }
    assert call_server() == only_server().pid


def test_an_unconfined_worker_can_prove_that_it_is_a_caller(holder: tuple[int, int]) -> None:
    """Without confinement, some of the same attempts succeed, so it is the confinement that prevents them."""
    server = only_server()
    results = run_in_worker("socket_attacks:attempts", server.name, holder, confined=False, **FORKSERVER)
    refused = ("nothing", "by its path only", "ioctl", "another file", "memory", "folder", "two files")
    for method, result in results.items():
        assert result == ("closed" if any(text in method for text in refused) else ANSWER), method
    assert call_server() == only_server().pid


def test_every_request_of_a_confined_worker_is_refused(folder: Path) -> None:
    """The server forks no worker, learns nothing, counts no user, does not stop and reports no status."""
    with Client() as other:
        server = other.call("tasks_forkserver:server")
        before = until_only(lambda status: not status.workers)
        record = {
            "digests": identity.digests(os.environ, os.environ),
            "threads": {},
            "path": sys.path,
            "is_confined": False,
            "is_on_gpu": False,
            "setup": None,
            "label": "hostile",
            "kind": "",
        }
        answers = run_in_worker("socket_attacks:requests", before.name, record, **FORKSERVER)
        assert answers == ["closed"] * 8
        after = until_only(lambda status: not status.workers)
        assert (after.pid, after.calls) == (server, before.calls + 1)
        assert (after.users, after.libraries) == (before.users, before.libraries)
        assert not list(folder.glob(f"{'0' * 20}*"))
        assert other.call("tasks_forkserver:server") == server


def test_a_call_of_a_confined_worker_is_spawned() -> None:
    """Workers that a confined worker starts are spawned, and confined like their caller."""
    before = only_server().calls
    refused, spawned = run_in_worker("socket_attacks:calls", "forkserver", "auto", **FORKSERVER)
    assert refused.startswith("WorkerStartError: cannot start a worker: fork servers fork workers only for")
    assert str(state_folder.state_dir() / sockets.PROOF) in refused and "start_method='spawn'" in refused
    assert spawned is False
    assert until_only(lambda status: not status.workers).calls == before + 1


def test_a_confined_process_sees_no_servers() -> None:
    assert run_in_worker("socket_attacks:servers", **FORKSERVER) == []
    assert control.status()


@pytest.mark.parametrize("method", SUPERVISED)
def test_a_worker_does_not_inherit_the_servers_descriptors(method: str, folder: Path, tmp_path: Path) -> None:
    """It has neither the server's socket, nor a connection, nor the file with the proof."""
    started, until = tmp_path / "started", tmp_path / "until"
    with Client() as other, Client() as caller:
        other.send("tasks_forkserver:wait", str(started), str(until))
        assert wait_until(started.exists, timeout_s=60)
        targets: dict[str, Any] = caller.call("socket_attacks:open_files", start_method=method)
        until.touch()
        other.receive()
    socket_folders = str(folder / "sockets")
    # A worker has its connection to the caller. A fork of the caller also has the caller's end of it.
    assert sum(target.startswith("socket:") for target in targets.values()) == 1 + (method == "fork")
    inherited = {
        number: target
        for number, target in targets.items()
        if (target.startswith("anon_inode:") and method != "fork")
        or (target.startswith(str(folder)) and not target.startswith(socket_folders))
    }
    assert not inherited
    assert sum(target.startswith(socket_folders) for target in targets.values()) == 1


def test_a_worker_does_not_see_variables_of_other_callers(tmp_path: Path) -> None:
    """A fork has everything that its server has read, so the server must not read callers' variables."""
    started, until = tmp_path / "started", tmp_path / "until"

    def value(name: str) -> str:
        return f"value-of-{name}+{socket_attacks.ending(f'value-of-{name}')}"

    # Many variables, because the worker's own variables overwrite some of the memory.
    def many(name: str) -> dict[str, str]:
        return {f"OF_{name}_{letter}": value(name + letter) for letter in string.ascii_lowercase}

    first = call_server()
    with Client(env=many("another")) as other, Client(env={"OF_CALLER": value("caller")}) as caller:
        with Client(env=many("earlier")) as earlier:
            assert earlier.call("tasks_forkserver:server") == first
        other.send("tasks_forkserver:wait", str(started), str(until), env=many("argument"))
        assert wait_until(started.exists, timeout_s=60)
        values = caller.call("socket_attacks:values")
        until.touch()
        assert other.receive() == first
    assert values == [value("caller")]


def test_a_fork_of_a_caller_does_not_inherit_the_proof(tmp_path: Path) -> None:
    """A process may fork a worker while another of its threads asks a server."""
    with Client() as caller:
        leaked = caller.do(
            """
            import threading
            from flower_gpu.workers.forkserver import control

            def ask():
                while not stop.is_set():
                    control.status()

            run_in_worker("tasks_forkserver:server")
            stop = threading.Event()
            asking = [threading.Thread(target=ask) for _ in range(3)]
            for thread in asking:
                thread.start()
            answer = 0
            for _ in range(200):
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    files = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
                             if os.path.exists(f"/proc/self/fd/{number}")]
                    os.write(write, b"1" if any(name.endswith("/callers") for name in files) else b"0")
                    os._exit(0)
                os.waitpid(pid, 0)
                answer += int(os.read(read, 1))
                os.close(read), os.close(write)
            stop.set()
            for thread in asking:
                thread.join()
            """
        )
    assert leaked == 0


@pytest.mark.parametrize("method", SUPERVISED)
def test_a_worker_cannot_connect_to_a_listener_of_another_worker(method: str, tmp_path: Path) -> None:
    """A listener unpickles messages of processes with its key, so forks of a server have different keys."""
    ready, done = tmp_path / "ready", tmp_path / "over"
    with Client(env={"FLOWER_GPU_START_METHOD": method}) as listener:
        listener.send("socket_attacks:listen", str(ready), str(done))
        assert wait_until(ready.exists, timeout_s=60)
        assert run_in_worker("socket_attacks:speak", ready.read_text(), **FORKSERVER) == "AuthenticationError"
        assert wait_until(done.exists, timeout_s=60)
        assert listener.receive() == "AuthenticationError"


def test_nothing_is_preloaded_for_a_confined_worker(tmp_path: Path) -> None:
    """Otherwise the server would run functions of the app, and callers send it their descriptors."""
    call = Call(
        "tasks_forkserver:server",
        label="test",
        preload=[("os:mkdir", {"path": str(tmp_path / "made")})],
        confinement=Confinement(str(tmp_path / "own")),
    )
    with pytest.raises(WorkerStartError, match="preload= cannot be used with --confine"):
        run(call, "forkserver")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_no_app_runs_if_it_could_read_the_state_folder(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator may place it in a folder that all apps can read, such as /dev/shm."""
    (tmp_path / "own").mkdir()
    confinement = Confinement(str(tmp_path / "own"), read=(str(Path(__file__).parent),))
    call = Call(
        "tasks_forkserver:server",
        env=confinement.environment(),
        setup=grants.SETUP,
        label="test",
        confinement=confinement,
    )
    with thread_names.provided(tmp_path / "own"):
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", "/dev/shm")
            with (
                forkservers.own_servers(light=True),
                pytest.raises(ConfigError, match="Set FLOWER_GPU_STATE_DIR to another folder"),
            ):
                run(call, method)
        assert run(call, method)


def test_a_removed_file_is_created_again(folder: Path) -> None:
    """A cleanup may remove the file. The next caller creates it again."""
    server = call_server()
    (folder / sockets.PROOF).unlink()
    assert call_server() == server
    (folder / sockets.PROOF).unlink()
    with Client() as other:
        assert other.call("tasks_forkserver:server") == server


def test_connections_of_confined_processes_do_not_keep_a_server_alive(tmp_path: Path) -> None:
    """Confined processes do not count as users of a server."""
    with forkservers.own_servers(idle_s=1, light=True):
        started, until = tmp_path / "started", tmp_path / "until"
        server = call_server()
        name = only_server().name
        with Client(env={"FLOWER_GPU_START_METHOD": "spawn"}) as hostile:
            hostile.send("socket_attacks:hold_connections", name, str(started), str(until))
            assert wait_until(started.exists, timeout_s=60)
            forkservers.release_servers()
            assert wait_until(lambda: not is_running(server), timeout_s=60)
            until.touch()
            hostile.receive()
