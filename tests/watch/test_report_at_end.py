"""Runs end with a report, unless they are told not to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COMMANDS = {
    "launch": ["launch", str(TESTS / "launch/tiny_app"), "--engine", "start-client", "--rounds", "1"],
    "simulate": ["simulate", str(TESTS / "simulation/apps/plain"), "--num-supernodes", "2"],
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("command", "options"), [("launch", []), ("simulate", ["--no-report"])])
def test_a_run_ends_with_a_report(command: str, options: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "flower_gpu.cli",
            *COMMANDS[command],
            *options,
            "--log-dir",
            str(tmp_path),
        ],
        env={name: value for name, value in os.environ.items() if name != "FLOWER_GPU_RUN_DIR"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    [folder] = tmp_path.iterdir()
    told = re.findall(r"(?m)^report +(\S+)$", done.stdout + done.stderr)
    if options:
        assert told == [] and not (folder / "report.html").exists()
    else:
        assert told == [str(folder / "report.html")]
        page = (folder / "report.html").read_text()
        assert f"flower-gpu {command}" in page
        assert re.search(r'class="outcome completed">completed, after', page)
