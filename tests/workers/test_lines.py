"""Calls on a line of workers: they behave like calls that have their own worker, also if something ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forkservers
import numpy as np
import pytest
from phases import without_phases
from processes import SHARED_MEMORY, descriptors, is_running, running_in_groups, wait_until, zombies_of
from worker_lines import Caller, descriptors_of, resident_bytes, settled

from flower_gpu.errors import FlowerGPUError, WorkerDiedError

pytestmark = forkservers.marks(fixture="folder")


@pytest.fixture(scope="module")
def module_caller(folder: Path) -> Iterator[Caller]:
    caller = Caller()
    caller.run("plain_tasks:answer")
    yield caller
    caller.close()


@pytest.fixture
def caller(module_caller: Caller) -> Iterator[Caller]:
    """All tests share a server and a line. After each test nothing is left, and the line still works."""
    server = module_caller.server_pid()
    before, server_descriptors = descriptors(), descriptors_of(server)
    module_caller.pids.clear()
    yield module_caller
    module_caller.lines[0].retire()
    assert wait_until(lambda: not running_in_groups(*module_caller.pids)), running_in_groups(
        *module_caller.pids
    )
    assert module_caller.run("plain_tasks:answer", timeout_s=90) == 42
    assert module_caller.server_pid() == server
    assert len(descriptors()) <= len(before), (before, descriptors())
    assert settled(lambda: descriptors_of(server), server_descriptors)
    assert settled(lambda: len(zombies_of(server)), 0)


@contextmanager
def cancelled_when(condition: Callable[[], bool], caller: Caller) -> Iterator[None]:
    """Cancel the call that runs in the block on the caller's first line, once a condition holds."""

    def cancel() -> None:
        assert wait_until(condition)
        caller.lines[0].cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(WorkerDiedError):
        yield
    thread.join()


@pytest.mark.parametrize("task", ["never_ends_its_thread", "never_ends_at_exit"])
def test_a_worker_that_hangs_at_its_exit_returns_its_result(
    task: str, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_gpu.workers.call_watch.EXIT_GRACE_S", 0.3)
    assert caller.run(f"plain_tasks:{task}") == 42
    assert caller.run(f"plain_tasks:{task}", calls=2) == 42
    caller.lines[0].retire()  # It must not wait for the worker.


@pytest.mark.parametrize("task", ["never_ends_its_thread", "never_ends_at_exit"])
def test_the_next_call_does_not_wait_for_a_worker_that_hangs_at_its_exit(
    task: str, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_gpu.workers.call_watch.EXIT_GRACE_S", 60.0)
    monkeypatch.setattr("flower_gpu.workers.call_watch.WAIT_FOR_EXIT_S", 0.1)
    hanging: list[int] = []
    try:
        for _ in range(3):
            on_start = lambda pid, _: hanging.append(pid)  # noqa: E731
            assert caller.run(f"plain_tasks:{task}", on_start=on_start) == 42
        assert len(set(hanging)) == 3 and all(map(is_running, hanging))
    finally:
        for pid in hanging:
            os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_running, hanging)))
    assert wait_until(lambda: "flower-gpu-leaving" not in [thread.name for thread in threading.enumerate()])


def test_a_worker_inherits_no_descriptors_of_other_lines(caller: Caller) -> None:
    others = [caller.line() for _ in range(3)]
    try:
        before = len(caller.run("tasks_lines:descriptors"))
        for line in others:
            caller.run("plain_tasks:answer", line=line, calls=2)
        open_files = caller.run("tasks_lines:descriptors")
        assert len(open_files) == before, open_files
    finally:
        for line in others:
            line.close()
            caller.lines.remove(line)


def test_events_arrive_completely_and_in_order(caller: Caller) -> None:
    """They may be long, and may come from threads and children."""
    received: list[dict[str, Any]] = []
    on_event = without_phases(received)
    assert caller.run("tasks_lines:chatter", 2000, 10, on_event=on_event, calls=2) == 2000
    assert [event["number"] for event in received if event["event"] == "chatter"] == list(range(2000))
    received.clear()
    assert caller.run("tasks_lines:chatter_everywhere", 200, on_event=on_event) == len(received) == 1000
    assert caller.run("tasks_lines:chatter", 3, 300_000, on_event=on_event, timeout_s=90) == 3
    received.clear()
    caller.run("tasks_lines:send_a_path", on_event=on_event)
    assert received == [{"event": "saved", "path": "/somewhere"}]


@pytest.mark.parametrize("callback", ["on_event", "on_start"])
def test_an_error_in_a_callback_ends_the_worker(callback: str, caller: Caller) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    pid = caller.run("os:getpid", calls=100)
    with pytest.raises(OSError, match="no space left"):
        caller.run("tasks_lines:chatter", 3, 10, calls=100, **{callback: fail})
    assert wait_until(lambda: not is_running(pid))
    for number in range(3):
        assert caller.run("plain_tasks:echo", number, calls=100, timeout_s=90) == (number,)


