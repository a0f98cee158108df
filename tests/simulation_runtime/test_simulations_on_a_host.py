"""Simulations beside each other on one host, and ones that are ended in the middle."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import GIB
from simulation_host import FOLDER, NewHost, Program, SimulationHost, notes, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def start(host: SimulationHost, folder: Path, clients: int, gpu_memory: str) -> Program:
    script = FOLDER / "sim_waiting.py"
    return host.start(
        sys.executable,
        script,
        folder,
        str(clients),
        gpu_memory,
        name=folder.name,
        FLOWER_GPU_RUN_DIR=str(folder),
    )


def training(folder: Path, count: int) -> list[dict[str, Any]]:
    """Wait until so many calls have begun."""
    return until(lambda: notes(folder / "trains.jsonl"), lambda found: len(found) == count)


def is_there(pid: int) -> bool:
    """Tell whether a process has not ended; who has started it may still have to take note of that."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_simulations_share_a_gpu_and_what_is_ended_leaves_no_worker_and_no_lease(new_host: NewHost) -> None:
    host = new_host(gpus=1)
    ended, other = host.new_folder("ended"), host.new_folder("other")
    with host.observed() as seen:
        program = start(host, ended, 3, "4GiB")
        workers = {note["partition"]: note["pid"] for note in training(ended, 3)}
        actors = {note["partition"]: note["actor"] for note in notes(ended / "actors.jsonl")}
        second = start(host, other, 1, "6GiB")
        state = host.until(lambda state: state.waiting)
        assert len(state.holders) == 3 and os.getpgid(state.waiting[0].pid)  # alive

        os.kill(actors[0], signal.SIGKILL)  # as Ray itself does when main memory runs short
        training(other, 1)  # it has the place of the worker that is gone
        assert [is_there(workers[partition]) for partition in range(3)] == [False, True, True]

        program.process.kill()  # the script itself; Ray's processes are others
        host.until(lambda state: len(state.holders) == 1)
        assert not any(map(is_there, workers.values()))

        (other / "go").touch()
        output = second.succeeded()
        assert "Received 1 results and 0 failures" in output, output
    assert max(sum(size for _, size in look.values()) for look in seen) == 14 * GIB
