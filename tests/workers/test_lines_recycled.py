"""A worker that runs several calls, and what these calls share."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import forkservers
import numpy as np
import pytest
from phases import without_phases
from processes import is_running, wait_until
from worker_lines import Caller, descriptors_of, resident_bytes

from flower_gpu.errors import WorkerDiedError

pytestmark = forkservers.marks()

#: Number of array elements, large enough for the array to be mapped instead of copied.
LARGE = 400_000


@pytest.fixture(scope="module", params=["forkserver", "fork"])
def module_caller(request: pytest.FixtureRequest) -> Iterator[Caller]:
    with forkservers.own_servers(light=True):
        caller = Caller(request.param, setup="flower_gpu.workers.threads:apply", env={"OMP_NUM_THREADS": "1"})
        yield caller
        caller.close()


@pytest.fixture
def caller(module_caller: Caller) -> Iterator[Caller]:
    yield module_caller
    for line in module_caller.lines:
        line.retire()


def test_a_worker_runs_the_allowed_number_of_calls(caller: Caller) -> None:
    results = [caller.run("tasks_lines:count", calls=3) for _ in range(7)]
    assert [calls for _, calls in results] == [1, 2, 3, 1, 2, 3, 1]
    assert len({pid for pid, _ in results}) == 3
    assert caller.lines[0].has_worker
    # A call with calls=1 may use the present worker, which then ends.
    assert caller.run("tasks_lines:count") == (results[-1][0], 2)
    assert not caller.lines[0].has_worker
    assert caller.run("tasks_lines:count")[1] == 1


@pytest.mark.parametrize(
    ("task", "arguments", "error", "text"),
    [
        ("value_error", (), ValueError, "."),
        ("system_exit", (0,), WorkerDiedError, r"code 0 \(sys.exit in crash_tasks.py, line \d+\)"),
        ("kill_itself", (9,), WorkerDiedError, "killed by SIGKILL"),
    ],
)
def test_a_failed_call_does_not_affect_the_next_call(
    task: str, arguments: tuple[int, ...], error: type[Exception], text: str, caller: Caller
) -> None:
    first = caller.run("tasks_lines:count", calls=10)
    assert caller.run("tasks_lines:count", calls=10) == (first[0], 2)
    with pytest.raises(error, match=text):
        caller.run(f"crash_tasks:{task}", *arguments, calls=10)
    pid, calls = caller.run("tasks_lines:count", calls=10)
    assert pid != first[0]
    assert calls == 1
    assert wait_until(lambda: not is_running(first[0]))


def test_a_stopped_worker_can_be_retired(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.workers.call_watch.EXIT_GRACE_S", 0.3)
    pid, _ = caller.run("tasks_lines:count", calls=100)
    os.kill(pid, signal.SIGSTOP)
    caller.lines[0].retire()
    assert wait_until(lambda: not is_running(pid))
    assert caller.run("tasks_lines:count", calls=100)[1] == 1


def test_a_call_with_other_variables_gets_another_worker(caller: Caller) -> None:
    first = caller.run("tasks_lines:count", calls=10, env={"OF_TEST": "1"})
    assert caller.run("os:getenv", "OF_TEST", calls=10, env={"OF_TEST": "1"}) == "1"
    assert caller.run("os:getenv", "OF_TEST", calls=10, env={"OF_TEST": "2"}) == "2"
    assert caller.run("os:getenv", "OF_TEST", calls=10) is None
    assert wait_until(lambda: not is_running(first[0]))


def test_arguments_that_a_module_keeps_are_not_overwritten(caller: Caller) -> None:
    """Neither side reuses the memory of earlier requests and replies."""
    returned, expected = [], []
    for number in range(6):
        argument = np.full(LARGE, float(number))
        sums = caller.run("tasks_lines:keep", argument, calls=100)
        argument[:] = -1.0  # This must not change the worker's copy.
        expected.append(float(number) * LARGE)
        assert sums == expected
    caller.lines[0].retire()
    for number in range(6):
        result = caller.run("tasks_lines:keep_and_change", np.full(LARGE, float(number)), 0.5, calls=100)
        assert result.flags.writeable
        returned.append(result)
        # Changes that the worker makes to arguments of earlier calls must not be visible here.
        assert [float(array[0]) for array in returned] == [n + 0.5 for n in range(number + 1)]
        assert all((array == array[0]).all() for array in returned)
    returned[0][:] = 7.0
    assert float(caller.run("tasks_lines:keep_and_change", np.zeros(LARGE), 0.0, calls=100)[0]) == 0.0
    assert [float(array[0]) for array in returned] == [7.0] + [n + 0.5 for n in range(1, 6)]


def test_each_call_gets_the_model_that_it_was_sent(caller: Caller) -> None:
    """A model that is sent again and again is written only once."""
    for round_ in range(2):
        model = np.full(LARGE, float(round_)).tobytes()
        for _ in range(4):
            (returned,) = caller.run("plain_tasks:echo", model, calls=3)
            assert returned == model


def test_late_events_of_a_call_do_not_disturb_later_calls(caller: Caller) -> None:
    """A thread that a call left behind sends events during later calls."""
    received: list[dict[str, Any]] = []
    caller.run("tasks_lines:chatter_later", 100, calls=100)
    for _ in range(20):
        assert (
            caller.run("plain_tasks:answer", calls=100, on_event=without_phases(received), timeout_s=90) == 42
        )


def test_the_memory_of_a_worker_does_not_grow(caller: Caller) -> None:
    pid = None

    def use(times: int) -> list[int]:
        nonlocal pid
        for _ in range(times):
            caller.run("plain_tasks:echo", np.zeros(LARGE), calls=10_000)
        pid = caller.pids[-1]
        return [descriptors_of(pid), resident_bytes(pid)]

    before, after = use(20), use(80)
    assert len({caller.pids[-1], caller.pids[-100], pid}) == 1
    assert after[0] == before[0]
    assert after[1] - before[1] < 8 << 20


def test_cancel_ends_the_running_call(caller: Caller, tmp_path: Any) -> None:
    file = tmp_path / "pid"

    def cancel() -> None:
        assert wait_until(file.exists)
        caller.lines[0].cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(WorkerDiedError):
        caller.run("tasks_lines:say_pid_and_hang", str(file), calls=100)
    thread.join()
    assert wait_until(lambda: not is_running(int(file.read_text())))
    assert caller.run("tasks_lines:count", calls=100)[1] == 1
