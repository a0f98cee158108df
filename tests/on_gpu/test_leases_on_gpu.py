"""Leases from end to end on a real GPU: grants, caps, learned footprints, and retries if memory runs out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_hosts import SAME

from flower_gpu import GPUClient, WorkerDiedError, run_in_worker, trace
from flower_gpu.calls.grants import driver_cap
from flower_gpu.errors import GPUOutOfMemoryError
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import BESIDE_GPU, ON_CPU, needed_bytes
from flower_gpu.workers.forkserver import control

sys.path.insert(0, str(Path(__file__).parent))  # workers get the caller's sys.path

import on_gpu_tasks

MIB, GIB = 2**20, 2**30
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
#: Tolerance between two measurements of the same memory, due to allocator blocks and library workspaces.
SMALL = 64 * MIB

pytestmark = [pytest.mark.gpu]

VARIABLES = ("POLICY", "NUM", "NUM_GPUS", "MEMORY", "PLACEMENT", "RESERVE", "ON_OOM", "LEASE_TIMEOUT_S")


@dataclass
class Run:
    """A separate run on one GPU, with no footprint learned yet."""

    gpu: GPU
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in trace.read(self.folder / trace.FILE_NAME) if event["event"] == kind]

    def leases(self) -> list[dict[str, Any]]:
        """Return the granted leases with their memory."""
        return [{**event, **event["gpus"][0]} for event in self.events("lease_granted")]

    def figures(self) -> list[dict[str, Any]]:
        """Return the GPU figures that the workers have reported."""
        return [event["gpus"][0] for event in self.events("worker_finished")]

    def footprint(self) -> int:
        (peaks,) = (
            entry for key, entry in Footprints().entries().items() if key.gpu not in (ON_CPU, BESIDE_GPU)
        )
        return peaks.peak_bytes

    def start(self, **request: Any) -> subprocess.Popen[str]:
        """Start a separate process; see on_gpu_client.py."""
        script = Path(__file__).with_name("on_gpu_client.py")
        command = [sys.executable, str(script), json.dumps(request)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
            failed = [process.returncode for process in self.started if process.poll()]
            assert not failed, f"{what}: will not happen, because processes ended with {failed}"
            time.sleep(0.02)


@pytest.fixture
def run(gpu: GPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    for name in VARIABLES:
        monkeypatch.delenv(f"FLOWER_GPU_{name}", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu.uuid)
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "forkserver")
    Footprints().clear()
    run = Run(gpu, tmp_path)
    yield run
    for process in run.started:
        process.kill()
        process.communicate()


def result(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output)


@pytest.mark.parametrize(
    "method", ["forkserver", "spawn", pytest.param("fork", marks=pytest.mark.card(SAME))]
)
def test_the_cap_in_force_matches_the_lease(method: str, run: Run) -> None:
    run_in_worker("on_gpu_tasks:take", GIB, gpu_memory="3GiB", start_method=method)
    (lease,), (figures,) = run.leases(), run.figures()
    assert lease["uuid"] == run.gpu.uuid
    assert lease["memory_bytes"] == figures["lease_bytes"] == 3 * GIB
    assert figures["cap_bytes"] < figures["lease_bytes"]
    assert figures["cap_bytes"] - MIB <= figures["cap_in_force_bytes"] <= figures["cap_bytes"]
    assert GIB <= figures["reserved_peak_bytes"] <= figures["cap_bytes"]


def test_code_that_calls_cuda_directly_is_capped_by_the_driver(run: Run) -> None:
    if reason := driver_cap.problem((run.gpu.uuid,)):
        pytest.skip(f"no cap by the driver: {reason}")
    assert run_in_worker("on_gpu_tasks:take_from_cuda", GIB, gpu_memory="3GiB") == 0
    assert run_in_worker("on_gpu_tasks:take_from_cuda", 4 * GIB, gpu_memory="3GiB") == OUT_OF_MEMORY
    assert {event["cap"] for event in run.events("worker_started")} == {"driver"}


def test_the_context_is_measured_and_counts_in_the_next_lease(run: Run) -> None:
    figures_of_task = run_in_worker("on_gpu_tasks:take", GIB, gpu_memory="3GiB")
    if figures_of_task["driver"] is None:
        pytest.skip("the driver does not tell what a process uses")
    (measured,) = Footprints().contexts().values()
    print(f"{run.gpu.name}: CUDA context {measured.context_bytes / MIB:.0f} MiB")
    assert abs(measured.context_bytes - (figures_of_task["driver"] - figures_of_task["reserved"])) <= SMALL
    run_in_worker("on_gpu_tasks:take", GIB, gpu_memory="3GiB")
    figures = run.figures()[-1]
    assert figures["lease_bytes"] - figures["cap_bytes"] == measured.context_bytes


def test_the_footprint_is_the_real_peak_and_sets_the_size_of_the_next_lease(run: Run) -> None:
    figures = run_in_worker("on_gpu_tasks:take", 2 * GIB)
    footprint = run.footprint()
    print(f"{run.gpu.name}: 2 GiB of tensors are a footprint of {footprint / MIB:.0f} MiB")
    if figures["driver"] is not None:
        assert abs(footprint - figures["driver"]) <= SMALL
    assert footprint >= 2 * GIB + 50 * MIB
    run_in_worker("on_gpu_tasks:take", 2 * GIB)
    first, second = run.leases()
    assert first["alone"]
    assert not second["alone"]
    assert second["memory_bytes"] == needed_bytes(footprint)
    assert run.events("out_of_memory") == []


def test_a_task_that_grows_is_retried_with_more_memory_and_its_footprint_updated(run: Run) -> None:
    for nbytes in (GIB, 3 * GIB, 3 * GIB):
        run_in_worker("on_gpu_tasks:take", nbytes)
    (out,) = run.events("out_of_memory")
    assert (out["kind"], out["then"]) == ("over_cap", "again")
    assert out["asked_bytes"] == 3 * GIB
    _, learned, more, last = run.leases()
    assert learned["memory_bytes"] < 3 * GIB < more["memory_bytes"]
    assert last["memory_bytes"] == needed_bytes(run.footprint())


def test_an_error_without_mention_of_memory_is_retried_only_if_memory_ran_out(run: Run) -> None:
    assert run_in_worker("on_gpu_tasks:convolve", 3 * GIB, gpu_memory="1.5GiB") == 3 * GIB
    (out,) = run.events("out_of_memory")
    assert out["then"] == "again"
    with pytest.raises(RuntimeError, match="unable to find an engine"):
        run_in_worker("on_gpu_tasks:convolve_odd_dtype", gpu_memory="1.5GiB")
    assert len(run.events("out_of_memory")) == 1


def test_without_a_retry_the_error_has_the_numbers(run: Run) -> None:
    """The cap also holds if a module sets the allocator's settings itself."""
    with pytest.raises(GPUOutOfMemoryError, match=r"Asked 2\.0 GiB, .* of a lease of 1\.5 GiB, free "):
        run_in_worker(
            "on_gpu_tasks:take_with_settings_of_its_own", 2 * GIB, gpu_memory="1.5GiB", on_oom="fail"
        )
    (out,) = run.events("out_of_memory")
    assert (out["kind"], out["then"], out["uuid"]) == ("over_cap", "failed", run.gpu.uuid)
    assert out["asked_bytes"] == 2 * GIB and out["cap_bytes"] < 1.5 * GIB
    # With a cap by the driver, CUDA reports the free memory of the lease instead of the GPU.
    is_capped_by_driver = driver_cap.problem((run.gpu.uuid,)) is None
    assert (out["free_bytes"] > 2 * GIB) != is_capped_by_driver


