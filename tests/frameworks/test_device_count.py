"""A worker counts its GPUs before CUDA starts, on a host with another card that cannot be opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stub
import pytest
from nvml_stub import NO_PERMISSION

pytestmark = pytest.mark.timeout(400)

TASK = """
import os, warnings

def task():
    import torch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first_count = torch.cuda.device_count()
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    is_bad_fork = bool(os.waitpid(pid, 0)[1])
    device = torch.zeros(1, device="cuda").device.index
    messages = [str(warning.message) for warning in caught]
    return first_count, torch.cuda.device_count(), is_bad_fork, device, messages
"""
CALL = """
import json, os, sys
sys.path.insert(0, os.path.dirname(__file__))
from flower_gpu import run_in_worker

for method in ("spawn", "forkserver"):
    options = {"gpu": "require", "gpu_memory": "2GiB", "start_method": method}
    print(json.dumps(run_in_worker("counting_task:task", **options)))
"""


def test_a_worker_counts_only_its_own_gpu(
    cuda_host: Callable[..., cuda_stub.Host],
    run_script: Callable[..., Any],
    write_script: Callable[..., Path],
) -> None:
    """PyTorch's own count would warn about the other card and start CUDA, which forks could not use then."""
    host = cuda_host(gpus=2)
    host.fail("nvmlDeviceGetHandleByIndex_v2", NO_PERMISSION, 0)
    write_script(TASK, "counting_task.py")
    completed = run_script(CALL, env=host.env, timeout_s=380)
    assert [json.loads(line) for line in completed.stdout.splitlines()] == [[1, 1, False, 0, []]] * 2
