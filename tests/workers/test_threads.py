"""Many calls: from several threads at once, and one after the other."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from traced import Run

from flower_gpu import run_in_worker
from flower_gpu.calls import leasing
from flower_gpu.errors import WorkerDiedError
from flower_gpu.workers import own_calls

pytestmark = pytest.mark.timeout(120)

# Spawned ones are among those of all start methods at once.
several_at_once = pytest.mark.parametrize("start_method", ["forkserver", "fork"])


@several_at_once
def test_eight_threads_at_once(start_method: str, run: Run) -> None:
    together = threading.Barrier(8)

    def call(number: int) -> tuple[float, int]:
        weights = [np.full((100, 100), number, dtype=np.float32), np.array(number)]
        together.wait(timeout=30)
        results = []
        for _ in range(2):
            big, small = run_in_worker("plain_tasks:echo", *weights, start_method=start_method)
            results.append((float(big.mean()), int(small)))
        assert len(set(results)) == 1
        return results[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == [(number, number) for number in range(8)]
    assert len(set(run.pids())) == 16


@several_at_once
def test_one_death_fails_one_call(start_method: str, run: Run) -> None:
    def call(number: int) -> str:
        try:
            if number % 2:
                return str(run_in_worker("crash_tasks:kill_itself", 9, start_method=start_method))
            return str(run_in_worker("plain_tasks:echo", number, start_method=start_method))
        except WorkerDiedError as error:
            return f"died {error.exitcode}"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(16)))
    assert results == [f"({number},)" if number % 2 == 0 else "died -9" for number in range(16)]


def test_both_start_methods_and_calls_in_this_process_at_once(run: Run) -> None:
    """Each thread's events go to its own call, also of calls that share the process."""

    def call(number: int) -> int:
        method = ("forkserver", "spawn", "fork", "in-process", "inline")[number % 5]
        return int(run_in_worker("plain_tasks:count_without_length", number, start_method=method))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(24))) == list(range(24))
    last = {line["client"]: line["n"] for line in run.events("progress")}
    assert set(last) == {"server"}
    from flower_gpu.workers import events

    assert events._sink.get() is None
    assert events._sink_of_process is None


def test_calls_in_this_process_leave_its_environment_as_it_was(run: Run) -> None:
    """Also where they begin and end in any order."""
    before = dict(os.environ)
    together = threading.Barrier(8)

    def call(number: int) -> None:
        together.wait(timeout=30)
        for turn in range(20):
            method = ("in-process", "inline")[(number + turn) % 2]
            run_in_worker("plain_tasks:echo", number, start_method=method, gpu="never")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    kept = {name: os.environ.get(name) for name in before | dict(os.environ)}
    changed = {name for name, value in kept.items() if value != before.get(name)}
    assert changed <= {"OMP_NUM_THREADS"}, "what a library may have read by now"


def test_a_call_in_this_process_makes_no_worker_of_the_others(run: Run) -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return go_on.wait(30) and leasing.is_worker()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_in_worker, wait, start_method="in-process", gpu="never")
        assert began.wait(30)
        assert not leasing.is_worker()
        assert run_in_worker(leasing.is_worker, start_method="fork", gpu="never")
        go_on.set()
        assert first.result(timeout=30)
    assert not leasing.is_worker()


def test_a_worker_that_is_forked_in_such_a_call_is_a_process_of_its_own(run: Run) -> None:
    def fork() -> bool:
        return run_in_worker(own_calls.is_inside, start_method="fork", gpu="never") is False

    assert run_in_worker(fork, start_method="in-process", gpu="never")
