"""Claims in the queue of the ledger, with real processes on stub GPUs.

The ledger queries NVML before it takes the mutex. So a driver that hangs delays only the process that queried
it, and outdated readings harm no claim.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB
from waiting import until

from flower_gpu import control_group
from flower_gpu.leases import host


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


# Cores and main memory --------------------------------------------------------------------------------------

ALL = 1000 * control_group.all_cores()


def core_claim(amount: int, **fields: Any) -> dict[str, Any]:
    return {"cores": amount, "count": 0, **fields}


def test_cores_are_leased_in_order_and_freed_when_a_holder_is_killed(
    ledger_host: LedgerHost,
) -> None:
    first, second, third = ledger_host.start(3)
    assert first("acquire", **core_claim(ALL)) == {"cores": ALL}
    assert ledger_host.status()["host"]["cores"] == [ALL, ALL]
    ledger_host.line_up((second, core_claim(ALL // 2)), (third, core_claim(ALL)))
    os.kill(first.pid, signal.SIGKILL)
    assert second.answer() == {"cores": ALL // 2}
    assert third.pid in ledger_host.status()["waiting"]
    second("release")
    assert third.answer() == {"cores": ALL}
    third("release")
    # A claim for as many cores as are free never waits.
    assert second("acquire", **core_claim(ALL - 300)) == {"cores": ALL - 300}
    assert third("acquire", **core_claim(ALL, least_cores=0)) == {"cores": 300}


def test_a_claim_for_a_gpu_and_cores_gets_both_together(one_gpu: LedgerHost) -> None:
    """While a claim waits for its cores, it holds no GPU, but its GPU is reserved for it."""
    busy, both, other = one_gpu.start(3)
    busy("acquire", **core_claim(ALL))
    [uuid] = one_gpu.stub.uuids
    one_gpu.line_up((both, {"memory": 10 * GIB, "cores": ALL // 2}), (other, {"memory": 10 * GIB}))
    assert one_gpu.status()["leased"] == {uuid: 0}
    busy("release")
    assert both.answer() == {uuid: 10 * GIB, "cores": ALL // 2}
    both("release")
    assert other.answer() == {uuid: 10 * GIB}


def test_a_claim_that_times_out_names_the_holder_of_the_cores(ledger_host: LedgerHost) -> None:
    holder, waiter = ledger_host.start(2)
    holder("acquire", **core_claim(ALL, label="fit of client 7"))
    with pytest.raises(RefusedError) as refused:
        waiter("acquire", timeout_s=0.2, **core_claim(1000))
    assert refused.value.kind == "LeaseTimeoutError"
    assert "held by fit of client 7" in refused.value.message
    assert "core" in refused.value.message


def test_calls_of_an_unmeasured_task_begin_one_after_the_other(ledger_host: LedgerHost) -> None:
    """Their need was never measured. The use of the first call after some seconds is taken as its need."""
    first, second, third = ledger_host.start(3)
    first("acquire", **core_claim(0, guess=GIB))
    [path] = ledger_host.account_folder.glob("*.ticket")
    with pytest.raises(RefusedError, match="LeaseTimeoutError"):
        second("acquire", timeout_s=0.2, **core_claim(0, guess=GIB))
    # Processes that have read the ticket do not notice this change.
    text = path.read_bytes().partition(b"\n")[0]
    ticket = json.loads(text)
    ticket["since"] -= host.SETTLED_S
    settled = json.dumps(ticket).encode()
    assert len(settled) <= len(text)
    with path.open("r+b") as file:
        file.write(settled + b"\n")
    assert third("acquire", **core_claim(0, guess=GIB))
    assert sorted(ledger_host.status()["holders"]) == sorted([first.pid, third.pid])


# Readings of NVML -------------------------------------------------------------------------------------------

_FUNCTION = "nvmlDeviceGetMemoryInfo_v2"


def test_a_claim_fails_if_the_driver_hangs(one_gpu: LedgerHost) -> None:
    [stuck] = one_gpu.start(1)
    stuck("set_nvml_timeout", seconds=0.3)
    one_gpu.stub.hang(_FUNCTION, stuck.pid)
    with pytest.raises(RefusedError, match=r"asked about GPU 0, has not answered for \d+ s") as refused:
        stuck("acquire", memory=GIB, label="fit of client 3")
    assert refused.value.kind == "LeaseError"
    assert "fit of client 3 gets no lease" in refused.value.message
    assert one_gpu.status()["waiting"] == []


def test_a_waiter_with_a_hanging_driver_does_not_block_the_queue(one_gpu: LedgerHost) -> None:
    holder, first, second = one_gpu.start(3)
    first("set_nvml_timeout", seconds=1.0)
    holder("acquire", memory=16 * GIB, gpus=[0])
    one_gpu.line_up((first, {"memory": 16 * GIB, "gpus": [0]}), (second, {"memory": GIB, "gpus": [0]}))
    one_gpu.stub.hang(_FUNCTION, first.pid)
    until(lambda: first.pid in one_gpu.stub.hanging())
    holder("release")
    with pytest.raises(RefusedError, match="has not answered for"):
        first.answer()
    assert list(second.answer().values()) == [GIB]


def test_a_lease_is_released_although_the_driver_hangs(one_gpu: LedgerHost) -> None:
    holder, waiter = one_gpu.start(2)
    holder("acquire", memory=16 * GIB, gpus=[0])
    one_gpu.line_up((waiter, {"memory": 16 * GIB, "gpus": [0]}))
    one_gpu.stub.hang(_FUNCTION, holder.pid)
    holder.send("release")
    assert list(waiter.answer().values()) == [16 * GIB]
    one_gpu.stub.go_on()
    holder.answer()


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_reading_from_before_a_worker_allocated_its_memory(
    one_gpu: LedgerHost, is_reported: bool, tmp_path: Path
) -> None:
    """Another program has 4 of 16 GiB. A worker with 8 GiB uses no memory yet when NVML is queried.

    If the worker's later use were subtracted from that reading, the other program would seem to use none.
    """
    one_gpu.stub.program(0, 4 * GIB)
    go_on = tmp_path / "go-on"
    worker, late, third = one_gpu.start(3)
    worker("acquire", memory=8 * GIB, gpus=[0])
    worker("use", gpu=0, nbytes=0)
    late("pause_after_measuring", path=str(go_on))
    late.send("acquire", memory=6 * GIB, gpus=[0], timeout_s=1.0)
    until(Path(f"{go_on}.measured").exists)
    worker("use", gpu=0, nbytes=8 * GIB, is_reported=is_reported)
    go_on.touch()
    with pytest.raises(RefusedError) as refused:
        late.answer()
    assert refused.value.kind == "LeaseTimeoutError"
    assert list(third("acquire", memory=4 * GIB, gpus=[0]).values()) == [4 * GIB]


@pytest.mark.parametrize("need", [{"memory": 16 * GIB}, {"share": 0.25}])
def test_a_reading_from_before_a_lease_was_released(
    one_gpu: LedgerHost, need: dict[str, float], tmp_path: Path
) -> None:
    """Until the next reading, the freed memory seems used by another program. A share must not shrink."""
    go_on = tmp_path / "go-on"
    worker, late, third = one_gpu.start(3)
    worker("acquire", memory=8 * GIB, gpus=[0])
    worker("use", gpu=0, nbytes=8 * GIB)
    late("pause_after_measuring", path=str(go_on))
    late.send("acquire", gpus=[0], **need)
    until(Path(f"{go_on}.measured").exists)
    worker("use", gpu=0, nbytes=0)
    worker("release")
    go_on.touch()
    got = late.answer()
    if "share" not in need:
        late("release")
    assert third("acquire", gpus=[0], **need) == got


# GPUs in compute mode EXCLUSIVE_PROCESS ---------------------------------------------------------------------

EXCLUSIVE_PROCESS = 3


def test_an_exclusive_gpu_is_leased_as_a_whole(one_gpu: LedgerHost) -> None:
    one_gpu.stub.set(0, compute_mode=EXCLUSIVE_PROCESS)
    first, second = one_gpu.start(2)
    [leased_bytes] = first("acquire", memory=GIB).values()
    assert leased_bytes > 15 * GIB
    one_gpu.line_up((second, {"share": 0.25}))
    assert one_gpu.status()["ready"] == []
    first("release")
    assert list(second.answer().values()) == [leased_bytes]
    second("release")
    with pytest.raises(RefusedError, match=r"asks for 17\.0 GiB of one GPU, more than any GPU has"):
        first("acquire", memory=17 * GIB)


def test_a_claim_waits_for_an_exclusive_gpu_of_another_program(one_gpu: LedgerHost) -> None:
    one_gpu.stub.set(0, compute_mode=EXCLUSIVE_PROCESS)
    desktop = one_gpu.stub.program(0, GIB, graphics=True)
    other = one_gpu.stub.program(0, GIB, name="train")
    [claimant] = one_gpu.start(1)
    with pytest.raises(RefusedError) as refused:
        claimant("acquire", memory=GIB, timeout_s=0.2)
    assert f"its compute mode is EXCLUSIVE_PROCESS, and process {other.pid} train uses it" in str(
        refused.value
    )
    one_gpu.line_up((claimant, {"memory": GIB}))
    other.end()
    [leased_bytes] = claimant.answer().values()
    assert leased_bytes > 14 * GIB
    desktop.end()


def test_mps_clients_share_an_exclusive_gpu(one_gpu: LedgerHost, tmp_path: Path) -> None:
    """The MPS server is the one process on the GPU. Its daemon is looked up in the same way as CUDA does."""
    one_gpu.stub.set(0, compute_mode=EXCLUSIVE_PROCESS)
    one_gpu.stub.program(0, GIB, name="nvidia-cuda-mps-server")
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    (pipes / "control").touch()
    first, second, without = one_gpu.start(3, CUDA_MPS_PIPE_DIRECTORY=str(pipes))
    assert list(first("acquire", memory=GIB).values()) == [GIB]
    assert list(second("acquire", memory=GIB).values()) == [GIB]
    # No process can have this pid.
    (pipes / "nvidia-cuda-mps-control.pid").write_text("4194305")
    with pytest.raises(RefusedError) as refused:
        without("acquire", memory=GIB, timeout_s=0.2)
    assert refused.value.kind == "LeaseTimeoutError"
