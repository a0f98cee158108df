"""Fixtures of the tests on a GPU. The stand-in for CUDA (tests/cuda_stub) skips tests marked "card"."""

from __future__ import annotations

import gpu_hosts
import pytest

from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU

GIB = 2**30


@pytest.fixture(scope="session")
def gpus() -> list[GPU]:
    """GPUs with enough free memory for these tests."""
    snapshot = inventory.take()
    inventory.close()
    free = [gpu for gpu in snapshot.usable if (gpu.free_bytes or 0) > 8 * GIB]
    if not free:
        pytest.skip(f"no NVIDIA GPU with 8 GiB free: {snapshot.problem}")
    return free


@pytest.fixture(scope="session")
def gpu(gpus: list[GPU]) -> GPU:
    """A GPU with enough free memory for these tests."""
    return gpus[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if gpu_hosts.is_stand_in():
        for item in items:
            for marker in item.iter_markers("card"):
                item.add_marker(pytest.mark.skip(reason=f"not on a stand-in: {marker.args[0]}"))
