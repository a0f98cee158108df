"""Many calls leave nothing behind, and simultaneous calls of several threads do not disturb each other."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import forkservers
import numpy as np
import pytest
from forkservers import Client, only_server
from processes import (
    SHARED_MEMORY,
    Run,
    all_processes,
    children_of,
    is_running,
    new_in_shared_memory,
    settled,
    wait_until,
    zombies_of,
)
from waiting import until

from flower_gpu import run_in_worker
from flower_gpu.calls import leasing
from flower_gpu.errors import WorkerDiedError
from flower_gpu.workers import messages, own_process
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.forkserver.waiting import Wait
from flower_gpu.workers.own_process import facts

pytestmark = forkservers.marks(timeout_s=300)

THREADS = 8
# Allowed growth of a process after all calls, because of fragmentation. It is small compared to the weights
# that all calls pass.
SLACK_MB = 16


@dataclass(frozen=True)
class Resources:
    """Resources that a process uses."""

    descriptors: int
    resident_mb: float
    maps: int


def resources(pid: int) -> Resources:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    maps = (folder / "maps").read_text().count("\n")
    return Resources(len(list((folder / "fd").iterdir())), int(status["VmRSS"].split()[0]) / 1024, maps)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """Start a server, and make calls until the caches of server and caller are warm."""
    with forkservers.own_servers(light=True):
        call_in_threads(THREADS * 3)
        yield only_server().pid


def call(number: int) -> int:
    """Pass weights of 1 MB to a worker that changes them, and return the pid of its parent."""
    weights = [np.full(1 << 17, float(number))]
    changed, parent = run_in_worker("tasks_forkserver:plus_one", weights, start_method="forkserver")
    assert changed[0][0] == changed[0][-1] == number + 1
    assert isinstance(parent, int)
    return parent


def call_in_threads(calls: int) -> set[int]:
    with ThreadPoolExecutor(THREADS) as pool:
        return set(pool.map(call, range(calls)))


def test_calls_leave_nothing_behind(server: int) -> None:
    caller = os.getpid()
    for pid in (caller, server):
        settled(lambda pid=pid: resources(pid).descriptors)
    before = {pid: resources(pid) for pid in (caller, server)}
    shared = set(SHARED_MEMORY.iterdir())
    processes = {process.pid for process in all_processes() if process.parent in before}
    calls_before = only_server().calls

    assert {call(number) for number in range(25)} == call_in_threads(75) == {server}

    assert only_server().calls == calls_before + 100
    assert wait_until(lambda: resources(server).descriptors <= before[server].descriptors)
    for pid in before:
        assert zombies_of(pid) == []
        assert wait_until(lambda pid=pid: set(children_of(pid)) <= processes), children_of(pid)
        after = resources(pid)
        assert after.descriptors <= before[pid].descriptors
        assert after.resident_mb < before[pid].resident_mb + SLACK_MB, (before[pid], after)
        assert after.maps <= before[pid].maps + 20, (before[pid], after)
    assert wait_until(lambda: not new_in_shared_memory(shared)), new_in_shared_memory(shared)


def test_a_dead_worker_fails_only_its_own_call(start_method: str, run: Run) -> None:
    def call(number: int) -> str:
        try:
            if number % 2:
                return str(run_in_worker("crash_tasks:kill_itself", 9, start_method=start_method))
            return str(run_in_worker("plain_tasks:echo", number, start_method=start_method))
        except WorkerDiedError as error:
            return f"died {error.exitcode}"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(4)))
    assert results == ["(0,)", "died -9", "(2,)", "died -9"]


def test_all_start_methods_can_be_used_at_the_same_time(run: Run) -> None:
    """Events of each thread go to its own call, even if calls share a process."""

    def call(number: int) -> int:
        method = ("forkserver", "spawn", "fork", "in-process")[number % 4]
        return int(run_in_worker("plain_tasks:count_without_length", number, start_method=method))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(12))) == list(range(12))
    last = {line["client"]: line["n"] for line in run.events("progress")}
    assert set(last) == {"server"}
    from flower_gpu.workers import events

    assert events._sink.get() is None
    assert facts.sink is None


def test_a_fork_waits_for_an_import_of_another_thread(run: Run) -> None:
    """The fork does not have that thread, and would wait for the module for ever."""
    sys.modules.pop("slow_import", None)
    with ThreadPoolExecutor(1) as pool:
        imported = pool.submit(importlib.import_module, "slow_import")
        until(lambda: "slow_import" in sys.modules, "the import has begun")
        assert run_in_worker("slow_import:answer", start_method="fork", timeout_s=90) == 42
        imported.result()


def test_a_fork_from_a_pool_ends_silently(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """Its main thread was a thread of the pool. At exit, the fork must not join it."""
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(run_in_worker, "plain_tasks:answer", start_method="fork").result() == 42
    assert "Traceback" not in capfd.readouterr().err


def test_the_environment_can_be_copied_while_calls_change_it() -> None:
    done = threading.Event()

    def set_and_restore() -> None:
        while not done.is_set():
            with own_process.restored_environment(["OF_A_CALL"]):
                os.environ["OF_A_CALL"] = "1"

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(set_and_restore)
        try:
            for number in range(2000):
                assert own_process.environment({"N": str(number)})["N"] == str(number)
        finally:
            done.set()
            sys.setswitchinterval(interval)


def test_calls_in_this_process_restore_its_environment(run: Run) -> None:
    """Calls may begin and end in any order."""
    before = dict(os.environ)
    together = threading.Barrier(8)

    def call(number: int) -> None:
        together.wait(timeout=60)
        for _ in range(5):
            run_in_worker("plain_tasks:echo", number, start_method="in-process", gpu="never")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    kept = {name: os.environ.get(name) for name in before | dict(os.environ)}
    changed = {name for name, value in kept.items() if value != before.get(name)}
    assert changed <= {"OMP_NUM_THREADS"}, "only a variable that a library may have read may stay changed"


def test_a_call_in_this_process_does_not_turn_other_threads_into_workers(run: Run) -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return go_on.wait(60) and leasing.is_worker()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_in_worker, wait, start_method="in-process", gpu="never")
        assert began.wait(60)
        assert not leasing.is_worker()
        assert run_in_worker(leasing.is_worker, start_method="fork", gpu="never")
        go_on.set()
        assert first.result(timeout=90)
    assert not leasing.is_worker()


def test_a_worker_forked_in_such_a_call_is_a_separate_process(run: Run) -> None:
    def fork() -> bool:
        return run_in_worker(own_process.is_inside, start_method="fork", gpu="never") is False

    assert run_in_worker(fork, start_method="in-process", gpu="never")


# Hundreds of simultaneous callers ---------------------------------------------------------------------------

PROCESSES, CALLS_AT_ONCE = 3, 40
# Callers whose limit for an answer is shorter than the time that a server needs for all of them.
IMPATIENT = """
from flower_gpu.workers.forkserver import client, control
client._SAY_S = client._ANSWER_S = control._ANSWER_S = 2.0
"""
CALL_AT_ONCE = """
import threading
answer = []

