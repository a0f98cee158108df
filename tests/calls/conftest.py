"""Hosts for the tests of calls. All hosts share one fork server, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls_host import CallsHost


@pytest.fixture(scope="session")
def calls_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("calls")
    state = folder / "state"
    state.mkdir(mode=0o700)
    yield folder
    env = {**os.environ, "FLOWER_GPU_STATE_DIR": str(state)}
    subprocess.run(
        [sys.executable, "-m", "flower_gpu.cli", "workers", "stop"], env=env, capture_output=True, timeout=150
    )


@pytest.fixture
def calls_host(tmp_path: Path, calls_folder: Path) -> Iterator[CallsHost]:
    """A host with one GPU of 16 GiB."""
    host = CallsHost(tmp_path, calls_folder / "state")
    yield host
    host.close()
