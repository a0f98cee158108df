"""The life of a fork server: its start, its callers, its end and its replacement."""

from __future__ import annotations

import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import forkservers
import pytest
from forkservers import Client, call_server, only_server, until_only
from processes import all_processes, children_of, is_running, wait_until

from flower_gpu import WorkerDiedError, run_in_worker
from flower_gpu.errors import WorkerStartError
from flower_gpu.workers.forkserver import client, control, program, sockets

pytestmark = forkservers.marks(fixture="folder")

FORKSERVER = {"start_method": "forkserver"}


@pytest.fixture
def no_server() -> None:
    control.stop(wait_s=20)
    forkservers.release_servers()
    assert control.status() == []


def name_of_server(caller: Client) -> str:
    """Return the name of a caller's server, and end that server."""
    caller.call("tasks_forkserver:server")
    name = only_server().name
    control.stop(wait_s=20)
    return name


class TestSharedServer:
    def test_simultaneous_clients_start_a_single_server(self, no_server: None) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client()) for _ in range(4)]
            for caller in clients:
                caller.do("pass")  # The client has started now.
            for caller in clients:
                caller.send("tasks_forkserver:server")
            (server,) = {caller.receive() for caller in clients}
            status = only_server()
            assert (status.pid, status.calls, status.users) == (server, 4, 4)
            parent = next(process.parent for process in all_processes() if process.pid == server)
            assert parent not in [os.getpid(), *(caller.pid for caller in clients)]
            assert os.getsid(server) not in {os.getsid(caller.pid) for caller in clients}
            for caller in clients:
                assert children_of(caller.pid) == []
                assert caller.do("answer = [name for name in sys.modules if name.startswith('torch')]") == []
            for caller in clients[:3]:  # One of the clients has started the server.
                caller.kill()
            assert clients[3].call("tasks_forkserver:server") == server
        assert until_only(lambda status: status.users == 0).pid == server

    def test_a_fork_of_a_client_is_a_client(self) -> None:
        with Client() as parent:
            server = parent.call("tasks_forkserver:server")
            before = only_server().users
            in_fork = parent.do(
                """
                read, write = os.pipe()
                if not os.fork():
                    try:
                        os.write(write, str(run_in_worker("tasks_forkserver:server")).encode())
                    finally:
                        os._exit(0)
                os.wait()
                answer = int(os.read(read, 100))
                """
            )
            assert in_fork == server
            assert parent.call("tasks_forkserver:server") == server
            assert until_only(lambda status: status.users == before).pid == server


class TestEnd:
    def test_a_server_without_users_ends(self) -> None:
        with forkservers.own_servers(idle_s=0.5, light=True) as folder:
            with Client() as using:
                server = using.call("tasks_forkserver:server")
                with pytest.raises(AssertionError):  # The server stays although its client is idle.
                    assert wait_until(lambda: not is_running(server), timeout_s=2)
                assert only_server().users == 1
                assert len(list(folder.glob("*.socket"))) == 1
            assert wait_until(lambda: not is_running(server))
            assert list(folder.glob("*.socket")) == []
            assert control.status() == []
            assert call_server() != server

    def test_a_server_told_to_stop_waits_for_its_workers(self, no_server: None, tmp_path: Path) -> None:
        go = tmp_path / "go"
        with ThreadPoolExecutor(6) as pool:
            running = [
                pool.submit(run_in_worker, "tasks_forkserver:wait", f"{tmp_path}/{n}", str(go), **FORKSERVER)
                for n in range(6)
            ]
            assert wait_until(lambda: len(list(tmp_path.iterdir())) == 6, timeout_s=60)
            server = only_server()
            assert len(server.workers) == 6
            os.kill(server.pid, signal.SIGTERM)
            assert wait_until(lambda: control.status() == [])
            other = call_server()  # The old server still waits for its workers.
            assert is_running(server.pid)
            go.touch()
            assert {future.result() for future in running} == {server.pid} != {other}
        assert wait_until(lambda: not is_running(server.pid))
        assert only_server().pid == other


