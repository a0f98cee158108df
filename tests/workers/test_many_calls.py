"""Many calls: they leave nothing behind, and those of several threads at once do not disturb each other."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import forkservers
import numpy as np
import pytest
from forkservers import only_server
from processes import (
    SHARED_MEMORY,
    Run,
    all_processes,
    children_of,
    new_in_shared_memory,
    wait_until,
    zombies_of,
)
from waiting import until

from flower_gpu import run_in_worker
from flower_gpu.calls import leasing
from flower_gpu.errors import WorkerDiedError
from flower_gpu.workers import own_process
from flower_gpu.workers.own_process import facts

pytestmark = forkservers.marks()

THREADS = 8
# What a process may have more after all of them: fragments, a small part of what one call passes.
SLACK_MB = 16


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    resident_mb: float
    maps: int


def held(pid: int) -> Held:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    maps = (folder / "maps").read_text().count("\n")
    return Held(len(list((folder / "fd").iterdir())), int(status["VmRSS"].split()[0]) / 1024, maps)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """A server that has settled, and a caller whose caches are warm."""
    with forkservers.own_servers(light=True):
        call_in_threads(THREADS * 3)
        yield only_server().pid


def call(number: int) -> int:
    """Pass weights of 1 MB, and have them changed; return the process that forked the worker."""
    weights = [np.full(1 << 17, float(number))]
    changed, parent = run_in_worker("tasks_forkserver:plus_one", weights, start_method="forkserver")
    assert changed[0][0] == changed[0][-1] == number + 1
    assert isinstance(parent, int)
    return parent


def call_in_threads(calls: int) -> set[int]:
    with ThreadPoolExecutor(THREADS) as pool:
        return set(pool.map(call, range(calls)))


def test_nothing_is_left(server: int) -> None:
    caller = os.getpid()
    before = {pid: settled(pid) for pid in (caller, server)}
    shared = set(SHARED_MEMORY.iterdir())
    processes = {process.pid for process in all_processes() if process.parent in before}
    calls_before = only_server().calls

    assert {call(number) for number in range(25)} == call_in_threads(75) == {server}

    assert only_server().calls == calls_before + 100
    assert wait_until(lambda: held(server).descriptors <= before[server].descriptors)
    for pid in before:
        assert zombies_of(pid) == []
        assert wait_until(lambda pid=pid: set(children_of(pid)) <= processes), children_of(pid)
        after = held(pid)
        assert after.descriptors <= before[pid].descriptors
        assert after.resident_mb < before[pid].resident_mb + SLACK_MB, (before[pid], after)
        assert after.maps <= before[pid].maps + 20, (before[pid], after)
    assert wait_until(lambda: not new_in_shared_memory(shared)), new_in_shared_memory(shared)


def settled(pid: int) -> Held:
    """Return what a process holds, once it has got rid of what earlier calls left for a moment."""
    seen = [held(pid).descriptors]

    def is_settled() -> bool:
        threading.Event().wait(0.05)
        seen.append(held(pid).descriptors)
        return seen[-1] == seen[-2]

    assert wait_until(is_settled)
    return held(pid)


def test_one_death_fails_one_call(start_method: str, run: Run) -> None:
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


def test_both_start_methods_and_calls_in_this_process_at_once(run: Run) -> None:
    """Each thread's events go to its own call, also of calls that share the process."""

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


def test_a_fork_waits_for_what_another_thread_imports(run: Run) -> None:
    """In a fork there is no such thread: it would wait for the module for ever."""
    sys.modules.pop("slow_import", None)
    with ThreadPoolExecutor(1) as pool:
        imported = pool.submit(importlib.import_module, "slow_import")
        until(lambda: "slow_import" in sys.modules, "the import has begun")
        assert run_in_worker("slow_import:answer", start_method="fork", timeout_s=90) == 42
        imported.result()


def test_a_fork_from_a_pool_ends_without_a_word(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """It has the thread that called it, and must not join that as one of the pool's."""
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(run_in_worker, "plain_tasks:answer", start_method="fork").result() == 42
    assert "Traceback" not in capfd.readouterr().err


def test_the_environment_can_be_copied_while_calls_set_theirs() -> None:
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


def test_calls_in_this_process_leave_its_environment_as_it_was(run: Run) -> None:
    """Also where they begin and end in any order."""
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
    assert changed <= {"OMP_NUM_THREADS"}, "what a library may have read by now"


def test_a_call_in_this_process_makes_no_worker_of_the_others(run: Run) -> None:
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


def test_a_worker_that_is_forked_in_such_a_call_is_a_process_of_its_own(run: Run) -> None:
    def fork() -> bool:
        return run_in_worker(own_process.is_inside, start_method="fork", gpu="never") is False

    assert run_in_worker(fork, start_method="in-process", gpu="never")
