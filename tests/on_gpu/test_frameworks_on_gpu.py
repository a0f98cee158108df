"""On a real GPU: TensorFlow and JAX held to their leases, next to a PyTorch worker (memory by NVML)."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flower_gpu.calls import environment, leased_worker
from flower_gpu.errors import WorkerTaskError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.workers import caller as worker
from flower_gpu.workers.call import Call

sys.path.insert(0, str(Path(__file__).parent))  # workers get the caller's sys.path

GIB = 2**30
CAP = 2 * GIB
CONTEXT = GIB  # of each library: CUDA's context, kernels, and what cuDNN and cuBLAS take themselves

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

OTHERS = ["tensorflow", "jax"]


@pytest.fixture
def library(request: pytest.FixtureRequest, gpu: GPU) -> str:
    """A library that can use the GPU: builds for the CPU are usual where tests run."""
    name: str = request.param
    if (gpu.free_bytes or 0) < 12 * GIB:
        pytest.skip("no NVIDIA GPU with 12 GiB free")
    if not find_spec(name) or call("sees_gpu", "spawn", gpu, name)[0] is not True:
        pytest.skip(f"needs {name} with CUDA")
    return name


def look() -> Any:
    found = inventory.take()
    inventory.close()
    return found


def call(task: str, method: str, gpu: GPU, *args: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Run a task in a worker with a lease; return its result or error, and the last event of each kind."""
    assert gpu.total_bytes is not None
    share = Share(gpu.uuid, gpu.index, gpu.name, gpu.total_bytes, CAP + CONTEXT, CAP)
    env = environment.of_worker(Lease("test", (share,)), os.environ)
    events: dict[str, dict[str, Any]] = {}
    prepared = Call(f"framework_gpu_tasks:{task}", args, {}, env=env, setup=leased_worker.SETUP)
    try:
        value = worker.run(
            prepared, method, timeout_s=300, on_event=lambda event: events.update({event["event"]: event})
        )
    except (RuntimeError, WorkerTaskError) as error:  # the latter where its library is not imported here
        value = error
    return value, events


def used_while_held(task: str, libraries: list[str], gpu: GPU, folder: Path) -> tuple[list[int], int]:
    """Run one worker for each library at once; return what each took, and what all had of the GPU."""
    before = look().find(gpu.uuid).free_bytes
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call, task, "spawn", gpu, library, str(folder)) for library in libraries]
        try:
            deadline = time.monotonic() + 200
            while not all((folder / library).exists() for library in libraries):
                failed = [each.result()[0] for each in calls if each.done()]
                assert not failed, failed
                assert time.monotonic() < deadline, "the workers took too long"
                time.sleep(0.1)
            during = look().find(gpu.uuid).free_bytes
        finally:
            (folder / "go").touch()
        taken = [each.result()[0] for each in calls]
    print(f"{gpu.name}: {dict(zip(libraries, taken, strict=True))} bytes, {before - during} by NVML")
    return taken, before - during


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("library", OTHERS, indirect=True)
def test_more_than_the_cap_is_refused_and_less_is_not(library: str, method: str, gpu: GPU) -> None:
    taken, events = call("take", method, gpu, library, CAP // 2)
    assert taken == CAP // 2, taken
    assert "out_of_memory" not in events
    error, events = call("take", method, gpu, library, 2 * CAP)
    assert isinstance(error, Exception)
    assert events["out_of_memory"]["uuid"] == gpu.uuid


@pytest.mark.parametrize("library", OTHERS, indirect=True)
def test_no_more_is_taken_than_is_needed(library: str, gpu: GPU, tmp_path: Path) -> None:
    _, used = used_while_held("take_little_and_hold", [library], gpu, tmp_path)
    assert used < CONTEXT + CAP // 4


@pytest.mark.parametrize("library", OTHERS, indirect=True)
def test_each_keeps_to_its_lease_next_to_a_torch_worker(library: str, gpu: GPU, tmp_path: Path) -> None:
    taken, used = used_while_held("take_all_and_hold", [library, "torch"], gpu, tmp_path)
    for nbytes in taken:
        assert CAP // 2 < nbytes <= CAP
    assert used <= 2 * (CAP + CONTEXT)
