"""Where packages were installed with ``pip install --target``: none of their commands is beside Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from launch_helpers import processes_of
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
    command = [interpreter, "-m", "flower_gpu.cli", "launch", tiny_app, "--log-dir", log_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = log_dir.iterdir()
    assert json.loads((folder / "result.json").read_text())["rounds"]
    assert "Traceback" not in (folder / "programs.log").read_text()
    until(lambda: not processes_of(log_dir), "every process of the run is gone")


def test_supernode_becomes_flowers(interpreter: Path, tmp_path: Path) -> None:
    command = [interpreter, "-m", "flower_gpu.cli", "supernode", "--", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
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
    python_path = f"{target}{os.pathsep}{os.environ['PYTHONPATH']}"

    def flower(path: str) -> dict[str, str]:
        done = subprocess.run(
            [interpreter, "-m", "flower_gpu.cli", "doctor", "--json"],
            env={**os.environ, "PYTHONPATH": python_path, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        told = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "flower"]
        commands: dict[str, str] = told[-1]
        return commands

    told = flower("/usr/bin:/bin")
    assert (told["level"], told["todo"]) == ("note", f'export PATH="{target}/bin:$PATH"')
    assert flower(f"{target}/bin:/usr/bin:/bin")["level"] == "ok"
