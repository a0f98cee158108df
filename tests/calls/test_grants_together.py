"""The grants of workers work in combination: each pair of ``grants.ALL`` occurs in at least one test.

============================== ============ ======= ========= ===== ======= =======
test                           driver's cap guard   confined  MPS   ranks   reused
============================== ============ ======= ========= ===== ======= =======
``simulation``, two ranks      yes          require           yes   yes     yes
``simulation``, one worker     yes          on                yes           yes
``supernode``                  yes          both    yes       yes
``ranks_of_a_confined_worker``                      refused         refused
============================== ============ ======= ========= ===== ======= =======

All tests also have the other grants: GPUs of a lease, thread counts, and the cap of allocators. A confined
worker handles one message, so it is never reused.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import cuda_stub
import pytest
from capped_calls import CallsInGroup, calls_in_group

from flower_gpu.calls import grants
from flower_gpu.calls.grants import guard
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.skipif(guard.problem() is not None, reason=f"no guard: {guard.problem()}"),
]

FOLDER = Path(__file__).parent
#: The grants that each test below has together. A new grant has to be tried with all others.
TOGETHER = {
    "simulation": "DriverCap GPUGuard ThreadCounts RankGrant MPSShare LeasedGPUs AllocatorCap",
    "supernode": "DriverCap GPUGuard ConfinementGrant ThreadCounts MPSShare LeasedGPUs AllocatorCap",
    "ranks_of_a_confined_worker": "ConfinementGrant RankGrant",
}
OUT_OF_MEMORY = 2
ALL_SMS = 132


@pytest.fixture
def host(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> Iterator[CallsInGroup]:
    with calls_in_group(cuda_host(gpus=2, driver="615.20.01"), tmp_path) as host:
        # The device file of another GPU has its own folder, because the guard forbids new files next to it.
        (tmp_path / "dev").mkdir()
        host.env["FLOWER_GPU_GUARDED"] = str(tmp_path / "dev" / "nvidia9")
        Path(host.env["FLOWER_GPU_GUARDED"]).touch()
        host.env["PATH"] = f"{Path(cuda_stub.__file__).parent / 'mps'}:{os.environ['PATH']}"
        try:
            yield host
        finally:
            host.run(sys.executable, "-m", "flower_gpu.cli", "workers", "stop")


def test_each_pair_of_grants_is_tried() -> None:
    pairs = combinations([type(grant).__name__ for grant in grants.ALL], 2)
    tried = [set(names.split()) for names in TOGETHER.values()]
    assert [pair for pair in pairs if not any(names.issuperset(pair) for names in tried)] == []


def check(report: dict[str, Any], host: CallsInGroup, *, sms: int) -> None:
    """Check that each grant is in force in a process with one GPU."""
    assert (report["gpus"], report["is_capped"], report["has_threads"]) == (1, True, True)
    assert report["opened"] == "PermissionError"
    assert report["malloc"] == OUT_OF_MEMORY
    assert report["sms"] == sms
    assert Path(report["group"]).name.startswith("flower-gpu-")
    assert host.remaining_groups() == []


@pytest.mark.parametrize(("num_gpus", "sms", "guard_mode"), [(2, ALL_SMS, "require"), (0.25, 32, "on")])
def test_reused_workers_of_a_simulation(
    host: CallsInGroup, tmp_path: Path, num_gpus: float, sms: int, guard_mode: str
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    config = {"other": host.env["FLOWER_GPU_GUARDED"], "notes": str(notes)}
    # A worker that has imported torch by itself is not reused, so torch is preloaded.
    options = {"preload": "torch", "num_gpus": num_gpus, "mps": True, "log_dir": None, "run_config": config}
    script = [sys.executable, str(FOLDER / "together_run.py"), json.dumps(options)]
    lines = host.run(*script, FLOWER_GPU_CAP="driver", FLOWER_GPU_GUARD=guard_mode).splitlines()
    replies = [json.loads(line) for line in lines if line.startswith(("{", '"'))]
    assert len(replies) == 2 and replies[0] == replies[1], "the worker was not reused"
    reports = [json.loads(note.read_text()) for note in notes.iterdir()]
    assert sorted(report["rank"] for report in reports) == ([0, 0, 1, 1] if num_gpus == 2 else [0, 0])
    for report in reports:
        check(report, host, sms=sms)


CONFINED = """
import json, os, sys
sys.path[:0] = sys.argv[2:]
from confined_calls import run_confined
from flower_gpu.programs.confine import Allowed
task, arguments, options = json.loads(sys.argv[1])
allowed = Allowed((sys.path[0],), (os.environ["NVML_STUB_DIR"],))
try:
    print(json.dumps(run_confined(task, *arguments, allowed=allowed, **options)))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def run_confined(host: CallsInGroup, task: str, *arguments: Any, **options: Any) -> Any:
    """Run a task in a confined worker, as ``flower-gpu supernode --confine`` does."""
    script = [sys.executable, "-c", CONFINED, json.dumps([task, arguments, options])]
    return json.loads(host.run(*script, str(FOLDER), str(FOLDER.parent)).splitlines()[-1])


@pytest.mark.skipif(bool(confinement.problem()), reason=f"no confinement: {confinement.problem()}")
@pytest.mark.parametrize(("method", "guard_mode"), [("spawn", "require"), ("forkserver", "on")])
def test_confined_worker_of_a_supernode(
    host: CallsInGroup, tmp_path: Path, method: str, guard_mode: str
) -> None:
    host.env |= {"FLOWER_GPU_CAP": "driver", "FLOWER_GPU_GUARD": guard_mode}
    # The folder belongs to an MPS daemon of the operator.
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    host.env["CUDA_MPS_PIPE_DIRECTORY"] = str(pipes)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(pipes / "control"))
        daemon.listen()
        other = host.env["FLOWER_GPU_GUARDED"]
        options = {"start_method": method, "gpu": "require", "gpu_memory": "3GiB"}
        check(run_confined(host, "together_tasks:look", other, **options), host, sms=ALL_SMS)


def test_ranks_of_a_confined_worker_are_refused(host: CallsInGroup) -> None:
    name, text = run_confined(host, "together_tasks:look", "", gpu="require", num_gpus=2)
    assert name == "ConfigError" and "--confine allows one GPU for a call" in text
