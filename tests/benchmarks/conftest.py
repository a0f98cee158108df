"""Fixtures that run tiny benchmarks. The tests check the shape of their rows, and never a time."""

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

# `python -m benchmarks.NAME` must be started in this folder.
sys.path.insert(0, str(REPOSITORY))


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """A function that runs a benchmark in a separate process and returns its figures.

    All benchmarks use one fork server. It is started here, because a benchmark stops a server that it starts.
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
        process = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file), *map(str, options)],
            cwd=REPOSITORY,
            # Tests run in parallel, so each benchmark uses one thread.
            env={**os.environ, **shared, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
            timeout=450,
        )
        assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
        result: dict[str, Any] = json.loads(file.read_text())
        assert result["failed"] == {} and result["machine"]["cpus"] >= 1
        assert {"python", "torch", "flwr", "ray", "kernel", "gpus"} <= result["machine"].keys()
        return result

    return run


@pytest.fixture
def run_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """A function that starts a benchmark in this process with invalid options.

    It returns the exit status and the output on stderr.

    A benchmark that accepted its options would make this process adopt orphans and remove its variables.
    """

    def start(name: str, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(SystemExit) as exit_:
            sys.exit(importlib.import_module(f"benchmarks.{name}.__main__").main())
        status = exit_.value.code
        assert isinstance(status, int)
        return status, capsys.readouterr().err

    return start
