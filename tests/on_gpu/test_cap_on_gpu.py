"""On a real GPU: a worker gets no more than its lease, is told so cleanly, and its context is counted."""

from __future__ import annotations

import os
import sys
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

import cap_tasks

GIB = 2**30
CAP = 1 * GIB
CONTEXT = GIB // 2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def gpu() -> GPU:
    found = inventory.take()
    inventory.close()
    free = [gpu for gpu in found.usable if (gpu.free_bytes or 0) > 6 * GIB]
    if not free:
        pytest.skip(f"no NVIDIA GPU with 6 GiB free: {found.problem}")
    return free[0]


def call(
    task: str, method: str, gpu: GPU, *args: Any, cap_bytes: int = CAP, **user: str
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Run a task in a worker with a lease; return its result or error, and the last event of each kind."""
    assert gpu.total_bytes is not None
    share = Share(gpu.uuid, gpu.index, gpu.name, gpu.total_bytes, cap_bytes + CONTEXT, cap_bytes)
    env = {**user, **environment.of_worker(Lease("test", (share,)), {**os.environ, **user})}
    events: dict[str, dict[str, Any]] = {}
    prepared = Call(f"cap_tasks:{task}", args, {}, env=env, setup=leased_worker.SETUP)
    try:
        value = worker.run(
            prepared, method, timeout_s=120, on_event=lambda event: events.update({event["event"]: event})
        )
    except (RuntimeError, WorkerTaskError) as error:  # the latter where torch is not imported here
        value = error
    return value, events


def kind_of(error: Any) -> str:
    name: str = getattr(error, "error_type", type(error).__name__)
    return name.rpartition(".")[2]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_more_than_the_cap_is_refused_and_less_is_not(method: str, gpu: GPU) -> None:
    taken, events = call("take", method, gpu, CAP // 2)
    assert taken == CAP // 2
    figures = events["gpu_memory"]["gpus"][0]
    assert 0.97 * CAP < figures["cap_in_force_bytes"] <= CAP
    assert CAP // 2 <= figures["reserved_peak_bytes"] <= CAP

    error, events = call("take", method, gpu, 2 * CAP)
    assert kind_of(error) == "OutOfMemoryError"
    told = events["out_of_memory"]
    assert told["kind"] == "over_cap"
    assert told["asked_bytes"] == 2 * CAP
    assert told["cap_bytes"] == CAP
    assert told["free_bytes"] > 2 * CAP
    assert told["uuid"] == gpu.uuid


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_can_take_all_of_its_cap_in_pieces_and_no_more(method: str, gpu: GPU) -> None:
    taken, events = call("take_all", method, gpu, 32 * 2**20)
    assert 0.9 * CAP <= taken <= CAP
    assert events["gpu_memory"]["gpus"][0]["reserved_peak_bytes"] <= CAP
    assert "out_of_memory" not in events  # the task has dealt with it


def test_the_users_smaller_cap_stays(gpu: GPU) -> None:
    part = CAP / 2 / (gpu.total_bytes or 1)
    _, events = call(
        "take", "forkserver", gpu, 2**20, PYTORCH_ALLOC_CONF=f"per_process_memory_fraction:{part:f}"
    )
    assert events["gpu_memory"]["gpus"][0]["cap_in_force_bytes"] <= CAP // 2 + 2**20


def test_a_module_that_sets_its_own_settings_is_capped_all_the_same(gpu: GPU) -> None:
    error, _ = call("take_with_settings_of_its_own", "spawn", gpu, 2 * CAP)
    assert kind_of(error) == "OutOfMemoryError"


def test_the_context_is_counted(gpu: GPU) -> None:
    _, events = call("take", "forkserver", gpu, CAP // 2)
    figures = events["gpu_memory"]["gpus"][0]
    assert events["gpu_memory"]["cuda"] is True
    print(f"{gpu.name}: context {figures['context_bytes']}")
    counted = figures["context_bytes"] or CONTEXT  # not told in a container
    assert 50 * 2**20 < counted < 2 * GIB
    assert figures["peak_bytes"] >= figures["reserved_peak_bytes"] + counted


def test_each_worker_sees_its_own_gpu_only(gpu: GPU) -> None:
    assert call("visible", "spawn", gpu)[0] == 1
    assert cap_tasks.hidden_count() == 0
