"""NVML is asked before the mutex is taken: one that hangs costs only who asked, old figures cost nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB
from waiting import until

_FUNCTION = "nvmlDeviceGetMemoryInfo_v2"


def test_who_asks_a_driver_that_hangs_is_told(one_gpu: LedgerHost) -> None:
    [stuck] = one_gpu.start(1)
    stuck("patience", seconds=0.3)
    one_gpu.stub.hang(_FUNCTION, stuck.pid)
    with pytest.raises(RefusedError, match=r"asked about GPU 0, has not answered for \d+ s") as refused:
        stuck("acquire", memory=GIB, label="fit of client 3")
    assert refused.value.kind == "LeaseError"
    assert "fit of client 3 gets no lease" in refused.value.message
    assert one_gpu.status()["waiting"] == []


def test_the_line_does_not_wait_for_one_whose_driver_hangs(one_gpu: LedgerHost) -> None:
    holder, first, second = one_gpu.start(3)
    first("patience", seconds=1.0)
    holder("acquire", memory=16 * GIB, gpus=[0])
    one_gpu.line_up((first, {"memory": 16 * GIB, "gpus": [0]}), (second, {"memory": GIB, "gpus": [0]}))
    one_gpu.stub.hang(_FUNCTION, first.pid)
    until(lambda: first.pid in one_gpu.stub.hanging())
    holder("release")
    with pytest.raises(RefusedError, match="has not answered for"):
        first.answer()
    assert list(second.answer().values()) == [GIB]


def test_a_lease_is_given_back_although_the_driver_hangs(one_gpu: LedgerHost) -> None:
    holder, waiter = one_gpu.start(2)
    holder("acquire", memory=16 * GIB, gpus=[0])
    one_gpu.line_up((waiter, {"memory": 16 * GIB, "gpus": [0]}))
    one_gpu.stub.hang(_FUNCTION, holder.pid)
    holder.tell("release")
    assert list(waiter.answer().values()) == [16 * GIB]
    one_gpu.stub.go_on()
    holder.answer()


@pytest.mark.parametrize("told", [True, False])
def test_what_was_asked_before_a_worker_took_its_memory(
    one_gpu: LedgerHost, told: bool, tmp_path: Path
) -> None:
    """Another program has 4 of 16 GiB, a worker that gets 8 uses nothing yet when NVML is asked.

    With what the worker uses since taken off what was used before, the other program would have nothing.
    """
    one_gpu.stub.program(0, 4 * GIB)
    go_on = tmp_path / "go-on"
    worker, late, third = one_gpu.start(3)
    worker("acquire", memory=8 * GIB, gpus=[0])
    worker("use", gpu=0, nbytes=0)
    late("pause_after_measuring", path=str(go_on))
    late.tell("acquire", memory=6 * GIB, gpus=[0], timeout_s=1.0)
    until(Path(f"{go_on}.measured").exists)
    worker("use", gpu=0, nbytes=8 * GIB, told=told)
    go_on.touch()
    with pytest.raises(RefusedError) as refused:
        late.answer()
    assert refused.value.kind == "LeaseTimeoutError"
    assert list(third("acquire", memory=4 * GIB, gpus=[0]).values()) == [4 * GIB]


@pytest.mark.parametrize("asks", [{"memory": 16 * GIB}, {"share": 0.25}])
def test_what_was_asked_before_a_lease_was_given_back(
    one_gpu: LedgerHost, asks: dict[str, float], tmp_path: Path
) -> None:
    """It looks used by another program, until the next look. A share does not shrink by that."""
    go_on = tmp_path / "go-on"
    worker, late, third = one_gpu.start(3)
    worker("acquire", memory=8 * GIB, gpus=[0])
    worker("use", gpu=0, nbytes=8 * GIB)
    late("pause_after_measuring", path=str(go_on))
    late.tell("acquire", gpus=[0], **asks)
    until(Path(f"{go_on}.measured").exists)
    worker("use", gpu=0, nbytes=0)
    worker("release")
    go_on.touch()
    got = late.answer()
    if "share" not in asks:
        late("release")
    assert third("acquire", gpus=[0], **asks) == got


# Cards for one process at a time ----------------------------------------------------------------------------

EXCLUSIVE_PROCESS = 3


def test_a_card_for_one_process_is_leased_as_a_whole(one_gpu: LedgerHost) -> None:
    one_gpu.stub.set(0, compute_mode=EXCLUSIVE_PROCESS)
    first, second = one_gpu.start(2)
    [had] = first("acquire", memory=GIB).values()
    assert had > 15 * GIB
    one_gpu.line_up((second, {"share": 0.25}))
    assert one_gpu.status()["ready"] == []
    first("release")
    assert list(second.answer().values()) == [had]
    second("release")
    with pytest.raises(RefusedError, match=r"asks for 17\.0 GiB of one GPU, more than any GPU has"):
        first("acquire", memory=17 * GIB)


def test_a_card_for_one_process_that_another_program_has_is_waited_for(one_gpu: LedgerHost) -> None:
    one_gpu.stub.set(0, compute_mode=EXCLUSIVE_PROCESS)
    draws = one_gpu.stub.program(0, GIB, graphics=True)
    other = one_gpu.stub.program(0, GIB, name="train")
    [claimant] = one_gpu.start(1)
    with pytest.raises(RefusedError) as refused:
        claimant("acquire", memory=GIB, timeout_s=0.2)
    assert f"its compute mode is EXCLUSIVE_PROCESS, and process {other.pid} train uses it" in str(
        refused.value
    )
    one_gpu.line_up((claimant, {"memory": GIB}))
    other.end()
    [had] = claimant.answer().values()
    assert had > 14 * GIB
    draws.end()


def test_clients_of_mps_share_a_card_for_one_process(one_gpu: LedgerHost, tmp_path: Path) -> None:
    """The server of MPS is that process. Its daemon is found as CUDA finds it."""
    one_gpu.stub.set(0, compute_mode=EXCLUSIVE_PROCESS)
    one_gpu.stub.program(0, GIB, name="nvidia-cuda-mps-server")
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    (pipes / "control").touch()
    first, second, without = one_gpu.start(3, CUDA_MPS_PIPE_DIRECTORY=str(pipes))
    assert list(first("acquire", memory=GIB).values()) == [GIB]
    assert list(second("acquire", memory=GIB).values()) == [GIB]
    (pipes / "nvidia-cuda-mps-control.pid").write_text("4194305")  # no process has such a number
    with pytest.raises(RefusedError) as refused:
        without("acquire", memory=GIB, timeout_s=0.2)
    assert refused.value.kind == "LeaseTimeoutError"
