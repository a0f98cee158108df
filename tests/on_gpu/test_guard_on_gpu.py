"""The GPU guard with NVIDIA's driver: CUDA works with the device files of a lease, and fails without them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flower_gpu import run_in_worker
from flower_gpu.calls.grants import guard
from flower_gpu.gpu.gpus import GPU

sys.path.insert(0, str(Path(__file__).parent))  # workers get the caller's sys.path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.card("there are no device files"),
    pytest.mark.skipif(guard.problem() is not None, reason=f"no guard: {guard.problem()}"),
]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_lease_opens_only_its_own_gpu(gpu: GPU, method: str) -> None:
    files, total = run_in_worker(
        "on_gpu_tasks:summed_on_the_gpu", gpu_ids=gpu.uuid, num_gpus=0.25, start_method=method
    )
    assert total == 1000
    assert gpu.device_files is not None
    leased = {Path(path).name for path in gpu.device_files}
    assert {name for name in files if re.fullmatch(r"nvidia\d+", name)} == leased & set(files) != set()
    assert "nvidiactl" in files


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_policy_never_opens_no_gpu(gpu: GPU, method: str) -> None:
    assert run_in_worker("on_gpu_tasks:opened", gpu="never", start_method=method) == []
    error = run_in_worker(
        "on_gpu_tasks:cuda_after_the_variable_was_changed", gpu.uuid, gpu="never", start_method=method
    )
    assert error
