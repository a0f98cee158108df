"""Ranks on real GPUs use NCCL, see one GPU each, learn the same result, and free all memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_gpu import GPUClient, run_in_worker
from flower_gpu.errors import GPUOutOfMemoryError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU

sys.path.insert(0, str(Path(__file__).parent))  # workers get the caller's sys.path

MIB = 2**20

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
needs_nccl = pytest.mark.card("NCCL has a runtime of its own")


@pytest.fixture(scope="module")
def weights(gpus: list[GPU]) -> Any:
    return run_in_worker("on_gpu_rank_tasks:first_weights", gpu="never")


def fit(name: str, weights: Any, num_gpus: int, way: str = "") -> Any:
    return GPUClient(f"on_gpu_rank_tasks:{name}", num_gpus=num_gpus, gpu="require").fit(weights, {"way": way})


def used() -> list[int]:
    snapshot = inventory.take()
    inventory.close()
    return [gpu.used_bytes or 0 for gpu in snapshot.usable]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_one_rank_gives_the_result_of_undistributed_training(way: str, weights: Any) -> None:
    expected, _, _ = fit("train", weights, 1)
    learned, _, report = fit("in_ranks", weights, 1, way)
    assert (report["world"], report["devices"], report["backend"]) == (1, 1, "")
    assert all(np.array_equal(a, b) for a, b in zip(expected, learned, strict=True))


@needs_nccl
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_gpus_learn_the_same_as_one(way: str, weights: Any, gpus: list[GPU]) -> None:
    if len(gpus) < 2:
        pytest.skip(f"needs two GPUs, there is {len(gpus)}")
    used_before = used()
    expected, _, _ = fit("train", weights, 1)
    learned, _, report = fit("in_ranks", weights, 2, way)
    assert (report["world"], report["devices"], report["backend"]) == (2, 1, "nccl")
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, learned, strict=True))
    assert difference < 1e-4
    assert all(after - before < 64 * MIB for after, before in zip(used(), used_before, strict=True))


@needs_nccl
def test_nccl_works_in_a_group_of_one(gpus: list[GPU]) -> None:
    report = run_in_worker("on_gpu_rank_tasks:nccl_alone", num_gpus=1, gpu="require")
    assert report["backend"] == "nccl"
    assert report["sum"] == [1, 1, 1]
    assert report["objects"] == [{"a": 1}]
    assert report["is_sharded"]
    assert report["difference"] == 0


def test_a_rank_that_runs_out_of_memory_is_named(gpus: list[GPU]) -> None:
    used_before = used()
    with pytest.raises(GPUOutOfMemoryError) as caught:
        run_in_worker("on_gpu_rank_tasks:takes_too_much", num_gpus=min(len(gpus), 2), gpu="require")
    assert len(gpus) < 2 or "rank 1: out of memory" in str(caught.value)
    assert all(after - before < 64 * MIB for after, before in zip(used(), used_before, strict=True))
