"""The ledger queries NVML before it takes the mutex.

So a driver that hangs delays only the process that queried it, and outdated readings harm no claim.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB
from waiting import until

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
