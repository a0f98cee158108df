"""On a card all of these tests run; on the stand-in for CUDA (tests/cuda_stub) those that need no card."""

from __future__ import annotations

import gpu_hosts
import pytest

from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU

GIB = 2**30


@pytest.fixture(scope="session")
def gpus() -> list[GPU]:
    """GPUs with room for these tests."""
    found = inventory.take()
    inventory.close()
    free = [one for one in found.usable if (one.free_bytes or 0) > 8 * GIB]
    if not free:
        pytest.skip(f"no NVIDIA GPU with 8 GiB free: {found.problem}")
    return free


@pytest.fixture(scope="session")
def gpu(gpus: list[GPU]) -> GPU:
    """One of them."""
    return gpus[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if gpu_hosts.is_stand_in():
        for item in items:
            for marker in item.iter_markers("card"):
                item.add_marker(pytest.mark.skip(reason=f"not on a stand-in: {marker.args[0]}"))
