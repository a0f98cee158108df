"""A call on a line of workers: what it has in common with a call in a worker of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import forkservers
import pytest
from phases import without_phases
from processes import descriptors, is_running, wait_until, zombies_of
from worker_lines import Caller, descriptors_of, left_of, settled

pytestmark = forkservers.marks()


@pytest.fixture(scope="module")
def of_module() -> Iterator[Caller]:
    with forkservers.own_servers(light=True):
        caller = Caller()
        caller.run("plain_tasks:answer")
        yield caller
        caller.close()


@pytest.fixture
def caller(of_module: Caller) -> Iterator[Caller]:
    """One server and one line for all tests: after each of them nothing is left, and the line works."""
    server = of_module.server_pid()
    before, there = descriptors(), descriptors_of(server)
    of_module.pids.clear()
    yield of_module
    of_module.lines[0].retire()
    assert wait_until(lambda: not left_of(of_module.pids)), left_of(of_module.pids)
    assert of_module.run("plain_tasks:answer", timeout_s=90) == 42
    assert of_module.server_pid() == server
    assert len(descriptors()) <= len(before), (before, descriptors())
    assert settled(lambda: descriptors_of(server), there)
    assert settled(lambda: len(zombies_of(server)), 0)


@pytest.mark.parametrize("task", ["never_ends_its_thread", "never_ends_at_exit"])
def test_hang_after_the_result(task: str, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.workers.started_worker.EXIT_GRACE_S", 0.3)
    assert caller.run(f"plain_tasks:{task}") == 42
    assert caller.run(f"plain_tasks:{task}", calls=2) == 42
    caller.lines[0].retire()  # which waits no longer


@pytest.mark.parametrize("task", ["never_ends_its_thread", "never_ends_at_exit"])
def test_the_next_call_does_not_wait_for_a_worker_that_hangs_at_its_exit(
    task: str, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_gpu.workers.started_worker.EXIT_GRACE_S", 60.0)
    monkeypatch.setattr("flower_gpu.workers.started_worker.WAIT_FOR_EXIT_S", 0.1)
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


def test_nothing_of_a_line_is_in_workers_of_others(caller: Caller) -> None:
    others = [caller.line() for _ in range(3)]
    try:
        before = len(caller.run("tasks_lines:descriptors"))
        for line in others:
            caller.run("plain_tasks:answer", line=line, calls=2)
        found = caller.run("tasks_lines:descriptors")
        assert len(found) == before, found
    finally:
        for line in others:
            line.close()
            caller.lines.remove(line)


def test_events(caller: Caller) -> None:
    """They keep their order, may be long, and come from threads and children as well."""
    seen: list[dict[str, Any]] = []
    on_event = without_phases(seen)
    assert caller.run("tasks_lines:chatter", 2000, 10, on_event=on_event, calls=2) == 2000
    assert [event["number"] for event in seen if event["event"] == "chatter"] == list(range(2000))
    seen.clear()
    assert caller.run("tasks_lines:chatter_everywhere", 200, on_event=on_event) == len(seen) == 1000
    assert caller.run("tasks_lines:chatter", 3, 300_000, on_event=on_event, timeout_s=90) == 3
    seen.clear()
    caller.run("tasks_lines:send_a_path", on_event=on_event)
    assert seen == [{"event": "saved", "path": "/somewhere"}]


@pytest.mark.parametrize("where", ["on_event", "on_start"])
def test_error_in_a_callback_ends_the_worker(where: str, caller: Caller) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    pid = caller.run("os:getpid", calls=100)
    with pytest.raises(OSError, match="no space left"):
        caller.run("tasks_lines:chatter", 3, 10, calls=100, **{where: fail})
    assert wait_until(lambda: not is_running(pid))
    for number in range(3):
        assert caller.run("plain_tasks:echo", number, calls=100, timeout_s=90) == (number,)


def test_a_worker_without_a_stream_has_no_more_calls(caller: Caller) -> None:
    assert caller.run("tasks_lines:close_stdout_object", calls=5) == 42
    assert not caller.lines[0].has_worker
