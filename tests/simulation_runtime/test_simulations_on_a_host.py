"""A simulation beside another program on one host, and ended in the middle."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import GIB
from simulation_host import FOLDER, NewHost, notes, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


#: Leases what the simulation leaves, says so, and ends when it may. Argument: a folder.
OTHER = """
import sys, time
from pathlib import Path
from flower_gpu import run_in_worker

folder = Path(sys.argv[1])

def wait():
    (folder / "has-a-lease").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)

run_in_worker(wait, gpu_memory="6GiB", start_method="fork")
"""


def training(folder: Path, count: int) -> list[dict[str, Any]]:
    """Wait until so many calls have begun."""
    return until(lambda: notes(folder / "trains.jsonl"), lambda found: len(found) == count)


def is_there(pid: int) -> bool:
    """Tell whether a process has not ended; who has started it may still have to take note of that."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_gpu_is_shared_and_what_is_ended_leaves_no_worker_and_no_lease(new_host: NewHost) -> None:
    host = new_host(gpus=1)
    folder, others = host.new_folder("simulation"), host.new_folder("other")
    with host.observed() as seen:
        script = FOLDER / "sim_waiting.py"
        program = host.start(sys.executable, script, folder, "3", "4GiB", name="simulation")
        workers = {note["partition"]: note["pid"] for note in training(folder, 3)}
        actors = {note["partition"]: note["actor"] for note in notes(folder / "actors.jsonl")}
        other = host.start(sys.executable, "-c", OTHER, others, name="other")
        state = host.until(lambda state: state.waiting)
        assert len(state.holders) == 3 and os.getpgid(state.waiting[0].pid)  # alive

        os.kill(actors[0], signal.SIGKILL)  # as Ray itself does when main memory runs short
        until((others / "has-a-lease").exists, bool)  # it has the place of the worker that is gone
        assert [is_there(workers[partition]) for partition in range(3)] == [False, True, True]

        program.process.kill()  # the script itself; Ray's processes are others
        host.until(lambda state: len(state.holders) == 1)
        assert not any(map(is_there, workers.values()))

        (others / "go").touch()
        other.succeeded()
    assert max(sum(size for _, size in look.values()) for look in seen) == 14 * GIB
