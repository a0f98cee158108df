"""A launch closes its processes and sockets itself instead of leaving them to the garbage collector."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from run_programs import run

pytestmark = pytest.mark.timeout(180)

SUPERVISOR = """
import gc, os, sys
from pathlib import Path
from flower_gpu.launch.supervisor import Supervisor

folder = Path(sys.argv[1])
marker = f"FLOWER_GPU_RUN_DIR={folder}"
with Supervisor(marker) as supervisor:
    supervisor.fork_programs({**os.environ, "FLOWER_GPU_RUN_DIR": str(folder)}, folder / "programs.log")
    # The server is still running here.
    gc.collect()
    supervisor.stop()
    print(supervisor.unkilled)
del supervisor
gc.collect()
"""


def test_the_server_of_flowers_programs_is_reaped(tmp_path: Path) -> None:
    ended = run([sys.executable, "-W", "always::ResourceWarning", "-c", SUPERVISOR, tmp_path])
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
    assert (tmp_path / "programs.log").exists(), "a server was started"
    assert "ResourceWarning" not in ended.stderr, ended.stderr
