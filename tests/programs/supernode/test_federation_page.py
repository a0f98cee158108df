"""The commands of the page about a federation work exactly as they are written there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from how_to_pages import PAGES, blocks
from run_programs import run

from flower_gpu.launch import ports
from flower_gpu.workers.forkserver.identity import script_folders

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(360)]

REPOSITORY = PAGES.parents[1]
COMMANDS = Path(__file__).parent / "federation_page.py"
#: Runs a command in a new network namespace, in which each port is free.
OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def test_the_commands_start_a_federation_and_a_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "state").mkdir(mode=0o700)
    text = (PAGES / "federation.md").read_text()
    prefix, port = OWN_NETWORK, 8000
    try:
        subprocess.run([*OWN_NETWORK, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):  # only root may create a network namespace
        prefix, port = [], ports.free_ports(1)[0]
        text = text.replace("flower-superlink --insecure", f"flower-superlink --insecure --port {port}")
        text = text.replace(":8000", f":{port}")
    page = tmp_path / "page.md"
    page.write_text(text)
    prefixes = ("FLOWER_GPU_", "FLWR_", "UV_")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(prefixes)},
        "HOME": str(tmp_path),
        "FLOWER_GPU_STATE_DIR": str(tmp_path / "state"),
        "FLOWER_GPU_LEDGER_DIR": str(tmp_path / "state"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",  # the table of flwr list in full
        "PATH": os.pathsep.join([*script_folders(), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY / "tests"),
    }
    command = [*prefix, sys.executable, COMMANDS, page, port]
    completed = run(command, timeout_s=320, env=env, cwd=tmp_path)
    logs = "\n".join(log.read_text() for log in tmp_path.glob("runs/*/*.log"))
    assert completed.returncode == 0, f"{completed.stdout}{completed.stderr}{logs}"
    assert f"connecting to the SuperLink at 127.0.0.1:{port}" in completed.stdout
    assert "connected: 2 of 2 SuperNodes" in completed.stdout
    assert "no program listens" not in completed.stdout
    assert "accuracy" in completed.stdout and "finished:completed" in completed.stdout, (
        f"{completed.stdout}{completed.stderr}"
    )
    assert len(blocks("federation.md", "bash")) == 4
