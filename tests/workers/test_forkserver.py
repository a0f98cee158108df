"""The life of a fork server: who starts it, who may use it, when it ends, what replaces it."""

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
from forkservers import Client, only_server, until_only
from processes import all_processes, children_of, is_running, wait_until

from flower_gpu import WorkerDiedError, run_in_worker
from flower_gpu.errors import WorkerStartError
from flower_gpu.workers.forkserver import client, control, program, sockets

pytestmark = forkservers.marks(own="folder")

FORKSERVER = {"start_method": "forkserver"}


@pytest.fixture
def no_server() -> None:
    control.stop(wait_s=20)
    forkservers.leave()
    assert control.status() == []


def call() -> int:
    """Call in this process; returns the pid of the server."""
    server = run_in_worker("tasks_forkserver:server", **FORKSERVER)
    assert isinstance(server, int)
    return server


def name_of_server(caller: Client) -> str:
    """Return the name of a caller's server, which has been ended."""
    caller.call("tasks_forkserver:server")
    name = only_server().name
    control.stop(wait_s=20)
    return name


class TestOneForAll:
    def test_clients_at_the_same_moment_start_one_server(self, no_server: None) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client()) for _ in range(4)]
            for each in clients:
                each.do("pass")  # it is up
            for each in clients:
                each.send("tasks_forkserver:server")
            (server,) = {each.receive() for each in clients}
            status = only_server()
            assert (status.pid, status.calls, status.users) == (server, 4, 4)
            parent = next(process.parent for process in all_processes() if process.pid == server)
            assert parent not in [os.getpid(), *(each.pid for each in clients)]
            assert os.getsid(server) not in {os.getsid(each.pid) for each in clients}
            for each in clients:
                assert children_of(each.pid) == []
                assert each.do("answer = [name for name in sys.modules if name.startswith('torch')]") == []
            for each in clients[:3]:  # one of them has started it
                each.kill()
            assert clients[3].call("tasks_forkserver:server") == server
        assert until_only(lambda status: status.users == 0).pid == server

    def test_a_fork_of_a_client_is_a_client(self) -> None:
        with Client() as forking:
            server = forking.call("tasks_forkserver:server")
            before = only_server().users
            in_fork = forking.do(
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
            assert forking.call("tasks_forkserver:server") == server
            assert until_only(lambda status: status.users == before).pid == server


class TestEnd:
    def test_it_ends_when_nobody_has_a_use_for_it(self) -> None:
        with forkservers.own_servers(idle_s=0.5, light=True) as folder:
            with Client() as using:
                server = using.call("tasks_forkserver:server")
                with pytest.raises(AssertionError):  # it stays although its client does nothing
                    assert wait_until(lambda: not is_running(server), timeout_s=2)
                assert only_server().users == 1
                assert len(list(folder.glob("*.socket"))) == 1
            assert wait_until(lambda: not is_running(server))
            assert list(folder.glob("*.socket")) == []
            assert control.status() == []
            assert call() != server

    def test_its_workers_come_to_their_end_when_it_is_told_to(self, no_server: None, tmp_path: Path) -> None:
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
            other = call()  # while the old one waits for its workers
            assert is_running(server.pid)
            go.touch()
            assert {each.result() for each in running} == {server.pid} != {other}
        assert wait_until(lambda: not is_running(server.pid))
        assert only_server().pid == other


class TestReplacement:
    def test_killed_while_workers_run(self, tmp_path: Path) -> None:
        """They return what they have to, and a crash of theirs is still one."""
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
            assert "how is not known (the fork server that forked it was ended" in str(caught.value)
        assert call() != server

    def test_one_that_hangs(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """The user is told what is waited for."""
        monkeypatch.setattr(client, "_SAY_S", 0.1)
        monkeypatch.setattr(client, "_ANSWER_S", 0.5)
        monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
        server = call()
        os.kill(server, signal.SIGSTOP)
        assert call() != server
        assert not is_running(server)
        assert f"the fork server (pid {server}) has not answered for 0.1 s: it is stopped" in caplog.text

    def test_one_that_hangs_and_cannot_be_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another one takes its place, although its socket still takes connections."""
        monkeypatch.setattr(client, "_SAY_S", 0.1)
        monkeypatch.setattr(client, "_ANSWER_S", 0.5)
        monkeypatch.setattr(client, "KILLED_S", 0.1)
        server = call()
        os.kill(server, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
            assert call() != server
        assert is_running(server)
        os.kill(server, signal.SIGKILL)

    def test_one_that_hangs_between_finding_and_forking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "_SAY_S", 0.1)
        monkeypatch.setattr(client, "_ANSWER_S", 0.5)
        fork, stopped = client.ServerPlace.fork, []

        def stop_and_fork(*args: object) -> client.ForkedWorker:
            if not stopped:
                stopped.append(only_server().pid)
                os.kill(stopped[0], signal.SIGSTOP)
            return fork(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(client.ServerPlace, "fork", stop_and_fork)
        assert call() not in stopped
        assert not is_running(stopped[0])

    def test_one_whose_folder_was_removed(self, tmp_path: Path) -> None:
        with forkservers.own_servers(light=True) as folder:
            server = call()
            folder.rename(tmp_path / "elsewhere")
            assert call() != server
            forkservers.leave()
            assert wait_until(lambda: not is_running(server))

    def test_one_that_is_stuck_in_its_start(self) -> None:
        """It ends by itself, also if its starter is gone; other callers say what they wait for."""
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

    def test_one_whose_start_does_not_come_to_an_end(self) -> None:
        """No caller waits for ever, for example where the starter was stopped."""
        with (
            forkservers.own_servers(light=True),
            Client() as other,
            sockets.locked(name_of_server(other), None) as lock,
        ):
            sockets.name_starter(lock)
            other.do("from flower_gpu.workers.forkserver import program; program.LONGEST_START_S = 1.0")
            says = rf"WorkerStartError.*another process \(pid {os.getpid()}\), for more than 1 s"
            with pytest.raises(forkservers.CallError, match=says):
                other.call("tasks_forkserver:server")

    @pytest.mark.parametrize("kills", [1, 2])
    def test_one_that_is_killed_while_it_starts(
        self, kills: int, no_server: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who waits for it starts another, once; then it is told, and the next call starts one."""
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
                call()
        assert call() == only_server().pid


def test_two_seeds_of_the_hash_have_two_servers(no_server: None) -> None:
    with Client() as plain, Client(env={"PYTHONHASHSEED": "7"}) as seeded:
        assert plain.call("tasks_forkserver:server") != seeded.call("tasks_forkserver:server")
        assert len(control.status()) == 2
        assert {status.python for status in control.status()} == {sys.executable}
        first = [seeded.call("tasks_forkserver:hashed", "text") for _ in range(2)]
        second = seeded.call("tasks_forkserver:hashed", "text", start_method="spawn")
        assert first == [second, second]
