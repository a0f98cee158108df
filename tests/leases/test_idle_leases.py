"""Leases that nobody uses at the moment: who asks for them, and which of them have to end."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from ledger_hosts import LedgerHost
from nvml_stub import GIB

from flower_gpu.leases import tickets
from flower_gpu.leases.admission import MEMORY, Card, GPUNeed, HostNeed, Part
from flower_gpu.leases.entries import Entry
from flower_gpu.leases.state import State
from flower_gpu.leases.tickets import Ticket

A, B = "GPU-a", "GPU-b"


def entry(order: int, **fields: object) -> Entry:
    found = {"gpu_needs": (), "count": 0, **fields}
    return Entry(id=f"t{order}", order=order, path=Path(), user=0, pid=1, pid_namespace=1, since=0.0, **found)  # type: ignore[arg-type]


def held(order: int, gib: int, uuid: str = A) -> Entry:
    return entry(order, parts=(Part(uuid, gib * GIB, 16 * GIB), Part(MEMORY, GIB, 8 * GIB)))


def asked(order: int, gib: int | None, *uuids: str, memory_gib: int = 0) -> Entry:
    options = tuple(GPUNeed(uuid, gib and gib * GIB, alone=gib is None) for uuid in uuids)
    needs = (HostNeed(MEMORY, memory_gib * GIB, memory_gib * GIB),) if memory_gib else ()
    return entry(order, gpu_needs=options, count=min(1, len(options)), host_needs=needs)


IDLE = ["t1", "t2", "t3", "t4"]


@pytest.mark.parametrize(
    ("waiting", "ending"),
    [
        ([asked(9, 4, A)], ["t1"]),
        ([asked(9, 8, A)], ["t1", "t2"]),
        ([asked(9, None, A)], IDLE),
        ([asked(8, 4, A), asked(9, 4, A)], ["t1", "t2"]),
        ([asked(9, 4, A, B)], []),  # B has room
        ([asked(9, 8, A, B)], ["t1", "t2"]),
        ([asked(9, 4, B)], []),  # they are not there
        ([asked(9, 4, B, memory_gib=5)], ["t1"]),  # but what it needs besides is theirs
        ([asked(9, None, memory_gib=6)], ["t1", "t2"]),
        ([asked(9, None, A), asked(10, 4, A)], IDLE),
    ],
)
def test_no_more_leases_end_than_stand_in_the_way(waiting: list[Entry], ending: list[str]) -> None:
    """The one that has idled for the longest time is the first; B is another's."""
    cards = (Card(A, 16 * GIB), Card(B, 20 * GIB))
    holders = (*(held(number, 4) for number in range(1, 5)), held(5, 16, B))
    host = (Card(MEMORY, 9 * GIB),)
    state = State((), cards, host, holders, tuple(waiting))
    assert state.leases_to_release(IDLE, {entry.id for entry in waiting}) == set(ending)


def test_a_request_that_others_keep_waiting_finds_all_that_it_could_use() -> None:
    """Else it would find taken again what is free while it waits for the rest."""
    holders = (held(1, 4), held(2, 4), held(3, 4, B), held(4, 8))
    state = State((), (Card(A, 16 * GIB), Card(B, 16 * GIB)), (), holders, (asked(9, 12, A),))
    assert state.leases_to_release(["t1", "t2", "t3"], {"t9"}) == {"t1", "t2"}
    # One that does not count ends none: it is of a message that takes the idle worker itself.
    assert state.leases_to_release(["t1", "t2", "t3"], ()) == set()


def test_holders_are_told_who_hold_what_somebody_waits_for(ledger_host: LedgerHost) -> None:
    first, second, waiter = ledger_host.start(3)
    first("acquire", memory=16 * GIB, gpus=[0])
    second("acquire", memory=16 * GIB, gpus=[1])
    ledger_host.line_up((waiter, {"memory": GIB, "gpus": [1]}))
    assert second("is_asked", timeout_s=60)
    assert not first("is_asked", timeout_s=0)
    second("release")
    assert waiter.answer()
    # The waiter may have seen the release by itself, before it was woken. That wake-up says nothing about the
    # next claim.
    waiter("is_asked", timeout_s=0)
    # A claim that is granted at once wakes no holder.
    second("acquire", memory=GIB, gpus=[1])
    assert not waiter("is_asked", timeout_s=0)


@pytest.mark.parametrize("told", [b"true", b"1", b'"yes"'])
def test_a_report_says_whether_a_worker_idles(tmp_path: Path, told: bytes) -> None:
    """What another account writes may be anything."""
    new = tickets.new_entry(tmp_path, 1, 1, pack=False)
    ticket = Ticket.create(tmp_path, new, "")
    try:
        ticket.report_worker(7, 0, {A: 5})
        data = tickets._report_text(7, {A: 5}, 0, is_idle=True)
        text = data.partition(b" ")[2].rstrip(b"\n")
        text = text.replace(b', "idle": true', b', "idle": ' + told)
        with ticket.entry.path.open("r+b") as file:
            file.seek(tickets.REPORT_AT)
            file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        assert ticket.entry.reported() == (7, {A: 5})
        assert ticket.entry.is_idle() == (told == b"true")
    finally:
        ticket.remove()
