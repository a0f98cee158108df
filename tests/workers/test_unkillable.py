"""Workers that SIGKILL does not end, because they wait in the kernel for a disk that hangs (Linux, FUSE)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forkservers
import hung_disk
import pytest
from run_programs import run

from flower_gpu.unkillable import sleeping_in

FOLDER = Path(__file__).parent

pytestmark = forkservers.marks()


@pytest.fixture
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """Run ``stuck_caller.py`` with a disk that hangs, and yield its report on each step."""
    disk, scratch, state, ledger = (tmp_path / name for name in ("disk", "scratch", "state", "ledger"))
    for folder in (disk, scratch, state, ledger):
        folder.mkdir(mode=0o700)
    ledger.chmod(0o1777)
    probe = run([sys.executable, hung_disk.__file__, disk, "-c", ""], stdin=subprocess.DEVNULL)
    if probe.returncode:
        pytest.skip(f"no FUSE file system can be mounted here: {probe.stderr}")
    env = {
        **os.environ,
        **forkservers.WITH_TASKS,
        "FLOWER_GPU_STATE_DIR": str(state),
        "FLOWER_GPU_LEDGER_DIR": str(ledger),
        "FLOWER_GPU_SERVER_IDLE_S": "0.1",
    }
    command = [hung_disk.__file__, disk, FOLDER / "stuck_caller.py", disk, request.param, scratch]
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None

        def step_reports() -> Iterator[dict[str, Any]]:
            for line in program.stdout or ():
                step = json.loads(line)
                if step["step"] == "cancelled":
                    program.stdin.write("\n")
                    program.stdin.flush()
                yield step

        yield step_reports()
        _, errors = program.communicate()
        assert program.returncode == 0, errors


@pytest.mark.parametrize("steps", ["forkserver", "spawn"], indirect=True)
def test_a_worker_that_cannot_be_killed_fails_only_its_own_call(steps: Iterator[dict[str, Any]]) -> None:
    reports = {step["step"]: step for step in steps}
    late = reports["late"]
    assert late["kind"] == "WorkerTimeoutError"
    assert f"the worker (pid {late['pid']}) cannot be killed: after SIGKILL it is in state D" in late["text"]
    # The lease stays with the process.
    assert reports["leased"]["holders"] == ["tasks_stuck:look_at on the server"]
    assert reports["goes on"]["value"] == 36
    assert "interrupted" in reports
    assert reports["cancelled"]["kind"] == "WorkerDiedError"
    # Once the disk answers, the workers end, and nothing is left.
    assert reports["gone"]["workers"] == []
    assert reports["programs"]["abandoned"] == ["run", "end_group"]


def test_the_state_of_a_sleeping_process_is_reported() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert sleeping_in(process.pid).startswith("state ")
    assert sleeping_in(process.pid) == "state unknown"
