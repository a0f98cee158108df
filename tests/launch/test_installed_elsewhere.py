"""Packages installed with ``pip install --target``, so their commands are not in the interpreter's folder."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import TINY_APP, LaunchRun
from run_programs import run

from flower_gpu.watch.history import History

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that has no packages or commands, so all come from PYTHONPATH.

    setproctitle is missing too, because it is optional: it only sets the names of processes.
    """
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "setproctitle.py").write_text("raise ModuleNotFoundError('it is not carried')\n")
    venv.create(tmp_path / "env", with_pip=False)
    packages = sysconfig.get_path("purelib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(missing), str(ROOT), packages]))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path / "env" / "bin" / Path(sys.executable).name


def contexts_in(log: Path) -> list[list[Any]]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("given ")]
    return [json.loads(line.removeprefix("given ")) for line in lines]


def test_an_app_from_start_to_result(launch: Callable[..., LaunchRun], interpreter: Path) -> None:
    options = ("--clients=1", "--learning-rate=0.5", "--start-method=in-process")
    configs = ("--run-config", "text='a \"b\" = c'", "--node-config", "site='north pole'")
    started = launch(TINY_APP, *options, *configs, python=interpreter)
    code, out, err = started.finish()
    assert (code, err) == (0, "")
    folder = started.folder
    assert "Traceback" not in (folder / "programs.log").read_text()
    assert out.startswith(f"tiny: 1 client, 2 rounds; logs in runs/{folder.name}\n")
    # The app itself writes a second trace event for the same evaluation, with the accuracy.
    assert re.search(
        r"^round 2/2  train +1/1 clients .+\nround 2/2  server-evaluate +loss 0.3333$", out, re.M
    )
    assert re.search(r"^server-evaluate +loss 0.3333, accuracy 0.6667$", out, re.M)
    result = json.loads((folder / "result.json").read_text())
    assert [row["round"] for row in result["rounds"]] == [1, 2]
    assert [row["loss"] for row in result["rounds"]] == [0.5, pytest.approx(1 / 3)]
    assert [(row["messages"], row["failed"]) for row in result["rounds"]] == [(1, 0), (1, 0)]
    assert result["initial"]["loss"] == 1.0
    workers = History.read(folder / "trace.jsonl").calls.workers
    assert [(worker.client, worker.start_method) for worker in workers] == [("0", "in-process")] * 2
    first, second = contexts_in(folder / "client-0.log")
    node_config, run_config, rounds = first
    assert node_config == {"partition-id": 0, "num-partitions": 1, "site": "north pole"}
    overrides = {"learning-rate": 0.5, "num-clients": 1, "text": 'a "b" = c'}
    assert run_config == {**run_config, **overrides}
    assert (rounds, second[2]) == (1, 2), "the state of a client lasts from round to round"


def test_flower_gpu_supernode_runs_flower_supernode(interpreter: Path, tmp_path: Path) -> None:
    command = [interpreter, "-m", "flower_gpu.cli", "supernode", "--", "--help"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--superlink" in done.stdout and "flower-supernode" in done.stdout


def test_doctor_names_the_folder_of_the_commands(interpreter: Path, tmp_path: Path) -> None:
    """The commands are in the target folder, and the interpreter's own folder has none."""
    target = tmp_path / "target"
    (target / "bin").mkdir(parents=True)
    for name in ("flwr", "flwr-1.41.0.dist-info"):
        (target / name).mkdir()
    (target / "flwr-1.41.0.dist-info" / "METADATA").write_text("Name: flwr\nVersion: 1.41.0\n")
    for name in ("flwr", "flower-superlink", "flower-supernode", "flwr-clientapp"):
        (target / "bin" / name).write_text("#!/bin/sh\n")
        (target / "bin" / name).chmod(0o755)
    program = (
        "import json, os, sys; from flower_gpu.doctor.environment import _commands\n"
        "for os.environ['PATH'] in sys.argv[1:]: print(json.dumps(list(_commands())))"
    )
    done = run(
        [interpreter, "-c", program, "/usr/bin:/bin", f"{target}/bin:/usr/bin:/bin"],
        env={**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{os.environ['PYTHONPATH']}"},
    )
    not_on_path, on_path = map(json.loads, done.stdout.splitlines())
    [(level, _, todo)] = not_on_path
    assert (level, todo) == ("note", f'export PATH="{target}/bin:$PATH"')
    assert on_path == []
