"""What a worker is granted, and what it gives up, hold together: each pair of them in at least one test.

============================== ============ ======= ========= ===== ======= =======
test                           driver's cap guard   confined  MPS   ranks   reused
============================== ============ ======= ========= ===== ======= =======
``simulation``, two ranks      yes          require           yes   yes     yes
``simulation``, one worker     yes          on                yes           yes
``supernode``                  yes          both    yes       yes
``ranks_of_a_confined_worker``                      refused         refused
============================== ============ ======= ========= ===== ======= =======

A confined worker handles one message, so it is never reused.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_stub
import pytest
from driver_cap_host import Host, host_in_group

from flower_gpu.gpu import guard
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.skipif(guard.problem() is not None, reason=f"no guard: {guard.problem()}"),
]

FOLDER = Path(__file__).parent
OUT_OF_MEMORY = 2
ALL_SMS = 132


@pytest.fixture
def host(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> Iterator[Host]:
    with host_in_group(cuda_host(gpus=2, driver="615.20.01"), tmp_path) as host:
        # The device file of another GPU, in a folder of its own: the guard allows no new files beside it.
        (tmp_path / "dev").mkdir()
        host.env["FLOWER_GPU_GUARDED"] = str(tmp_path / "dev" / "nvidia9")
        Path(host.env["FLOWER_GPU_GUARDED"]).touch()
        host.env["PATH"] = f"{Path(cuda_stub.__file__).parent / 'mps'}:{os.environ['PATH']}"
        try:
            yield host
        finally:
            host.run(sys.executable, "-m", "flower_gpu.cli", "workers", "stop")


def check(found: dict[str, Any], host: Host, *, sms: int) -> None:
    """Check what a process has found that the driver caps and the guard keeps from other GPUs."""
    assert found["opened"] == "PermissionError"
    assert found["malloc"] == OUT_OF_MEMORY
    assert found["sms"] == sms
    assert Path(found["group"]).name.startswith("flower-gpu-")
    assert host.left() == []


@pytest.mark.parametrize(("num_gpus", "sms", "guarded"), [(2, ALL_SMS, "require"), (0.25, 32, "on")])
def test_reused_workers_of_a_simulation(
    host: Host, tmp_path: Path, num_gpus: float, sms: int, guarded: str
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    config = {"other": host.env["FLOWER_GPU_GUARDED"], "notes": str(notes)}
    # A worker that has imported torch itself is not reused.
    options = {"preload": "torch", "num_gpus": num_gpus, "mps": True, "log_dir": None, "run_config": config}
    script = [sys.executable, str(FOLDER / "together_run.py"), json.dumps(options)]
    lines = host.run(*script, FLOWER_GPU_CAP="driver", FLOWER_GPU_GUARD=guarded).splitlines()
    replies = [json.loads(line) for line in lines if line.startswith(("{", '"'))]
    assert len(replies) == 2 and replies[0] == replies[1], "one worker has handled both messages"
    found = [json.loads(note.read_text()) for note in notes.iterdir()]
    assert sorted(each["rank"] for each in found) == ([0, 0, 1, 1] if num_gpus == 2 else [0, 0])
    for each in found:
        check(each, host, sms=sms)


CONFINED = """
import json, os, sys
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.flower.confine import Allowed, for_message
task, arguments, options = json.loads(sys.argv[1])
settings = call_settings(options)
with for_message(Allowed((sys.path[0],), (os.environ["NVML_STUB_DIR"],)), []) as found:
    settings = settings.with_worker(confinement=found)
    try:
        print(json.dumps(run_call(task, arguments, settings=settings, kind="train", by_name=True)))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def confined(host: Host, task: str, *arguments: Any, **options: Any) -> Any:
    """Run a task as ``flower-gpu supernode --confine`` does."""
    script = f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{CONFINED}"
    call = json.dumps([task, arguments, options])
    return json.loads(host.run(sys.executable, "-c", script, call).splitlines()[-1])


@pytest.mark.skipif(bool(confinement.problem()), reason=f"no confinement: {confinement.problem()}")
@pytest.mark.parametrize(("method", "guarded"), [("spawn", "require"), ("forkserver", "on")])
def test_confined_worker_of_a_supernode(host: Host, tmp_path: Path, method: str, guarded: str) -> None:
    host.env |= {"FLOWER_GPU_CAP": "driver", "FLOWER_GPU_GUARD": guarded}
    pipes = tmp_path / "pipes"  # of a daemon that the operator has started
    pipes.mkdir()
    host.env["CUDA_MPS_PIPE_DIRECTORY"] = str(pipes)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(pipes / "control"))
        daemon.listen()
        other = host.env["FLOWER_GPU_GUARDED"]
        options = {"start_method": method, "gpu": "require", "gpu_memory": "3GiB"}
        check(confined(host, "together_tasks:look", other, **options), host, sms=ALL_SMS)


def test_ranks_of_a_confined_worker_are_refused(host: Host) -> None:
    name, text = confined(host, "together_tasks:look", "", gpu="require", num_gpus=2)
    assert name == "ConfigError" and "--confine allows one GPU for a call" in text
