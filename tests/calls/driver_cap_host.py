"""A host whose driver caps workers: stand-ins of NVML and CUDA, and a real control group for callers."""

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

# Runs calls one after the other: task, arguments, options; prints their results, or their errors.
CALLER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from flower_gpu import run_in_worker
for task, arguments, options in json.loads(sys.argv[2]):
    try:
        found = run_in_worker(f"driver_cap_tasks:{task}", *arguments, **options)
    except Exception as error:
        found = [type(error).__name__, str(error)]
    print(json.dumps(found), flush=True)
"""
SPAWNED = {"start_method": "spawn", "gpu": "require", "gpu_memory": "3GiB"}


class Host:
    """Cards, a ledger, and the control group that callers are in."""

    def __init__(self, cards: cuda_stub.Host, folder: Path, group: Path) -> None:
        self.cards, self.folder, self.group = cards, folder, group
        self.env = {**os.environ, **cards.env, "FLOWER_GPU_RUN_DIR": str(folder)}
        for name in ("LEDGER", "STATE"):
            made = folder / name
            made.mkdir()
            made.chmod(0o1777 if name == "LEDGER" else 0o700)
            self.env[f"FLOWER_GPU_{name}_DIR"] = str(made)

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a program in the group."""
        joined = f'echo $$ > {self.group}/cgroup.procs && exec "$@"'
        return subprocess.Popen(
            ["sh", "-c", joined, "sh", *command],
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

    def left(self) -> list[str]:
        """Return the groups of workers."""
        return [path.name for path in self.group.glob("flower-gpu-*")]

    def reserved(self) -> int:
        """Return what groups of workers that are there have reserved on the first card."""
        lines = [path.read_text().split() for path in (self.cards.folder / "limits").glob("0*")]
        return sum(int(soft) for soft, _, group in lines if Path(group).exists())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in trace.read(self.folder / trace.FILE_NAME) if event["event"] == kind]


@contextmanager
def host_in_group(cards: cuda_stub.Host, folder: Path) -> Iterator[Host]:
    """Yield a host with a new control group; skips the test where there can be none."""
    groups = control_group.unified()
    group = groups[-1] / f"test-{os.getpid()}" if groups else folder
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control groups of version 2, or no right to make one")
    try:
        yield Host(cards, folder, group)
    finally:
        for left in (*group.glob("*/"), group):
            left.rmdir()
