"""Fixtures of the launcher's tests: a Flower app without torch, and `flower-gpu launch` as a process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_helpers import processes_of, wait_until

Launch = Callable[..., "subprocess.Popen[str]"]

#: The fork servers of the tests are none of the user's.
KEPT = ("FLOWER_GPU_STATE_DIR", "FLOWER_GPU_SERVER_IDLE_S")

COMMAND = [sys.executable, "-P", "-m", "flower_gpu.cli", "launch"]


@pytest.fixture
def tiny_app(tmp_path: Path) -> Path:
    """A copy of the app ``tiny_app``, which a test may change."""
    return Path(shutil.copytree(Path(__file__).parent / "tiny_app", tmp_path / "tiny_app"))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start `flower-gpu launch`; at the end of the test nothing of it may be left."""
    started: list[subprocess.Popen[str]] = []
    log_dir = tmp_path / "runs"

    def start(*arguments: str | Path, engine: str = "start-client") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments), "--engine", engine, "--log-dir", str(log_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                key: value
                for key, value in os.environ.items()
                if not key.startswith("FLOWER_GPU") or key in KEPT
            },
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
    wait_until(lambda: not processes_of(log_dir), "every process of the run is gone")
