"""What a worker that is confined gets from the sockets of fork servers, and of other workers: nothing."""

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
import tasks_confined
from forkservers import Client, only_server, until_only
from processes import SUPERVISED, is_running, wait_until

from flower_gpu import landlock, run_in_worker
from flower_gpu.calls import leased_worker
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
#: What a server that answers says of itself.
ANSWER = str(sorted(set(vars(control.Status)["__dataclass_fields__"]) - {"name", "memory_bytes"}))


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    with forkservers.own_servers(light=True) as found:
        yield found


@pytest.fixture(autouse=True)
def _own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def holder(folder: Path) -> Iterator[tuple[int, int]]:
    """This process, which has the file open as a caller has it for a moment."""
    run_in_worker("tasks_forkserver:server", **FORKSERVER)
    descriptor = os.open(folder / sockets.PROOF, os.O_RDONLY)
    yield os.getpid(), descriptor
    os.close(descriptor)


def test_the_file_is_the_accounts_own(holder: tuple[int, int]) -> None:
    found = os.fstat(holder[1])
    assert (found.st_mode & 0o7777, found.st_uid, found.st_size) == (0o600, os.getuid(), 0)


def test_a_confined_worker_cannot_show_that_it_is_a_caller(holder: tuple[int, int]) -> None:
    """It cannot open the file; what it can open is refused."""
    before = only_server()
    found = run_in_worker("tasks_confined:attempts", before.name, holder, confined=True, **FORKSERVER)
    assert found == {
        "nothing": "closed",
        "opened": "PermissionError",
        "opened for reading and writing": "PermissionError",
        "opened by its path only": "closed",
        "opened for ioctl only": "closed",
        "opened by its path, then by that": "PermissionError",
        "another file": "closed",
        "a memory file": "closed",
        "a folder": "closed",
        "two files": "closed",
        "linked": "OSError",
        "a file of its own in the place": "PermissionError",
        "made anew": "PermissionError",
        "of another process": "PermissionError",
        "taken from another process": "PermissionError",
    }
    assert run_in_worker("tasks_forkserver:server", **FORKSERVER) == only_server().pid


def test_others_can(holder: tuple[int, int]) -> None:
    """The same attempts of a worker that is not confined: so they are what counts above."""
    server = only_server()
    found = run_in_worker("tasks_confined:attempts", server.name, holder, confined=False, **FORKSERVER)
    refused = ("nothing", "by its path only", "ioctl", "another file", "memory", "folder", "two files")
    for way, came in found.items():
        assert came == ("closed" if any(text in way for text in refused) else ANSWER), way
    assert run_in_worker("tasks_forkserver:server", **FORKSERVER) == only_server().pid


def test_no_request_of_a_confined_worker_is_done(folder: Path) -> None:
    """No worker, nothing learned, nobody who stays, no end, no line about others."""
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
        found = run_in_worker("tasks_confined:requests", before.name, record, **FORKSERVER)
        assert found == ["closed"] * 8
        after = until_only(lambda status: not status.workers)
        assert (after.pid, after.calls) == (server, before.calls + 1)
        assert (after.users, after.libraries) == (before.users, before.libraries)
        assert not list(folder.glob(f"{'0' * 20}*"))
        assert other.call("tasks_forkserver:server") == server


def test_a_call_of_a_confined_worker() -> None:
    """An app may call in workers: they are spawned, and confined like the worker that calls."""
    before = only_server().calls
    refused, spawned = run_in_worker("tasks_confined:calls", "forkserver", "auto", **FORKSERVER)
    assert refused.startswith("WorkerStartError: cannot start a worker: fork servers fork workers only for")
    assert str(state_folder.state_dir() / sockets.PROOF) in refused and "start_method='spawn'" in refused
    assert spawned is False
    assert until_only(lambda status: not status.workers).calls == before + 1


def test_a_confined_process_sees_no_servers() -> None:
    assert run_in_worker("tasks_confined:servers", **FORKSERVER) == []
    assert control.status()


@pytest.mark.parametrize("method", SUPERVISED)
def test_a_worker_has_nothing_of_its_server_open(method: str, folder: Path, tmp_path: Path) -> None:
    """Neither its socket and connections, also not those of others, nor the file that callers show."""
    started, until = tmp_path / "started", tmp_path / "until"
    with Client() as other, Client() as caller:
        other.send("tasks_forkserver:wait", str(started), str(until))
        assert wait_until(started.exists, timeout_s=60)
        found: dict[str, Any] = caller.call("tasks_confined:open_files", start_method=method)
        until.touch()
        other.receive()
    own = str(folder / "sockets")
    # That to its caller; a fork of the caller has that one's end, too.
    assert sum(what.startswith("socket:") for what in found.values()) == 1 + (method == "fork")
    left = {
        number: what
        for number, what in found.items()
        if (what.startswith("anon_inode:") and method != "fork")
        or (what.startswith(str(folder)) and not what.startswith(own))
    }
    assert not left
    assert sum(what.startswith(own) for what in found.values()) == 1


