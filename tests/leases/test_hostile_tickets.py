"""Whatever another account writes into its tickets, no call fails, and a request is granted."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flower_gpu.cli import leases
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import GPU, Inventory
from flower_gpu.leases import entries
from flower_gpu.leases.admission import CORES, MEMORY, GPUNeed, HostNeed, Part, card_of_group, card_of_task
from flower_gpu.leases.entries import Entry, lock, pid_namespace
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Ticket
from flower_gpu.leases.wording import describe, what_is_held

GIB = 1 << 30
A = "GPU-a"
# Another account, where this one can make its files.
OTHER = 65534 if os.getuid() == 0 else os.getuid()

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
# Little, so that it leaves room for the request.
amounts = st.sampled_from([0, 1, 100])
gpus = st.sampled_from([A, "GPU-b"])
resources = st.sampled_from(
    [CORES, MEMORY, card_of_group(CORES, 7), card_of_group(MEMORY, 7), card_of_task(OTHER, 7)]
)
# What no ticket says; as an amount, an amount of much would keep the request waiting.
numbers = [-1, 1.5, True, 1 << 51, 10**400, float("nan"), float("inf")]
texts = ["", "1", "\x1b[2J", "\ud800", CORES, A, "cores:x", "unknown-memory", card_of_task(3, 7), "x" * 101]
wrong = st.sampled_from([None, *numbers, *texts]) | st.builds(list) | st.builds(dict)
sizes = {"memory_bytes": amounts, "alone": st.just(False)}
parts = st.fixed_dictionaries({"uuid": gpus | resources, "budget_bytes": st.just(GIB), **sizes})
options = st.fixed_dictionaries({"uuid": gpus, "share": st.sampled_from([None, 0.01]), **sizes})
needs = st.fixed_dictionaries(
    {"resource": resources, "amount": amounts, "least": amounts, "capacity": amounts}
)
tickets_of_others = st.fixed_dictionaries(
    {
        "v": st.just(1),
        "pid": amounts | st.just(os.getpid()),
        "pid_namespace": amounts | st.just(pid_namespace()),
        "since": st.sampled_from([0.0, time.time()]),
        "count": st.sampled_from([0, 1]),
        "pack": st.booleans(),
        "gpu_needs": st.lists(options, max_size=2, unique_by=itemgetter("uuid")),
        "parts": st.lists(parts, max_size=2, unique_by=itemgetter("uuid")),
        "host_needs": st.lists(needs, max_size=2, unique_by=itemgetter("resource")),
    }
)
reports = st.fixed_dictionaries(
    {
        "pid": amounts | st.just(os.getpid()),
        "used": st.dictionaries(gpus, amounts),
        "base_bytes": amounts,
        "idle": st.booleans(),
    }
)


def places(said: Any) -> Iterator[tuple[Any, Any]]:
    """Yield everything in it, by where it is."""
    for place in list(said) if isinstance(said, dict) else range(len(said) if isinstance(said, list) else 0):
        yield said, place
        yield from places(said[place])


@st.composite
def spoiled(draw: Any, whole: st.SearchStrategy[Any]) -> Any:
    """Draw something with up to two of its values changed, or left out."""
    said = draw(whole)
    for _ in range(draw(st.integers(0, 2))):
        holder, place = draw(st.sampled_from(list(places(said))))
        if draw(st.booleans()):
            holder[place] = draw(wrong)
        else:
            del holder[place]
    return said


def in_bytes(said: Any) -> bytes:
    return json.dumps(said).encode()


def report_of(said: Any) -> bytes:
    text = in_bytes(said)
    return b"%08x %s\n" % (zlib.crc32(text), text)


contents = st.binary(max_size=200) | (anything | spoiled(tickets_of_others)).map(in_bytes)
told = st.just(b"") | st.binary(max_size=200) | (anything | spoiled(reports)).map(report_of)
files = st.tuples(
    st.from_regex(r"[0-9]{1,16}-[0-9]{1,2}-[0-9a-z]{1,16}", fullmatch=True)
    | st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=40),
    contents,
    told,
)


def ticket_of(**more: Any) -> bytes:
    said = {"v": 1, "pid": 1, "pid_namespace": 1, "since": 0, "count": 0, "pack": False}
    return in_bytes(said | {"gpu_needs": [], "parts": [], "host_needs": [], **more})


def holds(name: str, amount: int, budget: int) -> bytes:
    part = {"uuid": name, "memory_bytes": amount, "budget_bytes": budget, "alone": False}
    return ticket_of(parts=[part])


def waits(name: str, amount: int) -> bytes:
    return ticket_of(host_needs=[{"resource": name, "amount": amount, "least": 0, "capacity": 0}])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    gpu = GPU(0, A, "Stub", 17 * GIB, GIB, 16 * GIB, 0, 0, ())
    monkeypatch.setattr(inventory, "take", lambda **_: Inventory((gpu,), None, None))
    theirs = tmp_path / "theirs"
    if os.getuid() == 0:
        theirs = tmp_path / f"flower-gpu-leases-{OTHER}"
    else:
        all_ = LedgerFolder.all
        monkeypatch.setattr(LedgerFolder, "all", lambda self: [*all_(self), (OTHER, theirs)])
    theirs.mkdir()
    os.chown(theirs, OTHER, -1)
    yield theirs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example([("1-1-a", waits(CORES, 10**400), b"")])
@example([("1-1-a", holds(CORES, 10**400, GIB), b"")])
@example([("1-1-a", holds(card_of_task(OTHER, 7), 1, 0), b"")])
@given(found=st.lists(files, min_size=1, max_size=4, unique_by=itemgetter(0)))
def test_no_ticket_of_another_account_stops_a_call(root: Path, found: list[tuple[str, bytes, bytes]]) -> None:
    def needed() -> tuple[HostNeed, ...]:
        return (
            HostNeed(CORES, 500, 500),
            HostNeed(MEMORY, 1 << 20, 1 << 20),
            HostNeed(card_of_task(os.getuid(), 7), 1 << 20, 1 << 20, capacity=GIB),
        )

    # Without a reserve: on a busy machine, all free memory may be within it.
    ledger = Ledger(LedgerFolder(root.parent), host_reserve_bytes=0)
    claimant = Claimant(lambda gpus: tuple(GPUNeed(gpu.uuid, 8 * GIB) for gpu in gpus), host_needs=needed)
    with ExitStack() as stack:
        for name, data, report in found:
            path = root / f"{name}.ticket"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            except OSError:  # too long a name
                continue
            stack.callback(path.unlink, missing_ok=True)
            stack.callback(os.close, descriptor)
            os.write(descriptor, data)
            os.pwrite(descriptor, report, 1 << 16)
            os.fchown(descriptor, OTHER, -1)
            lock(descriptor)
        ticket = ledger.acquire(claimant, deadline=time.monotonic())
        stack.callback(ledger.release, ticket)
        got = {part.uuid: part.memory_bytes for part in ticket.entry.parts}
        assert got == {A: 8 * GIB} | {need.resource: need.amount for need in needed()}
        state = ledger.status()
        assert ticket.entry.id in {entry.id for entry in state.holders}
        assert "\x1b" not in "\n".join([*leases._lines(state), *map(describe, state.waiting)])
        json.dumps(leases.describe(ledger, state), allow_nan=False)
        assert what_is_held(ledger.status(), ticket.entry, "x")


def test_a_grant_counts_only_if_the_mutex_was_not_replaced_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner can do that, and a third process then decides at the same time."""
    seen: list[tuple[Part, ...]] = []
    write = Ticket.write

    def replaced(ticket: Ticket, entry: Entry) -> None:
        write(ticket, entry)
        seen.append(entry.parts)
        if len(seen) in (1, 3):  # when it is made, and when it is granted later
            mutex = root.parent / "flower-gpu-leases.mutex"
            mutex.unlink()
            mutex.touch()

    monkeypatch.setattr(Ticket, "write", replaced)
    ledger = Ledger(LedgerFolder(root.parent))
    claimant = Claimant(lambda gpus: tuple(GPUNeed(gpu.uuid, 8 * GIB) for gpu in gpus))
    ticket = ledger.acquire(claimant, deadline=time.monotonic() + 60)
    assert [bool(parts) for parts in seen] == [True, False, True, False, True]
    assert ticket.entry.parts == seen[-1]
    ledger.release(ticket)


def test_what_is_no_ticket_is_said_once_with_its_path_and_owner(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_warned_accounts", set())
    for number in range(2):
        path = root / f"{number}-1-{number}.ticket"
        path.write_bytes(b"{}")
        os.chown(path, OTHER, -1)
    for _ in range(2):
        assert len(Ledger(LedgerFolder(root.parent)).status().invalid) == 2
    [record] = caplog.records
    assert record.getMessage().startswith(f"{root}/")
    assert " of account " in record.getMessage()
