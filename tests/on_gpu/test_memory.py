"""After every call, the GPU's used memory returns to its level before the call, as reported by NVML."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_gpu import GPUClient, WorkerDiedError
from flower_gpu.workers.forkserver import control

sys.path.insert(0, str(Path(__file__).parent))  # workers get the caller's sys.path

import on_gpu_tasks
from gpu_hosts import SAME

pytestmark = pytest.mark.gpu

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