def work():
    try:
        answer.append(run_in_worker("tasks_forkserver:server"))
    except Exception as error:
        answer.append(f"{{type(error).__name__}}: {{error}}")

threads = [threading.Thread(target=work) for _ in range({threads})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment in which forks are slow enough for a queue to form."""
    folder = tmp_path_factory.mktemp("line") / "venv"
    python = forkservers.make_environment(folder, {})
    (forkservers.site_packages(folder) / "slow.pth").write_text(
        "import sys; 'forkserver.program' in ' '.join(sys.orig_argv) and __import__('slow')\n"
    )
    (forkservers.site_packages(folder) / "slow.py").write_text(
        "import os, time\nfork = os.fork\nos.fork = lambda: (time.sleep(0.02), fork())[1]\n"
    )
    return python


def call_at_once(callers: list[Client]) -> list[int | str]:
    for caller in callers:
        caller.do(IMPATIENT)
        caller.send_code(CALL_AT_ONCE.format(threads=CALLS_AT_ONCE))
    return [server for caller in callers for server in caller.receive()]


def test_hundreds_of_calls_share_a_server_until_it_is_stopped(python: str) -> None:
    with forkservers.own_servers(light=True), ExitStack() as stack:
        callers = [stack.enter_context(Client(python)) for _ in range(PROCESSES)]
        server = callers[0].call("tasks_forkserver:server")
        assert call_at_once(callers) == [server] * (PROCESSES * CALLS_AT_ONCE)
        assert only_server().pid == server
        os.kill(server, signal.SIGSTOP)
        servers = call_at_once(callers[:1])
        assert not is_running(server)
        assert servers == [only_server().pid] * CALLS_AT_ONCE


def test_a_caller_in_the_queue_respects_its_time_limit() -> None:
    connection, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with connection, server_end:
        connection.settimeout(30)
        for _ in range(3):
            messages.send(server_end, messages.BUSY)
        with pytest.raises(TimeoutError, match="serves other callers first"):
            client._ask_or_end("0" * 20, connection, {"op": "open"}, [], time.monotonic() - 1, Wait())
        assert connection.fileno() == -1
