"""`run_simulation` in a script that defines everything itself; it sees one of two GPUs, and clients fail.

At its end clients wait, beside another program of the host, and are killed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import GIB
from simulation_host import FOLDER, NewHost, Program, SimulationHost, notes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CLIENTS, WAITING = 4, 3

# : Leases what the simulation leaves free, reports that, and ends on request. Argument: a folder.
OTHER = """
import sys, time
from pathlib import Path
from flower_gpu import run_in_worker

folder = Path(sys.argv[1])

def wait():
    (folder / "has-a-lease").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)

run_in_worker(wait, num_gpus=0.5, start_method="fork")
"""


@dataclass
class Ran:
    """The files of the script up to the time when its clients wait. The script does not end."""

    host: SimulationHost
    folder: Path
    program: Program
    output: str
    looks: list[dict[str, tuple[int, int]]]

    def notes(self, name: str) -> list[dict[str, Any]]:
        return notes(self.folder / f"{name}.jsonl")


@pytest.fixture(scope="module")
def ran(new_host: NewHost) -> Iterator[Ran]:
    host = new_host(gpus=2)
    folder = host.new_folder("notes")
    with host.observed() as looks:
        program = host.start(sys.executable, FOLDER / "sim_script.py", folder, CUDA_VISIBLE_DEVICES="1")
        program.until(lambda: len(notes(folder / "waiting.jsonl")) == WAITING)
        yield Ran(host, folder, program, program.output, looks)


def test_a_round_goes_on_without_clients_that_raise_die_or_hang(ran: Ran) -> None:
    rounds = re.findall(r"aggregate_train: Received (\d) results and (\d) failures", ran.output)
    assert rounds == [("4", "0"), ("1", "3"), ("4", "0")]
    assert ran.notes("server")[0] == {"trained": [3.0] * 4}
    finished = [event["outcome"] for event in ran.host.events("worker_finished")]
    assert sorted({*finished}) == ["died", "error", "ok", "timeout"]


def test_the_servers_log_says_which_client_failed_and_why(ran: Ran) -> None:
    log_part = ran.output.partition("aggregate_train: Received 1 results")[2].partition("[ROUND 3/3]")[0]
    errors = re.split(r"Received error in reply from node \d+", log_part)[1:]
    reasons = sorted(re.findall(r"train of client .*", text)[-1] for text in errors)
    assert len(reasons) == 3
    assert reasons[0].startswith("train of client 1: ValueError: client 1 has no data")
    assert re.match(r"train of client 2: the worker \(pid \d+\) was killed by SIGKILL \(9\)", reasons[1])
    assert reasons[2].startswith("train of client 3: no result within timeout_s=3")


def test_only_the_gpu_visible_to_the_whole_simulation_is_leased(ran: Ran) -> None:
    granted = ran.host.events("lease_granted")
    assert {gpu["index"] for event in granted for gpu in event["gpus"]} == {1}
    assert {call["visible"] for call in ran.notes("trains")} == {ran.host.uuids[1]}


def is_alive(pid: int) -> bool:
    """Return True if a process has not ended. Its parent may still have to reap it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_gpu_is_shared_and_an_ended_simulation_leaves_no_worker_and_no_lease(ran: Ran) -> None:
    host = ran.host
    workers = {note["partition"]: note["pid"] for note in ran.notes("waiting")}
    waiting = [note for note in ran.notes("actors") if note["kind"] == "train.waiting"]
    actors = {note["partition"]: note["actor"] for note in waiting}
    killed = min(workers)
    others = host.new_folder("other")
    other = host.start(sys.executable, "-c", OTHER, others, name="other", CUDA_VISIBLE_DEVICES="1")
    other.until(lambda: host.status().waiting)
    state = host.status()
    # The waiting process is alive.
    assert len(state.holders) == WAITING and os.getpgid(state.waiting[0].pid)

    # Ray itself does this when main memory runs short.
    os.kill(actors[killed], signal.SIGKILL)
    # The other program gets the place of the worker that has ended.
    other.until((others / "has-a-lease").exists)
    assert [is_alive(pid) for partition, pid in sorted(workers.items())] == [False, True, True]

    # This kills only the script. Ray's processes are separate.
    ran.program.process.kill()
    other.until(lambda: len(host.status().holders) == 1)
    assert not any(map(is_alive, workers.values()))

    (others / "go").touch()
    other.succeeded()
    assert 15 * GIB < max(sum(size for _, size in look.values()) for look in ran.looks) <= 16 * GIB
