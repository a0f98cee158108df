"""The benchmarks run, tiny, and write rows of the shape that is promised. No time is asserted."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from shared_servers import SHARED_STATE

from flower_gpu import run_in_worker

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY))  # where `python -m benchmarks.NAME` is to be started


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run a benchmark in a process of its own, and return what it has written down.

    They use one fork server, which is started here: a benchmark ends those that it has started.
    """
    if sys.platform != "linux":
        pytest.skip("the benchmarks read /proc")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHARED_STATE.items():
            patch.setenv(name, value)
        run_in_worker("os:getpid", start_method="forkserver")
    shared = {**SHARED_STATE, "BENCHMARKS_QUICK_STATE_DIR": SHARED_STATE["FLOWER_GPU_STATE_DIR"]}

    def run(name: str, *options: object, env: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        file = tmp_path_factory.mktemp(name) / "figures.json"
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file), *map(str, options)],
            cwd=REPOSITORY,
            env={**os.environ, **shared, "OMP_NUM_THREADS": "1", **env},  # tests run beside each other
            capture_output=True,
            text=True,
            timeout=450,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        result: dict[str, Any] = json.loads(file.read_text())
        assert result["failed"] == {} and result["machine"]["cpus"] >= 1
        assert {"python", "torch", "flwr", "ray", "kernel", "gpus"} <= result["machine"].keys()
        return result

    return run


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Start a benchmark in this process with wrong options. Return its exit status and what it says.

    What gets past its options would become the parent of orphans, and take variables out of the environment.
    """

    def start(name: str, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(SystemExit) as exit_:
            sys.exit(importlib.import_module(f"benchmarks.{name}.__main__").main())
        status = exit_.value.code
        assert isinstance(status, int)
        return status, capsys.readouterr().err

    return start
