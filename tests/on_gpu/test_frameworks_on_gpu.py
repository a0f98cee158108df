"""TensorFlow and JAX on a real GPU stay within their leases next to a PyTorch worker, measured by NVML."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flower_gpu.calls import grants
from flower_gpu.errors import WorkerTaskError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.workers import caller as worker
from flower_gpu.workers.call import Call

sys.path.insert(0, str(Path(__file__).parent))  # workers get the caller's sys.path

GIB = 2**30
CAP = 2 * GIB
#: Allowance for the CUDA context, kernels, cuDNN and cuBLAS of each library.
CONTEXT = GIB

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

OTHERS = ["tensorflow", "jax"]


@pytest.fixture
def library(request: pytest.FixtureRequest, gpu: GPU) -> str:
    """A library that can use the GPU. Machines that run tests usually have builds for the CPU."""
    name: str = request.param
    if (gpu.free_bytes or 0) < 12 * GIB:
        pytest.skip("no NVIDIA GPU with 12 GiB free")
    if not find_spec(name) or call("sees_gpu", "spawn", gpu, name)[0] is not True:
        pytest.skip(f"needs {name} with CUDA")
    return name


def take_inventory() -> Any:
    snapshot = inventory.take()
    inventory.close()
    return snapshot


def call(task: str, method: str, gpu: GPU, *args: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Run a task in a worker with a lease. Return its result or error, and the last event of each kind."""
    assert gpu.total_bytes is not None
    share = Share(gpu.uuid, gpu.index, gpu.name, gpu.total_bytes, CAP + CONTEXT, CAP)
    env = grants.of_lease(Lease("test", (share,)), os.environ)
    events: dict[str, dict[str, Any]] = {}
    prepared = Call(f"framework_gpu_tasks:{task}", args, {}, env=env, setup=grants.SETUP)
    try:
        value = worker.run(
            prepared, method, timeout_s=300, on_event=lambda event: events.update({event["event"]: event})
        )
    # An error class of a library that is not imported in this process arrives as WorkerTaskError.
    except (RuntimeError, WorkerTaskError) as error:
        value = error
    return value, events


def used_while_held(task: str, libraries: list[str], gpu: GPU, folder: Path) -> tuple[list[int], int]:
    """Run a worker for each library at once. Return the bytes of each worker, and their sum by NVML."""
    free_before = take_inventory().find(gpu.uuid).free_bytes
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call, task, "spawn", gpu, library, str(folder)) for library in libraries]
        try:
            deadline = time.monotonic() + 200
            while not all((folder / library).exists() for library in libraries):
                failed = [call.result()[0] for call in calls if call.done()]
                assert not failed, failed
                assert time.monotonic() < deadline, "the workers took too long"
                time.sleep(0.1)
            free_during = take_inventory().find(gpu.uuid).free_bytes
        finally:
            (folder / "go").touch()
        taken = [call.result()[0] for call in calls]
    used = free_before - free_during
    print(f"{gpu.name}: {dict(zip(libraries, taken, strict=True))} bytes, {used} by NVML")
    return taken, used


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("library", OTHERS, indirect=True)
def test_only_an_allocation_above_the_cap_is_refused(library: str, method: str, gpu: GPU) -> None:
    taken, events = call("take", method, gpu, library, CAP // 2)
    assert taken == CAP // 2, taken
    assert "out_of_memory" not in events
    error, events = call("take", method, gpu, library, 2 * CAP)
    assert isinstance(error, Exception)
    assert events["out_of_memory"]["uuid"] == gpu.uuid


@pytest.mark.parametrize("library", OTHERS, indirect=True)
def test_a_library_allocates_only_the_memory_it_needs(library: str, gpu: GPU, tmp_path: Path) -> None:
    _, used = used_while_held("take_little_and_hold", [library], gpu, tmp_path)
    assert used < CONTEXT + CAP // 4


@pytest.mark.parametrize("library", OTHERS, indirect=True)
def test_a_library_stays_within_its_lease_next_to_a_torch_worker(
    library: str, gpu: GPU, tmp_path: Path
) -> None:
    taken, used = used_while_held("take_all_and_hold", [library, "torch"], gpu, tmp_path)
    for nbytes in taken:
        assert CAP // 2 < nbytes <= CAP
    assert used <= 2 * (CAP + CONTEXT)