def test_a_worker_that_closed_its_stream_gets_no_more_calls(caller: Caller) -> None:
    assert caller.run("tasks_lines:close_stdout_object", calls=5) == 42
    assert not caller.lines[0].has_worker


# Workers that run several calls -----------------------------------------------------------------------------

#: Number of array elements, large enough for the array to be mapped instead of copied.
LARGE = 400_000


@pytest.fixture(scope="module", params=["forkserver", "fork"])
def module_recycler(request: pytest.FixtureRequest, folder: Path) -> Iterator[Caller]:
    caller = Caller(request.param, setup="flower_gpu.workers.threads:apply", env={"OMP_NUM_THREADS": "1"})
    yield caller
    caller.close()


@pytest.fixture
def recycler(module_recycler: Caller) -> Iterator[Caller]:
    """A caller whose workers run several calls. Each test begins without a worker."""
    yield module_recycler
    for line in module_recycler.lines:
        line.retire()


def test_a_worker_runs_the_allowed_number_of_calls(recycler: Caller) -> None:
    results = [recycler.run("tasks_lines:count", calls=3) for _ in range(7)]
    assert [calls for _, calls in results] == [1, 2, 3, 1, 2, 3, 1]
    assert len({pid for pid, _ in results}) == 3
    assert recycler.lines[0].has_worker
    # A call with calls=1 may use the present worker, which then ends.
    assert recycler.run("tasks_lines:count") == (results[-1][0], 2)
    assert not recycler.lines[0].has_worker
    assert recycler.run("tasks_lines:count")[1] == 1


@pytest.mark.parametrize(
    ("task", "arguments", "error", "text"),
    [
        ("value_error", (), ValueError, "."),
        ("system_exit", (0,), WorkerDiedError, r"code 0 \(sys.exit in crash_tasks.py, line \d+\)"),
        ("kill_itself", (9,), WorkerDiedError, "killed by SIGKILL"),
    ],
)
def test_a_failed_call_does_not_affect_the_next_call(
    task: str, arguments: tuple[int, ...], error: type[Exception], text: str, recycler: Caller
) -> None:
    first = recycler.run("tasks_lines:count", calls=10)
    assert recycler.run("tasks_lines:count", calls=10) == (first[0], 2)
    with pytest.raises(error, match=text):
        recycler.run(f"crash_tasks:{task}", *arguments, calls=10)
    pid, calls = recycler.run("tasks_lines:count", calls=10)
    assert pid != first[0]
    assert calls == 1
    assert wait_until(lambda: not is_running(first[0]))


