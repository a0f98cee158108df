"""A caller, the fork server or a worker ends: nothing is left, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forkservers
import pytest
from processes import SHARED_MEMORY, is_running, wait_until, zombies_of
from worker_lines import Caller

from flower_gpu.errors import FlowerGPUError, WorkerDiedError, WorkerTimeoutError
from flower_gpu.workers.call import Call

pytestmark = forkservers.marks(timeout_s=90, own="folder")

# Each call's worker starts a program and forks a child, and hangs.
KILLED = """
    import os, sys, threading, time
    import tasks_lines
    from flower_gpu.workers.call import Call
    from flower_gpu.workers.caller import Line

    way = sys.argv[1]

    def use():
        line = Line()
        line.run(Call("tasks_lines:count"), way, calls=3)
        line.run(Call("tasks_lines:say_family_and_hang"), way, calls=3)

    for _ in range(int(sys.argv[2])):
        threading.Thread(target=use).start()
    idle = Line()
    # in one piece: others write as well
    os.write(1, f"pids {idle.run(Call('os:getpid'), way, calls=2)}\\n".encode())
    time.sleep(600)
"""


@pytest.fixture
def caller() -> Iterator[Caller]:
    caller = Caller()
    caller.run("plain_tasks:answer")
    yield caller
    caller.close()


def waits_for(call: Callable[[], Any], timeout_s: float = 30) -> list[BaseException]:
    """Run a call that must not wait for ever, in a thread; return its error if it failed."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "it waits for ever"
    return errors


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_caller_is_killed(start_method: str, write_script: Callable[[str], Path], tmp_path: Path) -> None:
    calls = 3
    process = subprocess.Popen(
        [sys.executable, str(write_script(KILLED)), start_method, str(calls)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pids: list[int] = []
        for _ in range(calls + 1):
            line = process.stdout.readline()
            assert line.startswith("pids "), line
            pids += map(int, line.split()[1:])
        assert len(set(pids)) == 1 + 3 * calls
        assert all(is_running(pid) for pid in pids)
        process.kill()
        assert wait_until(lambda: not any(is_running(pid) for pid in pids)), [
            pid for pid in pids if is_running(pid)
        ]
    finally:
        process.kill()
        process.communicate()


def test_a_killed_fork_server_costs_no_call(caller: Caller, tmp_path: Path) -> None:
    """Neither the one that runs nor the next one; only how the worker ended is not known."""
    server = caller.server_pid()
    file = tmp_path / "go on"

    def kill(pid: int, _: str) -> None:
        caller.pids.append(pid)
        os.kill(server, signal.SIGKILL)
        file.touch()

    for calls in (1, 2):
        assert caller.run("tasks_lines:wait_for", str(file), calls=calls, on_start=kill)
        assert not is_running(server)
        caller.lines[0].retire()
        file.unlink()
        server = caller.server_pid()


def test_workers_outlive_their_fork_server(caller: Caller) -> None:
    others = [caller.line() for _ in range(3)]
    found = [caller.run("tasks_lines:count", line=line, calls=5)[0] for line in others]
    os.kill(caller.server_pid(), signal.SIGKILL)
    for line, pid in zip(others, found, strict=True):
        assert caller.run("tasks_lines:count", line=line, calls=5) == (pid, 2)
    assert caller.run("tasks_lines:count", line=caller.lines[0], calls=5)[1] == 1


def test_a_stopped_worker_costs_only_its_own_call(caller: Caller, tmp_path: Path) -> None:
    """Others have the same server: that has to stay."""
    server = caller.server_pid()
    other = caller.line()
    file = tmp_path / "go on"
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(caller.run("tasks_lines:wait_for", str(file), line=other))
    )
    thread.start()
    pid, _ = caller.run("tasks_lines:count", calls=10)
    os.kill(pid, signal.SIGSTOP)
    waits_for(lambda: caller.run("tasks_lines:count", calls=10, timeout_s=0.3))
    assert wait_until(lambda: not is_running(pid))
    assert caller.run("tasks_lines:count", calls=10, timeout_s=60)[0] != pid
    file.touch()
    thread.join(30)
    assert answers == [True]
    assert caller.server_pid() == server


def test_workers_that_die_between_calls_are_never_waited_for(caller: Caller) -> None:
    """Whatever the worker has read of the next call by then."""

    def use() -> None:
        for _ in range(100):
            pid, _ = caller.run("tasks_lines:count", calls=10_000)
            os.kill(pid, signal.SIGKILL)

    errors = waits_for(use, 60)
    assert [error for error in errors if not isinstance(error, WorkerDiedError)] == []
    assert caller.run("tasks_lines:count", timeout_s=60)[1] == 1


@pytest.mark.parametrize("way", ["cancel", "time limit", "close"])
def test_semaphores_of_a_worker_that_is_ended_go_with_it(way: str, caller: Caller, tmp_path: Path) -> None:
    """As at a Ctrl-C: its resource tracker, which is in its group, removes their files."""
    file = tmp_path / "name"
    line, hangs = caller.lines[0], not way.startswith("close")
    line.run(Call("tasks_lines:count"), "forkserver", calls=5)
    call = Call("tasks_lines:leave_semaphore", (str(file), hangs))
    if hangs:
        with ThreadPoolExecutor() as pool:
            running = pool.submit(
                line.run, call, "forkserver", timeout_s=5 if way == "time limit" else 60, calls=5
            )
            assert wait_until(lambda: file.exists() and file.read_text() != "")
            if way == "cancel":
                line.cancel()
            assert isinstance(running.exception(), WorkerDiedError | WorkerTimeoutError)
    else:
        line.run(call, "forkserver", calls=5)
        line.close()
    name = file.read_text().removeprefix("/")
    assert wait_until(lambda: not (SHARED_MEMORY / f"sem.{name}").exists())


def test_children_end_with_their_worker(caller: Caller) -> None:
    """Also those of many calls, while another worker lives on: none stays, not even as a zombie."""
    server = caller.server_pid()
    other = caller.line()
    caller.run("tasks_lines:count", line=other, calls=2)
    children = [
        caller.run("tasks_lines:leave_group_of_children", program, calls=2)
        for program in (True, False, True, False)
    ]
    caller.lines[0].retire()
    assert wait_until(lambda: not any(is_running(child) for child in children))
    assert wait_until(lambda: zombies_of(server) == [])
    assert caller.run("tasks_lines:count", line=other, calls=2)[1] == 2


def test_a_fork_does_not_end_the_workers_of_its_parent(caller: Caller) -> None:
    worker, _ = caller.run("tasks_lines:count", calls=5)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert caller.run("tasks_lines:count", calls=5) == (worker, 2)


def test_cancelled_before_there_is_a_worker() -> None:
    """The first call waits for the fork server; who gives it up by then wants no result of it."""
    caller = Caller()
    line = caller.line()
    try:
        threading.Timer(0.01, line.cancel).start()
        errors = waits_for(lambda: caller.run("time:sleep", 600, line=line))
        assert isinstance(errors[0], FlowerGPUError)
    finally:
        caller.close()
