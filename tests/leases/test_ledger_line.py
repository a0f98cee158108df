"""Waiting in line, with real processes on stub GPUs."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB


def gib(amount: float, /, **fields: Any) -> dict[str, Any]:
    return {"memory": int(amount * GIB), **fields}


def test_what_is_free_is_granted_at_once_and_all_is_free_again_after_release(ledger_host: LedgerHost) -> None:
    [one] = ledger_host.start(1)
    uuids = ledger_host.stub.uuids
    granted = one("acquire", **gib(4, label="fit of client 1"))
    assert list(granted.values()) == [4 * GIB]
    state = ledger_host.status()
    assert state["cards"] == dict.fromkeys(uuids, 16 * GIB)
    assert sum(state["leased"].values()) == 4 * GIB
    assert state["holders"] == [one.pid]
    assert state["labels"] == {str(one.pid): "fit of client 1"}
    one("release")
    assert ledger_host.status()["holders"] == []
    assert list(ledger_host.own.iterdir()) == []


def test_shares_fit_beside_a_desktop_session(one_gpu: LedgerHost) -> None:
    """What it uses goes up and down a little, and workers tell late what they use."""
    share, count = 0.25, 4
    desktop = one_gpu.stub.program(0, 700 << 20)
    claimants = one_gpu.start(count + 1)
    granted = []
    for step, claimant in enumerate(claimants[:-1]):
        granted += claimant("acquire", share=share, timeout_s=90).values()
        claimant("use", gpu=0, nbytes=granted[-1] - (100 << 20))
        before, desktop = desktop, one_gpu.stub.program(0, (680 if step % 2 else 720) << 20)
        before.end()
    assert len(set(granted)) == 1
    state = one_gpu.status()
    assert sum(state["leased"].values()) <= 16 * GIB - (720 << 20)
    one_gpu.line_up((claimants[-1], {"share": share}))
    assert one_gpu.status()["ready"] == []
    claimants[2].kill()  # that gives its memory back, too
    assert claimants[-1].answer()


def test_a_waiter_that_is_stopped_blocks_others_only_where_it_stands_in_line(ledger_host: LedgerHost) -> None:
    holder, other, first, second, third = ledger_host.start(5)
    holder("acquire", **gib(16, gpus=[0]))
    other("acquire", **gib(16, gpus=[1]))
    ledger_host.line_up((first, gib(16, gpus=[0])), (second, gib(16, gpus=[0])), (third, gib(4, gpus=[1])))
    os.kill(first.pid, signal.SIGSTOP)
    other.kill()  # nobody is told; the first in line would have seen it
    assert third.answer()
    holder("release")
    assert ledger_host.until(lambda state: state["ready"] == [first.pid])
    assert second.pid in ledger_host.status()["waiting"]
    os.kill(first.pid, signal.SIGCONT)
    assert first.answer()
    first("release")
    assert second.answer()


def test_a_request_that_gives_up_lets_those_behind_it_go_on(one_gpu: LedgerHost) -> None:
    holder, first, second = one_gpu.start(3)
    holder("acquire", **gib(8))
    one_gpu.line_up((first, gib(16, timeout_s=3)))
    second.tell("acquire", **gib(8))
    with pytest.raises(RefusedError):
        first.answer()
    assert second.answer()


def test_a_program_that_fills_up_keeps_others_waiting_until_it_goes(one_gpu: LedgerHost) -> None:
    holder, waiter = one_gpu.start(2)
    holder("acquire", **gib(8))
    holder("use", gpu=0, nbytes=7 * GIB)
    assert list(one_gpu.status()["cards"].values()) == [
        16 * GIB
    ]  # what the holder uses is no other program's
    program = one_gpu.stub.program(0, 5 * GIB)
    assert list(one_gpu.status()["cards"].values()) == [11 * GIB]
    one_gpu.line_up((waiter, gib(8)))
    assert one_gpu.status()["ready"] == []
    program.end()
    assert waiter.answer()


def test_use_that_was_not_told_counts_as_that_of_another_program(one_gpu: LedgerHost) -> None:
    """Where the driver does not tell it, either."""
    one_gpu.stub.set(0, hidden=1)
    [holder] = one_gpu.start(1)
    holder("acquire", **gib(8))
    holder("use", gpu=0, nbytes=6 * GIB, told=False)
    assert list(one_gpu.status()["cards"].values()) == [10 * GIB]
    holder("use", gpu=0, nbytes=6 * GIB)
    assert list(one_gpu.status()["cards"].values()) == [16 * GIB]
    holder("use", gpu=0, nbytes=9 * GIB)  # more than its lease: the rest is taken from the others
    assert list(one_gpu.status()["cards"].values()) == [15 * GIB]


def test_a_gpu_lost_while_waiting_is_not_waited_for(ledger_host: LedgerHost) -> None:
    holder, other, waiter = ledger_host.start(3)
    holder("acquire", **gib(12, gpus=[0]))
    other("acquire", **gib(14, gpus=[1]))
    ledger_host.line_up((waiter, gib(8)))
    ledger_host.stub.set(0, lost=True)
    other("release")
    assert list(waiter.answer()) == [ledger_host.stub.uuids[1]]


def test_the_time_of_day_does_not_matter(one_gpu: LedgerHost) -> None:
    holder, early, late = one_gpu.start(3)
    holder("acquire", **gib(16))
    early("clock_jumps", seconds=-1e9)
    late("clock_jumps", seconds=1e9)
    one_gpu.line_up((late, gib(16)), (early, gib(16, timeout_s=50)))
    holder("release")
    assert late.answer()
    assert one_gpu.status()["waiting"] == [early.pid]
    late("release")
    assert early.answer()


def test_what_can_never_be_granted_is_refused_at_once(ledger_host: LedgerHost) -> None:
    [claimant] = ledger_host.start(1)
    with pytest.raises(RefusedError, match="a call asks"):
        claimant("acquire", **gib(1, gpus=[5]))
    for index in (0, 1):
        ledger_host.stub.set(index, lost=True)
    with pytest.raises(RefusedError, match="no usable GPU"):
        claimant("acquire", **gib(1))
    assert list(ledger_host.own.iterdir()) == []
