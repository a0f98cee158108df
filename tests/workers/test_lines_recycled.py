"""A worker that runs several calls: what they share, and what they do not."""

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

LARGE = 400_000  # numbers: enough to be mapped and not copied


@pytest.fixture(scope="module", params=["forkserver", "fork"])
def of_module(request: pytest.FixtureRequest) -> Iterator[Caller]:
    with forkservers.own_servers(light=True):
        caller = Caller(request.param, setup="flower_gpu.workers.threads:apply", env={"OMP_NUM_THREADS": "1"})
        yield caller
        caller.close()


@pytest.fixture
def caller(of_module: Caller) -> Iterator[Caller]:
    yield of_module
    for line in of_module.lines:
        line.retire()


def test_a_worker_runs_as_many_calls_as_it_may(caller: Caller) -> None:
    found = [caller.run("tasks_lines:count", calls=3) for _ in range(7)]
    assert [calls for _, calls in found] == [1, 2, 3, 1, 2, 3, 1]
    assert len({pid for pid, _ in found}) == 3
    assert caller.lines[0].has_worker
    # Who wants a worker that runs one call gets it after this one at the latest.
    assert caller.run("tasks_lines:count") == (found[-1][0], 2)
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
def test_a_failed_call_costs_only_itself(
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


def test_a_stopped_worker_can_be_let_go(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.workers.started_worker.EXIT_GRACE_S", 0.3)
    pid, _ = caller.run("tasks_lines:count", calls=100)
    os.kill(pid, signal.SIGSTOP)
    caller.lines[0].retire()
    assert wait_until(lambda: not is_running(pid))
    assert caller.run("tasks_lines:count", calls=100)[1] == 1


def test_other_variables_need_another_worker(caller: Caller) -> None:
    first = caller.run("tasks_lines:count", calls=10, env={"OF_TEST": "1"})
    assert caller.run("os:getenv", "OF_TEST", calls=10, env={"OF_TEST": "1"}) == "1"
    assert caller.run("os:getenv", "OF_TEST", calls=10, env={"OF_TEST": "2"}) == "2"
    assert caller.run("os:getenv", "OF_TEST", calls=10) is None
    assert wait_until(lambda: not is_running(first[0]))


def test_arguments_that_a_module_keeps_stay_as_they_are(caller: Caller) -> None:
    """The memory of earlier requests and replies is theirs for good, on both sides."""
    returned, expected = [], []
    for number in range(6):
        argument = np.full(LARGE, float(number))
        sums = caller.run("tasks_lines:keep", argument, calls=100)
        argument[:] = -1.0  # the caller's own from here on
        expected.append(float(number) * LARGE)
        assert sums == expected
    caller.lines[0].retire()
    for number in range(6):
        result = caller.run("tasks_lines:keep_and_change", np.full(LARGE, float(number)), 0.5, calls=100)
        assert result.flags.writeable
        returned.append(result)
        # What the worker does to the arguments of earlier calls does not come through.
        assert [float(one[0]) for one in returned] == [n + 0.5 for n in range(number + 1)]
        assert all((one == one[0]).all() for one in returned)
    returned[0][:] = 7.0
    assert float(caller.run("tasks_lines:keep_and_change", np.zeros(LARGE), 0.0, calls=100)[0]) == 0.0
    assert [float(one[0]) for one in returned] == [7.0] + [n + 0.5 for n in range(1, 6)]


def test_a_shared_model_in_many_calls(caller: Caller) -> None:
    """What is sent again and again is written once; each call sees the model that it was sent."""
    for round_ in range(2):
        model = np.full(LARGE, float(round_)).tobytes()
        for _ in range(4):
            (seen,) = caller.run("plain_tasks:echo", model, calls=3)
            assert seen == model


def test_late_events_of_a_call_end_nothing(caller: Caller) -> None:
    """A thread that a call left behind goes on to send while others run."""
    seen: list[dict[str, Any]] = []
    caller.run("tasks_lines:chatter_later", 100, calls=100)
    for _ in range(20):
        assert caller.run("plain_tasks:answer", calls=100, on_event=without_phases(seen), timeout_s=90) == 42


def test_one_worker_does_not_grow(caller: Caller) -> None:
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


def test_cancel_ends_the_call_that_runs(caller: Caller, tmp_path: Any) -> None:
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