def test_a_worker_has_no_variables_of_other_callers(tmp_path: Path) -> None:
    """Neither of one whose worker runs, nor of one that is gone: a fork has all that its server has read."""
    started, until = tmp_path / "started", tmp_path / "until"

    def value(name: str) -> str:
        return f"value-of-{name}+{tasks_confined.ending(f'value-of-{name}')}"

    def many(name: str) -> dict[str, str]:  # or the worker's own might lie in the place of all of them
        return {f"OF_{name}_{one}": value(name + one) for one in string.ascii_lowercase}

    first = run_in_worker("tasks_forkserver:server", **FORKSERVER)
    with Client(env=many("another")) as other, Client(env={"OF_CALLER": value("caller")}) as caller:
        with Client(env=many("earlier")) as earlier:
            assert earlier.call("tasks_forkserver:server") == first
        other.send("tasks_forkserver:wait", str(started), str(until), env=many("given"))
        assert wait_until(started.exists, timeout_s=60)
        found = caller.call("tasks_confined:values")
        until.touch()
        assert other.receive() == first
    assert found == [value("caller")]


def test_a_fork_of_a_caller_has_not_what_other_threads_show(tmp_path: Path) -> None:
    """A worker may be forked from a process at the moment in which another thread of it asks a server."""
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
                    there = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
                             if os.path.exists(f"/proc/self/fd/{number}")]
                    os.write(write, b"1" if any(name.endswith("/callers") for name in there) else b"0")
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
def test_a_worker_cannot_speak_to_a_listener_of_another(method: str, tmp_path: Path) -> None:
    """Who has the key of a listener has it unpickle something: forks of one server have different keys."""
    ready, over = tmp_path / "ready", tmp_path / "over"
    with Client(env={"FLOWER_GPU_START_METHOD": method}) as listening:
        listening.send("tasks_confined:listen", str(ready), str(over))
        assert wait_until(ready.exists, timeout_s=60)
        assert run_in_worker("tasks_confined:speak", ready.read_text(), **FORKSERVER) == "AuthenticationError"
        assert wait_until(over.exists, timeout_s=60)
        assert listening.receive() == "AuthenticationError"


def test_nothing_is_preloaded_for_a_confined_worker(tmp_path: Path) -> None:
    """A server would run functions of the app itself, where callers show their descriptors."""
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
def test_no_app_runs_where_it_could_read_the_state_folder(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator may have it in a folder that all apps can read, such as /dev/shm."""
    (tmp_path / "own").mkdir()
    own = Confinement(str(tmp_path / "own"), read=(str(Path(__file__).parent),))
    call = Call(
        "tasks_forkserver:server",
        env=own.environment(),
        setup=leased_worker.SETUP,
        label="test",
        confinement=own,
    )
    with thread_names.given(tmp_path / "own"):
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", "/dev/shm")
            with (
                forkservers.own_servers(light=True),
                pytest.raises(ConfigError, match="Set FLOWER_GPU_STATE_DIR to another folder"),
            ):
                run(call, method)
        assert run(call, method)


def test_the_file_was_removed(folder: Path) -> None:
    """By somebody who tidies up: the next caller makes it anew."""
    server = run_in_worker("tasks_forkserver:server", **FORKSERVER)
    (folder / sockets.PROOF).unlink()
    assert run_in_worker("tasks_forkserver:server", **FORKSERVER) == server
    (folder / sockets.PROOF).unlink()
    with Client() as other:
        assert other.call("tasks_forkserver:server") == server


def test_a_server_whose_only_connections_are_of_a_confined_process_ends(tmp_path: Path) -> None:
    """Nobody uses it."""
    with forkservers.own_servers(idle_s=1, light=True):
        started, until = tmp_path / "started", tmp_path / "until"
        server = run_in_worker("tasks_forkserver:server", **FORKSERVER)
        name = only_server().name
        with Client(env={"FLOWER_GPU_START_METHOD": "spawn"}) as hostile:
            hostile.send("tasks_confined:hold_connections", name, str(started), str(until))
            assert wait_until(started.exists, timeout_s=60)
            forkservers.leave()
            assert wait_until(lambda: not is_running(server), timeout_s=60)
            until.touch()
            hostile.receive()
