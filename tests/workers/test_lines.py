"""Calls on a line of workers behave like calls that have their own worker."""

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
from worker_lines import Caller, descriptors_of, running_in_groups, settled

pytestmark = forkservers.marks()


@pytest.fixture(scope="module")
def module_caller() -> Iterator[Caller]:
    with forkservers.own_servers(light=True):
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
    assert wait_until(lambda: not running_in_groups(module_caller.pids)), running_in_groups(
        module_caller.pids
    )
    assert module_caller.run("plain_tasks:answer", timeout_s=90) == 42
    assert module_caller.server_pid() == server
    assert len(descriptors()) <= len(before), (before, descriptors())
    assert settled(lambda: descriptors_of(server), server_descriptors)
    assert settled(lambda: len(zombies_of(server)), 0)


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
