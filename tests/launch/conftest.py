"""Fixtures for the launcher's tests: a Flower app without torch, and `flower-gpu launch` as a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from launch_helpers import COMMAND, TINY_APP, LaunchRun, PlanOn
from nvml_stub import Host
from run_programs import run_python
from waiting import until

PLANS = """
import json, os, sys
from flower_gpu.cli import main as cli
from flower_gpu.cli.launch import from_arguments
from flower_gpu.errors import ConfigError
from flower_gpu.launch.plan import Plan, make_plan

app, each, lines = json.load(sys.stdin)
original_node_config = Plan.node_config_of
# Acts as if the launcher had an option for extra node config keys of each client.
Plan.node_config_of = lambda plan, client: {
    **original_node_config(plan, client), **(each[client] if each else {})
}

def plan(line, variables):
    os.environ.update(variables)
    try:
        arguments = cli.build_parser().parse_args(["launch", app, *line.split()])
        return [list(make_plan(from_arguments(arguments)).remarks), None]
    except ConfigError as error:
        return [None, str(error)]
    finally:
        for name in variables:
            del os.environ[name]

print(json.dumps([plan(*line) for line in lines]))
"""

#: The tests use fork servers of their own, never the user's, so launches keep these variables.
KEPT_VARIABLES = ("FLOWER_GPU_STATE_DIR", "FLOWER_GPU_LEDGER_DIR", "FLOWER_GPU_SERVER_IDLE_S")


@pytest.fixture
def tiny_app(tmp_path: Path) -> Path:
    """A copy of the app ``tiny_app``, which a test may change."""
    return Path(shutil.copytree(TINY_APP, tmp_path / "tiny_app"))


@pytest.fixture
def plan_on(tiny_app: Path, tmp_path: Path) -> PlanOn:
    """Plan all command lines in one process, on a host with stub GPUs, or without GPUs if it is None."""
    pyproject = tiny_app / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('text = ""', 'text = ""\nuse-gpu = true'))

    def plan(
        host: Host | None,
        *lines: str | tuple[str, dict[str, str]],
        each: Sequence[Mapping[str, object]] = (),
        **variables: str,
    ) -> list[tuple[list[str] | None, str | None]]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOWER_GPU")}
        kept.pop("CUDA_VISIBLE_DEVICES", None)
        host_without_gpus = Host(tmp_path / "no-gpus", gpus=0)
        folders = {"FLOWER_GPU_STATE_DIR": str(tmp_path / "state"), "FLOWER_GPU_LEDGER_DIR": str(tmp_path)}
        pairs = [(line, variables) if isinstance(line, str) else line for line in lines]
        done = run_python(
            PLANS,
            input=json.dumps([str(tiny_app), each, pairs]),
            env={**kept, **folders, **(host or host_without_gpus).env},
        )
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
        assert len(answers) == len(lines)
        return [(remarks, refused) for remarks, refused in answers]

    return plan


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LaunchRun]]:
    """Start `flower-gpu launch`, and check at the end of the file that all its processes are gone."""
    started: list[LaunchRun] = []

    def start(
        *arguments: str | Path,
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
        resume: Path | None = None,
    ) -> LaunchRun:
        log_dir = tmp_path_factory.mktemp("launch") / "runs" if resume is None else resume.parent
        folder_option = ("--log-dir", log_dir) if resume is None else ("--resume", resume)
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("FLOWER_GPU") or key in KEPT_VARIABLES
        }
        process = subprocess.Popen(
            [python, *COMMAND, *map(str, [*arguments, *folder_option])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=log_dir.parent,
            env={**inherited, **(env or {})},
        )
        started.append(LaunchRun(log_dir, process))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.communicate(timeout=60)
    until(lambda: not any(run.processes() for run in started), "every process of the runs is gone")
