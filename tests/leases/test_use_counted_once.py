"""Memory that workers use counts once: as that of their leases, and not as another program's as well."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from nvml_stub import GIB

from flower_gpu.gpu.gpus import GPU, GPUProcess, Inventory
from flower_gpu.leases import tickets
from flower_gpu.leases.admission import MEMORY, Part
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.leases.host import HostReading
from flower_gpu.leases.state import Readings
from flower_gpu.leases.tickets import Ticket

UUID = "GPU-0"
# Processes of this pid namespace that run. The first one is never in the process group of a test.
WORKER, OTHER, FOREIGN = os.getpid(), os.getppid(), 1


@pytest.fixture
def child() -> Iterator[int]:
    """A child of this process in its process group, as a worker's children are."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def lease(number: int, leased_gib: int) -> Entry:
    return Entry(
        id=f"0-{number}",
        order=number,
        parts=(Part(UUID, leased_gib * GIB, 24 * GIB),),
        path=Path("x"),
        user=0,
        pid=WORKER,
        pid_namespace=pid_namespace(),
        since=time.time(),
    )


def of_others_gib(
    listed: Sequence[tuple[int, int]], leases: Sequence[Entry], told: Mapping[str, tuple[int, int]]
) -> float:
    """Return how much of a GPU with 24 GiB counts as other programs' use.

    ``listed``: what NVML lists, by process. ``told``: what workers report, by lease.
    """
    used = sum(nbytes for _, nbytes in listed)
    processes = tuple(GPUProcess(pid, nbytes * GIB) for pid, nbytes in listed)
    gpu = GPU(0, UUID, "Test", 24 * GIB, used * GIB, (24 - used) * GIB, 0, 0, processes)
    reports = {name: (pid, {UUID: nbytes * GIB}) for name, (pid, nbytes) in told.items()}
    readings = Readings(Inventory((gpu,), "x", None), HostReading({}, {}), leases, reports, 0.0)
    [card] = readings.cards(leases, 0)
    return 24 - card.capacity_bytes / GIB


def test_a_workers_child_processes_are_the_workers(child: int) -> None:
    first = lease(1, 8)
    assert of_others_gib([(WORKER, 2), (child, 6)], [first], {first.id: (WORKER, 8)}) == 0
    assert of_others_gib([(WORKER, 2), (child, 9)], [first], {first.id: (WORKER, 8)}) == 3


def test_a_worker_that_reports_too_much_takes_nothing_from_other_programs() -> None:
    """Its report is stale, or it was written by an app. Another program uses 12 GiB."""
    first = lease(1, 8)
    assert of_others_gib([(WORKER, 1), (FOREIGN, 12)], [first], {first.id: (WORKER, 8)}) == 12


def test_what_a_worker_has_given_back_is_not_taken_from_others() -> None:
    """Its report is older than what NVML lists; the other process has a lease of its own."""
    first, second = lease(1, 8), lease(2, 8)
    told = {first.id: (WORKER, 8), second.id: (OTHER, 5)}
    assert of_others_gib([(WORKER, 2), (OTHER, 5)], [first, second], told) == 0
    assert of_others_gib([(WORKER, 2), (OTHER, 10)], [first, second], told) == 2


def test_a_process_with_two_leases_counts_once() -> None:
    """Calls that run in the client's own process. Another program uses 4 GiB."""
    leases = [lease(1, 8), lease(2, 8)]
    told = {each.id: (WORKER, 8) for each in leases}
    assert of_others_gib([(WORKER, 8), (FOREIGN, 4)], leases, told) == 4
    assert of_others_gib([(WORKER, 12), (FOREIGN, 4)], leases, dict.fromkeys(told, (WORKER, 12))) == 4


@pytest.mark.parametrize("namespace", ["own", "another"])
def test_main_memory_of_a_worker_that_cannot_be_seen(tmp_path: Path, namespace: str) -> None:
    """It is in another pid namespace, or hidden: 3 of 16 GiB are not available, and 2 of these are leased."""
    new = tickets.new_entry(tmp_path, 1, 0, pack=False)
    held = Part(MEMORY, 4 * GIB, 16 * GIB)
    number = pid_namespace() + (namespace == "another")
    ticket = Ticket.create(
        tmp_path, new.__class__(**{**vars(new), "parts": (held,), "pid_namespace": number}), ""
    )
    try:
        ticket.report_worker(1 << 30, 2 * GIB)
        measured = HostReading({}, {MEMORY: (13 * GIB, 16 * GIB)})
        [card] = measured.cards([ticket.entry], [], 0)
        assert card.capacity_bytes == 15 * GIB
        ticket.report_worker(1 << 30, 9 * GIB)  # not more than its lease
        [card] = measured.cards([ticket.entry], [], 0)
        assert card.capacity_bytes == 17 * GIB
    finally:
        ticket.remove()
