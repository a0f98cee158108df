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


def test_two_simulations_share_a_gpu(new_host: NewHost) -> None:
    host = new_host(gpus=1)
    folders = [host.new_folder(name) for name in ("one", "two")]
    with host.observed() as seen:
        programs = [start(host, folder, 2, "6GiB") for folder in folders]
        state = host.until(lambda state: len(state.holders) == len(state.waiting) == 2)
        assert {os.getpgid(entry.pid) for entry in state.waiting}  # alive
        for folder in folders:
            (folder / "go").touch()
        for program in programs:
            output = program.succeeded()
            assert "Received 2 results and 0 failures" in output, output
    assert max(sum(size for _, size in look.values()) for look in seen) == 12 * GIB, "two of the four fit"
    granted = [
        {event["lease"] for event in host.events("lease_granted", folder=folder)} for folder in folders
    ]
    assert [len(leases) for leases in granted] == [2, 2] and not granted[0] & granted[1]


def test_what_is_ended_in_the_middle_leaves_no_worker_and_no_lease(new_host: NewHost) -> None:
    host = new_host(gpus=1)
    folder = host.new_folder("ended")
    program = start(host, folder, 3, "4GiB")
    workers = {note["partition"]: note["pid"] for note in training(folder, 3)}
    actors = {note["partition"]: note["actor"] for note in notes(folder / "actors.jsonl")}
    assert len(host.status().holders) == 3

    os.kill(actors[0], signal.SIGKILL)  # as Ray itself does when main memory runs short
    host.until(lambda state: len(state.holders) == 2)
    assert [is_there(workers[partition]) for partition in range(3)] == [False, True, True]

    program.process.kill()  # the script itself; Ray's processes are others
    host.until(lambda state: not state.holders)
    assert not any(map(is_there, workers.values()))
