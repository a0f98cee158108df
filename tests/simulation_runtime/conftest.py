"""Hosts for the tests of simulations. They share a fork server, and everything else is separate."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation_host import NewHost, SimulationHost
from waiting import until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is None:
        skipped = pytest.mark.skip(reason="Ray is not installed: pip install 'flwr[simulation]'")
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(skipped)


@pytest.fixture(scope="module")
def new_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewHost]:
    """Create hosts. When the module's tests are done, no process of their simulations may remain."""
    hosts = []

    def new(gpus: int = 2) -> SimulationHost:
        hosts.append(SimulationHost(tmp_path_factory.mktemp("host"), gpus))
        return hosts[-1]

    yield new
    try:
        for host in hosts:
            host.end_programs()
            until(host.has_no_process, host.ray)
            assert not host.status().holders
    finally:
        for host in hosts:
            host.close()
