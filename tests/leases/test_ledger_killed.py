"""Whatever ends a process gives its lease, or its place in line, back; with real processes on stub GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_hosts import TESTS, LedgerHost, RefusedError
from nvml_stub import GIB

WHOLE = {"memory": 16 * GIB}
HALF = {"memory": 8 * GIB}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_waiter_that_is_killed_gives_its_place_back(one_gpu: LedgerHost, place: int) -> None:
    holder, *waiting = one_gpu.start(4)
    holder("acquire", **WHOLE)
    one_gpu.line_up(*((waiter, WHOLE) for waiter in waiting))
    waiting.pop(place).kill()
    assert one_gpu.status()["waiting"] == [waiter.pid for waiter in waiting]
    holder("release")
    for waiter in waiting:
        assert waiter.answer()
        waiter("release")


def test_the_others_go_on_if_holder_and_first_are_killed_together(one_gpu: LedgerHost) -> None:
    holder, first, second, third = one_gpu.start(4)
    holder("acquire", **WHOLE)
    one_gpu.line_up((first, WHOLE), (second, HALF), (third, HALF))
    os.kill(first.pid, signal.SIGKILL)
    holder.kill()
    assert second.answer() and third.answer()


def test_nothing_is_left_of_the_dead_once_the_next_has_asked(one_gpu: LedgerHost) -> None:
    holder, *waiting, last = one_gpu.start(5)
    holder("acquire", **WHOLE)
    one_gpu.line_up(*((waiter, WHOLE) for waiter in waiting))
    for claimant in (holder, *waiting):
        claimant.kill()
    last("acquire", **WHOLE)
    assert {path.name.rpartition("-")[2].partition(".")[0] for path in one_gpu.own.iterdir()} == {
        id_.rpartition("-")[2] for id_ in one_gpu.status()["ids"]
    }
    last("release")
    assert list(one_gpu.own.iterdir()) == []


@pytest.mark.timeout(450)
def test_a_process_killed_at_any_line_of_the_ledger_leaves_nothing(one_gpu: LedgerHost) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("crash_at_each_line.py"))],
        env={**os.environ, "PYTHONPATH": str(TESTS), **one_gpu.env},
        stdout=subprocess.PIPE,
        timeout=400,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["problems"] == []
    assert result["lines"] > 200
    assert result["waiting"] > 3


def test_a_lease_lives_as_long_as_the_worker_that_has_it(one_gpu: LedgerHost) -> None:
    caller, next_one = one_gpu.start(2)
    caller("acquire", **WHOLE)
    worker = caller("fork_worker")
    one_gpu.also_end(worker)
    caller.kill()
    one_gpu.line_up((next_one, WHOLE))
    state = one_gpu.status()
    assert state["holders"] == [caller.pid]
    assert state["ready"] == []
    os.kill(worker, signal.SIGKILL)
    assert next_one.answer()


def test_what_another_thread_forks_does_not_keep_a_lease(one_gpu: LedgerHost) -> None:
    caller, next_one = one_gpu.start(2)
    caller("acquire", **WHOLE)
    one_gpu.also_end(caller("fork_in_thread"))
    one_gpu.line_up((next_one, WHOLE))
    caller.kill()
    assert next_one.answer()


def test_forks_at_any_moment_keep_no_lock_of_the_ledger(one_gpu: LedgerHost) -> None:
    """One thread takes and gives back leases, while another forks."""
    [forker] = one_gpu.start(1)
    assert forker("fork_while_leasing", forks=150, memory=16 * GIB) == []


def test_a_mutex_that_is_not_given_back_is_a_clear_error(one_gpu: LedgerHost) -> None:
    holder, other = one_gpu.start(2)
    other("acquire", **HALF)
    holder("hold_mutex")
    other("short_mutex", wait_s=0.2)
    with pytest.raises(RefusedError, match="LeaseError") as refused:
        other("acquire", **HALF)
    assert "has been locked for 0.2 s by" in refused.value.message
    assert "let it go on or end it" in refused.value.message
    other("release")  # waits no longer than that, and raises nothing
    holder.kill()
    assert one_gpu.status()["holders"] == []