class TestReplacement:
    def test_workers_outlive_a_killed_server(self, tmp_path: Path) -> None:
        """They still return their results, and a crash is still reported."""
        files = [str(tmp_path / name) for name in ("first", "second")]
        go = tmp_path / "go"
        with ThreadPoolExecutor() as pool:
            result = pool.submit(run_in_worker, "tasks_forkserver:wait", files[0], str(go), **FORKSERVER)
            crash = pool.submit(
                run_in_worker, "tasks_forkserver:abort_after", files[1], str(go), **FORKSERVER
            )
            assert wait_until(lambda: all(map(os.path.exists, files)))
            server = only_server().pid
            os.kill(server, signal.SIGKILL)
            go.touch()
            assert result.result() == server
            with pytest.raises(WorkerDiedError, match="the last words") as caught:
                crash.result()
            assert "in an unknown way (the fork server that forked it was ended" in str(caught.value)
        assert call_server() != server

    def test_a_server_that_hangs_is_replaced(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log says what the caller waits for."""
        monkeypatch.setattr(client, "_SAY_S", 0.1)
        monkeypatch.setattr(client, "_ANSWER_S", 0.5)
        monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
        server = call_server()
        os.kill(server, signal.SIGSTOP)
        assert call_server() != server
        assert not is_running(server)
        assert f"the fork server (pid {server}) has not answered for 0.1 s: it is stopped" in caplog.text

    def test_a_server_that_hangs_and_cannot_be_killed_is_replaced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A new server takes its place, although the socket of the old server still accepts connections."""
        monkeypatch.setattr(client, "_SAY_S", 0.1)
        monkeypatch.setattr(client, "_ANSWER_S", 0.5)
        monkeypatch.setattr(client, "KILLED_S", 0.1)
        server = call_server()
        os.kill(server, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
            assert call_server() != server
        assert is_running(server)
        os.kill(server, signal.SIGKILL)

    def test_a_server_that_hangs_before_the_fork_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "_SAY_S", 0.1)
        monkeypatch.setattr(client, "_ANSWER_S", 0.5)
        fork, stopped = client.ServerPlace.fork, []

        def stop_and_fork(*args: object) -> client.Forked:
            if not stopped:
                stopped.append(only_server().pid)
                os.kill(stopped[0], signal.SIGSTOP)
            return fork(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(client.ServerPlace, "fork", stop_and_fork)
        assert call_server() not in stopped
        assert not is_running(stopped[0])

    def test_a_server_whose_folder_was_removed_is_replaced(self, tmp_path: Path) -> None:
        with forkservers.own_servers(light=True) as folder:
            server = call_server()
            folder.rename(tmp_path / "elsewhere")
            assert call_server() != server
            forkservers.release_servers()
            assert wait_until(lambda: not is_running(server))

    def test_a_server_that_is_stuck_in_its_start_is_replaced(self) -> None:
        """The server ends even if its starter has been killed. Other callers say what they wait for."""
        with forkservers.own_servers(light=True) as folder, Client() as starter, Client() as other:
            starter.do("from flower_gpu.workers.forkserver import program; program._START_S = 5.0")
            other.do("os.environ['FLOWER_GPU_SAY_WAIT_S'] = '0.2'")
            lock = folder / f"{name_of_server(other)}.lock"
            known = ("", str(starter.pid), lock.read_text())
            starter.send("tasks_forkserver:server")
            assert wait_until(lambda: lock.read_text() not in known, timeout_s=60)
            stuck = int(lock.read_text())
            os.kill(stuck, signal.SIGSTOP)
            starter.kill()
            assert other.call("tasks_forkserver:server") == only_server().pid != stuck
            assert not is_running(stuck)
            said = other.errors()
            assert said.count(f"is being started by another process (pid {stuck})") == 1
            assert "still waiting: the fork server is not ready yet (it may take 300 s)" in said

    def test_callers_do_not_wait_endlessly_for_a_start(self) -> None:
        """For example, the process that starts the server may be stopped."""
        with (
            forkservers.own_servers(light=True),
            Client() as other,
            sockets.locked(name_of_server(other), None) as lock,
        ):
            sockets.name_starter(lock)
            other.do("from flower_gpu.workers.forkserver import program; program.LONGEST_START_S = 1.0")
            message = rf"WorkerStartError.*another process \(pid {os.getpid()}\), for more than 1 s"
            with pytest.raises(forkservers.CallError, match=message):
                other.call("tasks_forkserver:server")

    @pytest.mark.parametrize("kills", [1, 2])
    def test_a_server_that_is_killed_while_it_starts_is_started_once_more(
        self, kills: int, no_server: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The call starts a second server. If it ends too, the call fails. The next call starts a server."""
        start, killed = program._start, []

        def start_and_kill(*arguments: Any) -> int:
            group = start(*arguments)
            if len(killed) < kills:
                killed.append(group)
                os.killpg(group, signal.SIGKILL)
            return group

        monkeypatch.setattr(program, "_start", start_and_kill)
        if kills == 2:
            with pytest.raises(WorkerStartError, match="fork server could not be started: it ended"):
                call_server()
        assert call_server() == only_server().pid


def test_each_hash_seed_has_its_own_server(no_server: None) -> None:
    with Client() as plain, Client(env={"PYTHONHASHSEED": "7"}) as seeded:
        assert plain.call("tasks_forkserver:server") != seeded.call("tasks_forkserver:server")
        assert len(control.status()) == 2
        assert {status.python for status in control.status()} == {sys.executable}
        first = [seeded.call("tasks_forkserver:hashed", "text") for _ in range(2)]
        second = seeded.call("tasks_forkserver:hashed", "text", start_method="spawn")
        assert first == [second, second]
