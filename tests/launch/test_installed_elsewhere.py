"""Where packages were installed with ``pip install --target``: none of their commands is beside Python."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from launch_helpers import processes_of
from run_programs import run
from waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python without packages and commands of its own, and nowhere setproctitle, which only shows names."""
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "setproctitle.py").write_text("raise ModuleNotFoundError('it is not carried')\n")
    venv.create(tmp_path / "env", with_pip=False)
    packages = sysconfig.get_path("purelib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(missing), str(ROOT), packages]))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path / "env" / "bin" / Path(sys.executable).name


def test_launch_runs_an_app(interpreter: Path, tiny_app: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "runs"
    options = ("--clients", "1", "--rounds", "1", "--log-dir", log_dir)
    command = [interpreter, "-m", "flower_gpu.cli", "launch", tiny_app, *options]
    done = run(command, timeout_s=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = log_dir.iterdir()
    assert json.loads((folder / "result.json").read_text())["rounds"]
    assert "Traceback" not in (folder / "programs.log").read_text()
    until(lambda: not processes_of(log_dir), "every process of the run is gone")


def test_supernode_becomes_flowers(interpreter: Path, tmp_path: Path) -> None:
    command = [interpreter, "-m", "flower_gpu.cli", "supernode", "--", "--help"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--superlink" in done.stdout and "flower-supernode" in done.stdout


def test_doctor_names_the_folder_of_the_commands(interpreter: Path, tmp_path: Path) -> None:
    """Not that of the interpreter, where there are none."""
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
    told, on_path = map(json.loads, done.stdout.splitlines())
    [(level, _, todo)] = told
    assert (level, todo) == ("note", f'export PATH="{target}/bin:$PATH"')
    assert on_path == []
