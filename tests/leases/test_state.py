"""The state of the ledger: which leases of idle workers must be released, and how memory use is counted."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_hosts import LedgerHost
from nvml_stub import GIB

from flower_gpu.gpu.gpus import GPU, GPUProcess, Inventory
from flower_gpu.leases import tickets
from flower_gpu.leases.admission import MEMORY, Card, GPUNeed, HostNeed, Part
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.leases.host import HostReading
from flower_gpu.leases.state import Readings, State
from flower_gpu.leases.tickets import Ticket

A, B = "GPU-a", "GPU-b"


def entry(order: int, **fields: object) -> Entry:
    values = {"gpu_needs": (), "count": 0, "pid": 1, "pid_namespace": 1, **fields}
    return Entry(id=f"t{order}", order=order, path=Path(), user=0, since=0.0, **values)  # type: ignore[arg-type]


def holder(order: int, gib: int, uuid: str = A) -> Entry:
    return entry(order, parts=(Part(uuid, gib * GIB, 16 * GIB), Part(MEMORY, GIB, 8 * GIB)))


def claim(order: int, gib: int | None, *uuids: str, memory_gib: int = 0) -> Entry:
    options = tuple(GPUNeed(uuid, gib and gib * GIB, alone=gib is None) for uuid in uuids)
    needs = (HostNeed(MEMORY, memory_gib * GIB, memory_gib * GIB),) if memory_gib else ()
    return entry(order, gpu_needs=options, count=min(1, len(options)), host_needs=needs)


IDLE = ["t1", "t2", "t3", "t4"]


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([claim(9, 4, A)], ["t1"]),
        ([claim(9, 8, A)], ["t1", "t2"]),
        ([claim(9, None, A)], IDLE),
        ([claim(8, 4, A), claim(9, 4, A)], ["t1", "t2"]),
        # GPU B has room for this claim.
        ([claim(9, 4, A, B)], []),
        ([claim(9, 8, A, B)], ["t1", "t2"]),
        # The idle leases are not on GPU B.
        ([claim(9, 4, B)], []),
        # The claim also needs main memory, which the idle leases hold.
        ([claim(9, 4, B, memory_gib=5)], ["t1"]),
        ([claim(9, None, memory_gib=6)], ["t1", "t2"]),
        ([claim(9, None, A), claim(10, 4, A)], IDLE),
    ],
)
def test_only_the_leases_in_the_way_are_released(waiting: list[Entry], expected: list[str]) -> None:
    """The lease that has been idle the longest ends first. The lease on GPU B belongs to another process."""
    cards = (Card(A, 16 * GIB), Card(B, 20 * GIB))
    holders = (*(holder(number, 4) for number in range(1, 5)), holder(5, 16, B))
    host = (Card(MEMORY, 9 * GIB),)
    state = State((), cards, host, holders, tuple(waiting))
    assert state.leases_to_release(IDLE, {entry.id for entry in waiting}) == set(expected)


def test_idle_leases_are_released_even_if_a_claim_still_waits_for_another_lease() -> None:
    """Otherwise other claims could take the free part again while this claim waits for the rest."""
    holders = (holder(1, 4), holder(2, 4), holder(3, 4, B), holder(4, 8))
    state = State((), (Card(A, 16 * GIB), Card(B, 16 * GIB)), (), holders, (claim(9, 12, A),))
    assert state.leases_to_release(["t1", "t2", "t3"], {"t9"}) == {"t1", "t2"}
    # A claim that does not count ends no lease: its message gets the idle worker itself.
    assert state.leases_to_release(["t1", "t2", "t3"], ()) == set()


def test_holders_are_notified_when_a_claim_waits_for_their_gpu(ledger_host: LedgerHost) -> None:
    first, second, waiter = ledger_host.start(3)
    first("acquire", memory=16 * GIB, gpus=[0])
    second("acquire", memory=16 * GIB, gpus=[1])
    ledger_host.line_up((waiter, {"memory": GIB, "gpus": [1]}))
    assert second("is_requested", timeout_s=60)
    assert not first("is_requested", timeout_s=0)
    second("release")
    assert waiter.answer()
    # The waiter may have seen the release by itself, before it was woken. That wake-up says nothing about the
    # next claim.
    waiter("is_requested", timeout_s=0)
    # A claim that is granted at once wakes no holder.
    second("acquire", memory=GIB, gpus=[1])
    assert not waiter("is_requested", timeout_s=0)


@pytest.mark.parametrize("idle_value", [b"true", b"1", b'"yes"'])
def test_a_report_marks_an_idle_worker(tmp_path: Path, idle_value: bytes) -> None:
    """Another account may write any value, so only the JSON value ``true`` counts."""
    unwritten = tickets.new_entry(tmp_path, 1, 1, pack=False)
    ticket = Ticket.create(tmp_path, unwritten, "")
    try:
        ticket.report_worker(7, 0, {A: 5})
        data = tickets._report_text(7, {A: 5}, 0, is_idle=True)
        text = data.partition(b" ")[2].rstrip(b"\n")
        text = text.replace(b', "idle": true', b', "idle": ' + idle_value)
        with ticket.entry.path.open("r+b") as file:
            file.seek(tickets.REPORT_AT)
            file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        assert ticket.entry.reported() == (7, {A: 5})
        assert ticket.entry.is_idle() == (idle_value == b"true")
    finally:
        ticket.remove()


# Memory that workers use counts once ------------------------------------------------------------------------

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


def lease(order: int, leased_gib: int) -> Entry:
    parts = (Part(UUID, leased_gib * GIB, 24 * GIB),)
    return entry(order, parts=parts, pid=WORKER, pid_namespace=pid_namespace())


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
    part = Part(MEMORY, 4 * GIB, 16 * GIB)
    unwritten = replace(
        tickets.new_entry(tmp_path, 1, 0, pack=False),
        parts=(part,),
        pid_namespace=pid_namespace() + (namespace == "another"),
    )
    ticket = Ticket.create(tmp_path, unwritten, "")
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
