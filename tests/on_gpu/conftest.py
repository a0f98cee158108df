"""On a card all of these tests run; on the stand-in for CUDA (tests/cuda_stub) those that need no card."""

from __future__ import annotations

import gpu_hosts
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if gpu_hosts.is_stand_in():
        for item in items:
            for marker in item.iter_markers("card"):
                item.add_marker(pytest.mark.skip(reason=f"not on a stand-in: {marker.args[0]}"))
