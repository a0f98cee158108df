"""Claims that wait in the queue of the ledger, with real processes on stub GPUs."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB


def memory_claim(amount: float, /, **fields: Any) -> dict[str, Any]:
    return {"memory": int(amount * GIB), **fields}


def test_free_memory_is_granted_at_once_and_freed_by_release(ledger_host: LedgerHost) -> None:
    [claimant] = ledger_host.start(1)
    uuids = ledger_host.stub.uuids
    granted = claimant("acquire", **memory_claim(4, label="fit of client 1"))
    assert list(granted.values()) == [4 * GIB]
    state = ledger_host.status()
    assert state["cards"] == dict.fromkeys(uuids, 16 * GIB)
    assert sum(state["leased"].values()) == 4 * GIB
    assert state["holders"] == [claimant.pid]
    assert state["labels"] == {str(claimant.pid): "fit of client 1"}
    claimant("release")
    assert ledger_host.status()["holders"] == []
    assert list(ledger_host.account_folder.iterdir()) == []


def test_shares_fit_beside_a_desktop_session(one_gpu: LedgerHost) -> None:
    """The desktop's memory use fluctuates a little, and workers report their use late."""
    share, count = 0.25, 4
    desktop = one_gpu.stub.program(0, 700 << 20)
    claimants = one_gpu.start(count + 1)
    granted = []
    for step, claimant in enumerate(claimants[:-1]):
        granted += claimant("acquire", share=share, timeout_s=90).values()
        claimant("use", gpu=0, nbytes=granted[-1] - (100 << 20))
        previous, desktop = desktop, one_gpu.stub.program(0, (680 if step % 2 else 720) << 20)
        previous.end()
    assert len(set(granted)) == 1
    state = one_gpu.status()
    assert sum(state["leased"].values()) <= 16 * GIB - (720 << 20)
    one_gpu.line_up((claimants[-1], {"share": share}))
    assert one_gpu.status()["ready"] == []
    claimants[2].kill()  # which also frees its memory
    assert claimants[-1].answer()


def test_a_stopped_waiter_blocks_only_claims_for_its_gpu(ledger_host: LedgerHost) -> None:
    holder, other, first, second, third = ledger_host.start(5)
    holder("acquire", **memory_claim(16, gpus=[0]))
    other("acquire", **memory_claim(16, gpus=[1]))
    ledger_host.line_up(
        (first, memory_claim(16, gpus=[0])),
        (second, memory_claim(16, gpus=[0])),
        (third, memory_claim(4, gpus=[1])),
    )
    os.kill(first.pid, signal.SIGSTOP)
    # A killed holder wakes no claim. The first claim in the queue would have noticed by polling.
    other.kill()
    assert third.answer()
    holder("release")
    assert ledger_host.until(lambda state: state["ready"] == [first.pid])
    assert second.pid in ledger_host.status()["waiting"]
    os.kill(first.pid, signal.SIGCONT)
    assert first.answer()
    first("release")
    assert second.answer()


def test_claims_behind_a_claim_that_timed_out_are_granted(one_gpu: LedgerHost) -> None:
    holder, first, second = one_gpu.start(3)
    holder("acquire", **memory_claim(8))
    one_gpu.line_up((first, memory_claim(16, timeout_s=3)))
    second.send("acquire", **memory_claim(8))
    with pytest.raises(RefusedError):
        first.answer()
    assert second.answer()


def test_a_claim_waits_while_another_program_uses_the_memory(one_gpu: LedgerHost) -> None:
    holder, waiter = one_gpu.start(2)
    holder("acquire", **memory_claim(8))
    holder("use", gpu=0, nbytes=7 * GIB)
    # Memory that the holder uses does not count as another program's.
    assert list(one_gpu.status()["cards"].values()) == [16 * GIB]
    program = one_gpu.stub.program(0, 5 * GIB)
    assert list(one_gpu.status()["cards"].values()) == [11 * GIB]
    one_gpu.line_up((waiter, memory_claim(8)))
    assert one_gpu.status()["ready"] == []
    program.end()
    assert waiter.answer()


def test_unreported_use_counts_as_that_of_another_program(one_gpu: LedgerHost) -> None:
    """The driver does not list the process either."""
    one_gpu.stub.set(0, hidden=1)
    [holder] = one_gpu.start(1)
    holder("acquire", **memory_claim(8))
    holder("use", gpu=0, nbytes=6 * GIB, is_reported=False)
    assert list(one_gpu.status()["cards"].values()) == [10 * GIB]
    holder("use", gpu=0, nbytes=6 * GIB)
    assert list(one_gpu.status()["cards"].values()) == [16 * GIB]
    # This is more than its lease, so the excess reduces the capacity for the other claims.
    holder("use", gpu=0, nbytes=9 * GIB)
    assert list(one_gpu.status()["cards"].values()) == [15 * GIB]


def test_a_claim_does_not_wait_for_a_gpu_that_was_lost(ledger_host: LedgerHost) -> None:
    holder, other, waiter = ledger_host.start(3)
    holder("acquire", **memory_claim(12, gpus=[0]))
    other("acquire", **memory_claim(14, gpus=[1]))
    ledger_host.line_up((waiter, memory_claim(8)))
    ledger_host.stub.set(0, lost=True)
    other("release")
    assert list(waiter.answer()) == [ledger_host.stub.uuids[1]]


def test_the_queue_does_not_depend_on_the_time_of_day(one_gpu: LedgerHost) -> None:
    holder, early, late = one_gpu.start(3)
    holder("acquire", **memory_claim(16))
    early("shift_clock", seconds=-1e9)
    late("shift_clock", seconds=1e9)
    one_gpu.line_up((late, memory_claim(16)), (early, memory_claim(16, timeout_s=50)))
    holder("release")
    assert late.answer()
    assert one_gpu.status()["waiting"] == [early.pid]
    late("release")
    assert early.answer()


def test_a_claim_that_can_never_be_granted_is_refused_at_once(ledger_host: LedgerHost) -> None:
    [claimant] = ledger_host.start(1)
    with pytest.raises(RefusedError, match="a call asks"):
        claimant("acquire", **memory_claim(1, gpus=[5]))
    for index in (0, 1):
        ledger_host.stub.set(index, lost=True)
    with pytest.raises(RefusedError, match="no usable GPU"):
        claimant("acquire", **memory_claim(1))
    assert list(ledger_host.account_folder.iterdir()) == []
