"""Memory that workers use counts once: as part of their leases, and not also as another program's use."""

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
# Running processes of this pid namespace. FOREIGN is never in the process group of a test.
WORKER, OTHER, FOREIGN = os.getpid(), os.getppid(), 1


@pytest.fixture
def child() -> Iterator[int]:
    """The pid of a child of this process in the same process group, as the children of a worker are."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def lease(namespace_number: int, leased_gib: int) -> Entry:
    return Entry(
        id=f"0-{namespace_number}",
        order=namespace_number,
        parts=(Part(UUID, leased_gib * GIB, 24 * GIB),),
        path=Path("x"),
        user=0,
        pid=WORKER,
        pid_namespace=pid_namespace(),
        since=time.time(),
    )


def other_programs_gib(
    listed: Sequence[tuple[int, int]], leases: Sequence[Entry], reported: Mapping[str, tuple[int, int]]
) -> float:
    """Return the GiB of a GPU with 24 GiB that count as the use of other programs.

    ``listed``: GiB that NVML lists, as pairs of a pid and its use.
    ``reported``: pid and GiB that workers report, by the id of their lease.
    """
    used = sum(nbytes for _, nbytes in listed)
    processes = tuple(GPUProcess(pid, nbytes * GIB) for pid, nbytes in listed)
    gpu = GPU(0, UUID, "Test", 24 * GIB, used * GIB, (24 - used) * GIB, 0, 0, processes)
    reports = {name: (pid, {UUID: nbytes * GIB}) for name, (pid, nbytes) in reported.items()}
    readings = Readings(Inventory((gpu,), "x", None), HostReading({}, {}), leases, reports, 0.0)
    [card] = readings.cards(leases, 0)
    return 24 - card.capacity_bytes / GIB


def test_child_processes_of_a_worker_count_for_its_lease(child: int) -> None:
    first = lease(1, 8)
    assert other_programs_gib([(WORKER, 2), (child, 6)], [first], {first.id: (WORKER, 8)}) == 0
    assert other_programs_gib([(WORKER, 2), (child, 9)], [first], {first.id: (WORKER, 8)}) == 3


def test_a_worker_that_reports_too_much_hides_no_use_of_other_programs() -> None:
    """The report is stale, or an app has written it. Another program uses 12 GiB."""
    first = lease(1, 8)
    assert other_programs_gib([(WORKER, 1), (FOREIGN, 12)], [first], {first.id: (WORKER, 8)}) == 12


def test_memory_that_a_worker_has_freed_is_not_deducted_from_other_programs() -> None:
    """The worker's report is older than the NVML list. The other process has its own lease."""
    first, second = lease(1, 8), lease(2, 8)
    reported = {first.id: (WORKER, 8), second.id: (OTHER, 5)}
    assert other_programs_gib([(WORKER, 2), (OTHER, 5)], [first, second], reported) == 0
    assert other_programs_gib([(WORKER, 2), (OTHER, 10)], [first, second], reported) == 2


def test_a_process_with_two_leases_counts_once() -> None:
    """Two calls run in the client's own process. Another program uses 4 GiB."""
    leases = [lease(1, 8), lease(2, 8)]
    reported = {entry.id: (WORKER, 8) for entry in leases}
    assert other_programs_gib([(WORKER, 8), (FOREIGN, 4)], leases, reported) == 4
    assert (
        other_programs_gib([(WORKER, 12), (FOREIGN, 4)], leases, dict.fromkeys(reported, (WORKER, 12))) == 4
    )


@pytest.mark.parametrize("namespace", ["own", "another"])
def test_main_memory_of_a_worker_that_is_not_visible(tmp_path: Path, namespace: str) -> None:
    """The worker is in another pid namespace or hidden. 3 of 16 GiB are in use, 2 of them under the lease."""
    unwritten = tickets.new_entry(tmp_path, 1, 0, pack=False)
    part = Part(MEMORY, 4 * GIB, 16 * GIB)
    namespace_number = pid_namespace() + (namespace == "another")
    ticket = Ticket.create(
        tmp_path,
        unwritten.__class__(**{**vars(unwritten), "parts": (part,), "pid_namespace": namespace_number}),
        "",
    )
    try:
        ticket.report_worker(1 << 30, 2 * GIB)
        measured = HostReading({}, {MEMORY: (13 * GIB, 16 * GIB)})
        [card] = measured.cards([ticket.entry], [], 0)
        assert card.capacity_bytes == 15 * GIB
        # The reported use counts only up to the size of the lease.
        ticket.report_worker(1 << 30, 9 * GIB)
        [card] = measured.cards([ticket.entry], [], 0)
        assert card.capacity_bytes == 17 * GIB
    finally:
        ticket.remove()
