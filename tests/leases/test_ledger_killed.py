"""Killed processes lose their lease, or their place in the queue. Real processes use stub GPUs."""

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

# Claims for all of a GPU's memory, and for half of it.
WHOLE = {"memory": 16 * GIB}
HALF = {"memory": 8 * GIB}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_killed_waiter_loses_its_place(one_gpu: LedgerHost, place: int) -> None:
    holder, *waiting = one_gpu.start(4)
    holder("acquire", **WHOLE)
    one_gpu.line_up(*((waiter, WHOLE) for waiter in waiting))
    waiting.pop(place).kill()
    assert one_gpu.status()["waiting"] == [waiter.pid for waiter in waiting]
    holder("release")
    for waiter in waiting:
        assert waiter.answer()
        waiter("release")


def test_later_claims_are_granted_if_holder_and_first_waiter_are_killed(one_gpu: LedgerHost) -> None:
    holder, first, second, third = one_gpu.start(4)
    holder("acquire", **WHOLE)
    one_gpu.line_up((first, WHOLE), (second, HALF), (third, HALF))
    os.kill(first.pid, signal.SIGKILL)
    holder.kill()
    assert second.answer() and third.answer()


def test_the_next_claim_removes_the_files_of_dead_processes(one_gpu: LedgerHost) -> None:
    holder, *waiting, last = one_gpu.start(5)
    holder("acquire", **WHOLE)
    one_gpu.line_up(*((waiter, WHOLE) for waiter in waiting))
    for claimant in (holder, *waiting):
        claimant.kill()
    last("acquire", **WHOLE)
    # The names of a ticket's files and the id of its lease end with the same random text.
    assert {path.name.rpartition("-")[2].partition(".")[0] for path in one_gpu.account_folder.iterdir()} == {
        entry_id.rpartition("-")[2] for entry_id in one_gpu.status()["ids"]
    }
    last("release")
    assert list(one_gpu.account_folder.iterdir()) == []


@pytest.mark.timeout(450)
def test_a_process_killed_at_any_line_of_the_ledger_leaves_no_entry(one_gpu: LedgerHost) -> None:
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("crash_at_each_line.py"))],
        env={**os.environ, "PYTHONPATH": str(TESTS), **one_gpu.env},
        stdout=subprocess.PIPE,
        timeout=400,
        check=True,
    )
    result = json.loads(process.stdout)
    assert result["problems"] == []
    # The script has killed a process at many lines, and also while other processes were in the queue.
    assert result["lines"] > 200
    assert result["waiting"] > 3


def test_a_lease_lives_as_long_as_its_worker(one_gpu: LedgerHost) -> None:
    caller, next_claimant = one_gpu.start(2)
    caller("acquire", **WHOLE)
    # The worker has the ticket's file open, so the ticket stays locked after the caller's death.
    worker = caller("fork_worker")
    one_gpu.kill_on_close(worker)
    caller.kill()
    one_gpu.line_up((next_claimant, WHOLE))
    state = one_gpu.status()
    assert state["holders"] == [caller.pid]
    assert state["ready"] == []
    os.kill(worker, signal.SIGKILL)
    assert next_claimant.answer()


def test_a_fork_of_another_thread_does_not_keep_a_lease(one_gpu: LedgerHost) -> None:
    """The fork happens while the caller passes the ticket's file on to its worker."""
    caller, next_claimant = one_gpu.start(2)
    caller("acquire", **WHOLE)
    one_gpu.kill_on_close(caller("fork_in_thread"))
    one_gpu.line_up((next_claimant, WHOLE))
    caller.kill()
    assert next_claimant.answer()


def test_forks_keep_no_lock_of_the_ledger(one_gpu: LedgerHost) -> None:
    """One thread acquires and releases leases while another thread forks. No fork gets a locked file."""
    [forker] = one_gpu.start(1)
    assert forker("fork_while_leasing", forks=150, memory=16 * GIB) == []


def test_a_mutex_that_is_never_released_is_a_clear_error(one_gpu: LedgerHost) -> None:
    holder, other = one_gpu.start(2)
    other("acquire", **HALF)
    holder("hold_mutex")
    other("set_mutex_wait", wait_s=0.2)
    with pytest.raises(RefusedError, match="LeaseError") as refused:
        other("acquire", **HALF)
    assert "has been locked for 0.2 s by" in refused.value.message
    assert "let it continue or end it" in refused.value.message
    # A release also waits for the mutex, up to the same limit. Then it goes on without an error.
    other("release")
    holder.kill()
    assert one_gpu.status()["holders"] == []