def test_a_worker_can_allocate_all_of_its_cap_in_pieces_and_no_more(run: Run) -> None:
    taken = run_in_worker("on_gpu_tasks:take_all", 32 * MIB, gpu_memory="1.5GiB")
    (figures,) = run.figures()
    assert 0.9 * figures["cap_bytes"] <= taken <= figures["reserved_peak_bytes"] <= figures["cap_bytes"]
    # The task has handled the error itself.
    assert run.events("out_of_memory") == []


def test_a_smaller_cap_of_the_user_is_kept(run: Run) -> None:
    settings = f"per_process_memory_fraction:{GIB / 2 / (run.gpu.total_bytes or 1):f}"
    run_in_worker("on_gpu_tasks:take", MIB, gpu_memory="1.5GiB", env={"PYTORCH_ALLOC_CONF": settings})
    (figures,) = run.figures()
    assert figures["cap_in_force_bytes"] <= GIB // 2 + MIB


def test_a_call_waits_and_runs_alone_if_another_program_fills_the_gpu(run: Run) -> None:
    """The lease is granted while memory is free. The other program starts later and takes no lease."""
    begun, then, full = run.folder / "begun", run.folder / "then", run.folder / "full"
    options = {"gpu_memory": "3GiB", "name": "ours"}
    ours = run.start(task="take_when", args=[str(begun), str(then), 2 * GIB], options=options)
    run.wait_for(begun.exists, "our worker")
    # Even with the context of our worker, which ends, the free memory is less than any lease needs.
    other = run.start(fill=128 * MIB, begun=str(full))
    run.wait_for(full.exists, "the other program")
    then.touch()
    run.wait_for(lambda: run.events("out_of_memory"), "the first try's end")
    # Give a wrong retry time to start.
    time.sleep(1)
    assert len(run.leases()) == 1, "the call was retried on a full GPU"
    run.started.remove(other)
    other.kill()
    other.communicate()
    assert result(ours) is True
    (out,) = run.events("out_of_memory")
    assert (out["kind"], out["then"]) == ("card_full", "again")
    assert [lease["alone"] for lease in run.leases()] == [False, True]