def test_a_stopped_worker_can_be_retired(recycler: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.workers.call_watch.EXIT_GRACE_S", 0.3)
    pid, _ = recycler.run("tasks_lines:count", calls=100)
    os.kill(pid, signal.SIGSTOP)
    recycler.lines[0].retire()
    assert wait_until(lambda: not is_running(pid))
    assert recycler.run("tasks_lines:count", calls=100)[1] == 1


def test_a_call_with_other_variables_gets_another_worker(recycler: Caller) -> None:
    first = recycler.run("tasks_lines:count", calls=10, env={"OF_TEST": "1"})
    assert recycler.run("os:getenv", "OF_TEST", calls=10, env={"OF_TEST": "1"}) == "1"
    assert recycler.run("os:getenv", "OF_TEST", calls=10, env={"OF_TEST": "2"}) == "2"
    assert recycler.run("os:getenv", "OF_TEST", calls=10) is None
    assert wait_until(lambda: not is_running(first[0]))


def test_arguments_that_a_module_keeps_are_not_overwritten(recycler: Caller) -> None:
    """Neither side reuses the memory of earlier requests and replies."""
    returned, expected = [], []
    for number in range(6):
        argument = np.full(LARGE, float(number))
        sums = recycler.run("tasks_lines:keep", argument, calls=100)
        argument[:] = -1.0  # This must not change the worker's copy.
        expected.append(float(number) * LARGE)
        assert sums == expected
    recycler.lines[0].retire()
    for number in range(6):
        result = recycler.run("tasks_lines:keep_and_change", np.full(LARGE, float(number)), 0.5, calls=100)
        assert result.flags.writeable
        returned.append(result)
        # Changes that the worker makes to arguments of earlier calls must not be visible here.
        assert [float(array[0]) for array in returned] == [n + 0.5 for n in range(number + 1)]
        assert all((array == array[0]).all() for array in returned)
    returned[0][:] = 7.0
    assert float(recycler.run("tasks_lines:keep_and_change", np.zeros(LARGE), 0.0, calls=100)[0]) == 0.0
    assert [float(array[0]) for array in returned] == [7.0] + [n + 0.5 for n in range(1, 6)]


def test_each_call_gets_the_model_that_it_was_sent(recycler: Caller) -> None:
    """A model that is sent again and again is written only once."""
    for round_ in range(2):
        model = np.full(LARGE, float(round_)).tobytes()
        for _ in range(4):
            (returned,) = recycler.run("plain_tasks:echo", model, calls=3)
            assert returned == model


def test_late_events_of_a_call_do_not_disturb_later_calls(recycler: Caller) -> None:
    """A thread that a call left behind sends events during later calls."""
    recycler.run("tasks_lines:chatter_later", 100, calls=100)
    for _ in range(20):
        result = recycler.run("plain_tasks:answer", calls=100, on_event=lambda _: None, timeout_s=90)
        assert result == 42


def test_the_memory_of_a_worker_does_not_grow(recycler: Caller) -> None:
    pid = None

    def use(times: int) -> list[int]:
        nonlocal pid
        for _ in range(times):
            recycler.run("plain_tasks:echo", np.zeros(LARGE), calls=10_000)
        pid = recycler.pids[-1]
        return [descriptors_of(pid), resident_bytes(pid)]

    before, after = use(20), use(80)
    assert len({recycler.pids[-1], recycler.pids[-100], pid}) == 1
    assert after[0] == before[0]
    assert after[1] - before[1] < 8 << 20


def test_cancel_ends_the_running_call(recycler: Caller, tmp_path: Any) -> None:
    file = tmp_path / "pid"
    with cancelled_when(file.exists, recycler):
        recycler.run("tasks_lines:say_pid_and_hang", str(file), calls=100)
    assert wait_until(lambda: not is_running(int(file.read_text())))
    assert recycler.run("tasks_lines:count", calls=100)[1] == 1


# Callers, fork servers and workers that end -----------------------------------------------------------------


@pytest.fixture
def new_caller() -> Iterator[Caller]:
    caller = Caller()
    caller.run("plain_tasks:answer")
    yield caller
    caller.close()


def run_with_limit(call: Callable[[], Any], timeout_s: float = 90) -> list[BaseException]:
    """Run a call in a thread, fail if it does not end in time, and return its error, if any."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "the call has not ended in time"
    return errors


def test_workers_outlive_their_fork_server(new_caller: Caller) -> None:
    others = [new_caller.line() for _ in range(3)]
    pids = [new_caller.run("tasks_lines:count", line=line, calls=5)[0] for line in others]
    os.kill(new_caller.server_pid(), signal.SIGKILL)
    for line, pid in zip(others, pids, strict=True):
        assert new_caller.run("tasks_lines:count", line=line, calls=5) == (pid, 2)
    assert new_caller.run("tasks_lines:count", line=new_caller.lines[0], calls=5)[1] == 1


def test_a_stopped_worker_fails_only_its_own_call(new_caller: Caller, tmp_path: Path) -> None:
    """The server has to stay, because other workers need it."""
    server = new_caller.server_pid()
    other = new_caller.line()
    file = tmp_path / "go on"
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(new_caller.run("tasks_lines:wait_for", str(file), line=other))
    )
    thread.start()
    pid, _ = new_caller.run("tasks_lines:count", calls=10)
    os.kill(pid, signal.SIGSTOP)
    run_with_limit(lambda: new_caller.run("tasks_lines:count", calls=10, timeout_s=0.3))
    assert wait_until(lambda: not is_running(pid))
    assert new_caller.run("tasks_lines:count", calls=10, timeout_s=60)[0] != pid
    file.touch()
    thread.join(90)
    assert answers == [True]
    assert new_caller.server_pid() == server


def test_a_call_never_waits_for_a_worker_that_died_before_it(new_caller: Caller) -> None:
    """The worker may have read any part of the next call when it dies."""

    def use() -> None:
        for _ in range(40):
            pid, _ = new_caller.run("tasks_lines:count", calls=10_000)
            os.kill(pid, signal.SIGKILL)

    errors = run_with_limit(use, 90)
    assert [error for error in errors if not isinstance(error, WorkerDiedError)] == []
    assert new_caller.run("tasks_lines:count", timeout_s=60)[1] == 1


def test_a_fork_does_not_end_the_workers_of_its_parent(new_caller: Caller) -> None:
    worker, _ = new_caller.run("tasks_lines:count", calls=5)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert new_caller.run("tasks_lines:count", calls=5) == (worker, 2)


def test_a_call_can_be_cancelled_before_its_worker_starts() -> None:
    """The first call waits for the fork server, and may be cancelled meanwhile."""
    caller = Caller()
    line = caller.line()
    try:
        threading.Timer(0.01, line.cancel).start()
        errors = run_with_limit(lambda: caller.run("time:sleep", 600, line=line))
        assert isinstance(errors[0], FlowerGPUError)
    finally:
        caller.close()


def test_semaphores_of_an_ended_worker_are_removed(new_caller: Caller, tmp_path: Path) -> None:
    """The resource tracker in the worker's process group removes their files."""
    file = tmp_path / "name"
    new_caller.run("tasks_lines:count", calls=5)
    with cancelled_when(lambda: file.exists() and bool(file.read_text()), new_caller):
        new_caller.run("tasks_lines:leave_semaphore", str(file), calls=5)
    name = file.read_text().removeprefix("/")
    assert wait_until(lambda: not (SHARED_MEMORY / f"sem.{name}").exists())
