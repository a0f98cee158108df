"""Calls that the driver caps, on stand-ins for NVML and CUDA, and in a real control group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cuda_stub
import pytest

from flower_gpu import control_group, trace

# Runs calls one after the other, each given as task, arguments and options. Prints their results or errors.
CALLER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from flower_gpu import run_in_worker
for task, arguments, options in json.loads(sys.argv[2]):
    try:
        result = run_in_worker(f"host_tasks:{task}", *arguments, **options)
    except Exception as error:
        result = [type(error).__name__, str(error)]
    print(json.dumps(result), flush=True)
"""
SPAWNED = {"start_method": "spawn", "gpu": "require", "gpu_memory": "3GiB"}


class CallsInGroup:
    """Calls on a stub host, whose callers run in a control group."""

    def __init__(self, gpus: cuda_stub.Host, folder: Path, group: Path) -> None:
        self.gpus, self.folder, self.group = gpus, folder, group
        (state := folder / "state").mkdir(mode=0o700)
        variables = {"FLOWER_GPU_RUN_DIR": str(folder), "FLOWER_GPU_STATE_DIR": str(state)}
        self.env = {**os.environ, **gpus.env, **variables}

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a program in the control group."""
        script = f'echo $$ > {self.group}/cgroup.procs && exec "$@"'
        return subprocess.Popen(
            ["sh", "-c", script, "sh", *command],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **env: str) -> str:
        with self.start(*command, **env) as program:
            out, err = program.communicate(timeout=200)
        assert program.returncode == 0, err
        return out

    def calls(self, *calls: tuple[str, list[Any], dict[str, Any]], **env: str) -> list[Any]:
        script = [sys.executable, "-c", CALLER, str(Path(__file__).parent), json.dumps(calls)]
        return [json.loads(line) for line in self.run(*script, **env).splitlines()]

    def remaining_groups(self) -> list[str]:
        """Return the names of the remaining control groups of workers."""
        return [path.name for path in self.group.glob("flower-gpu-*")]

    def reserved(self) -> int:
        """Return the bytes of the first GPU that existing control groups have reserved."""
        lines = [path.read_text().split() for path in (self.gpus.folder / "limits").glob("0*")]
        return sum(int(soft) for soft, _, group in lines if Path(group).exists())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in trace.read(self.folder / trace.FILE_NAME) if event["event"] == kind]


@contextmanager
def calls_in_group(gpus: cuda_stub.Host, folder: Path) -> Iterator[CallsInGroup]:
    """Yield calls in a new control group. Skips the test if no group can be created."""
    groups = control_group.unified()
    group = groups[-1] / f"test-{os.getpid()}" if groups else folder
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control groups of version 2, or no right to make one")
    try:
        yield CallsInGroup(gpus, folder, group)
    finally:
        for remaining in (*group.glob("*/"), group):
            remaining.rmdir()