def test_a_call_too_large_for_every_gpu_runs_on_the_cpu_if_allowed(run: Run) -> None:
    assert run.gpu.total_bytes is not None
    nbytes = 2 * run.gpu.total_bytes
    task = "on_gpu_tasks:more_than_there_is"
    assert run_in_worker(task, nbytes, gpu_memory="1GiB", on_oom="cpu") == "cpu"
    outs = run.events("out_of_memory")
    assert [out["then"] for out in outs] == ["again"] * (len(outs) - 1) + ["on the CPU"]
    assert run.leases()[-1]["alone"]


def test_four_quarters_can_be_filled_at_the_same_time_and_a_fifth_waits(run: Run) -> None:
    """All memory that the leases promise is available at the same time, contexts included."""
    # This call measures the context.
    run_in_worker("on_gpu_tasks:take", GIB, gpu_memory="2GiB")
    folder = run.folder / "there"
    folder.mkdir()
    task = "take_nearly_all_of_the_lease"
    options = [{"num_gpus": 0.25, "name": str(number)} for number in range(5)]
    calls = [run.start(task=task, args=[str(folder), 4], options=options[number]) for number in range(4)]
    run.wait_for(lambda: len(run.leases()) == 5, "the fourth lease")
    fifth = run.start(task="device", args=[], options=options[4])
    sizes = [result(call) for call in calls]
    print(f"{run.gpu.name}: four workers held {[round(size / MIB) for size in sizes]} MiB")
    assert result(fifth) == "cuda:0"
    release_times = [
        event["time"] for event in run.events("lease_released") if event["client"] in ("0", "1", "2", "3")
    ]
    (fifth_lease,) = (lease for lease in run.leases() if lease["client"] == "4")
    assert fifth_lease["time"] >= min(release_times) - 1, "five quarters were leased at the same time"
    assert run.events("out_of_memory") == []


@pytest.mark.parametrize(("policy", "expected"), [("never", "cpu"), ("require", "cuda:0")])
def test_the_nodes_policy_decides_what_a_worker_sees(policy: str, expected: str, run: Run) -> None:
    assert run_in_worker("on_gpu_tasks:device", gpu=policy, num_gpus=0.25) == expected
    assert len(run.leases()) == (policy != "never")


# Memory after a call ----------------------------------------------------------------------------------------

#: Tolerance for other programs on the GPU.
_TOLERANCE_BYTES = 4 * 1024**2


def level() -> int:
    try:
        return on_gpu_tasks.used_bytes()
    # NVML has many errors, for example for a missing library, driver or GPU.
    except Exception as error:
        pytest.skip(f"no NVIDIA GPU: {type(error).__name__}: {error}")


def assert_back_at(before: int) -> None:
    # The driver frees the memory of a dead process with a delay.
    deadline = time.monotonic() + 5
    while (now := on_gpu_tasks.used_bytes()) > before + _TOLERANCE_BYTES and time.monotonic() < deadline:
        time.sleep(0.05)
    print(f"used before {before / 1e6:.1f} MB, after {now / 1e6:.1f} MB")
    assert now <= before + _TOLERANCE_BYTES


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.card(SAME))])
def test_memory_is_freed_after_every_call_and_the_fork_server_never_opens_the_gpu(method: str) -> None:
    """The workers train on the GPU, but the server that forks them must not open its device files."""
    before = level()
    client = GPUClient("on_gpu_tasks:train", start_method=method)
    for _ in range(2 if method == "forkserver" else 1):
        _, _, metrics = client.fit([np.zeros(3, np.float32)], {})
        print(f"{method}: used during the call {metrics['used_bytes'] / 1e6:.1f} MB")
        assert metrics["used_bytes"] >= before + on_gpu_tasks.GIB
        assert_back_at(before)
    servers = [status for status in control.status() if status.users]
    assert servers or method == "spawn"
    for server in servers:
        opened = [str(link.readlink()) for link in Path(f"/proc/{server.pid}/fd").iterdir()]
        assert [path for path in opened if path.startswith("/dev/nvidia")] == []


def test_memory_is_freed_after_a_worker_died() -> None:
    before = level()
    client: Any = GPUClient("on_gpu_tasks:train_and_die", start_method="forkserver")
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        client.fit([np.zeros(3, np.float32)], {})
    assert_back_at(before)
