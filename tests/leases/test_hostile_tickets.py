"""Tickets of another account may have any content, but no call fails and a claim is still granted."""

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
# Another account if this one can create files for it, otherwise this account.
OTHER = 65534 if os.getuid() == 0 else os.getuid()

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
# These amounts are small, so that they leave room for the claim.
amounts = st.sampled_from([0, 1, 100])
gpus = st.sampled_from([A, "GPU-b"])
resources = st.sampled_from(
    [CORES, MEMORY, card_of_group(CORES, 7), card_of_group(MEMORY, 7), card_of_task(OTHER, 7)]
)
# Values that no valid ticket contains. A large valid amount is not among them, because it would keep the
# claim waiting.
numbers = [-1, 1.5, True, 1 << 51, 10**400, float("nan"), float("inf")]
texts = ["", "1", "\x1b[2J", "\ud800", CORES, A, "cores:x", "unknown-memory", card_of_task(3, 7), "x" * 101]
invalid_values = st.sampled_from([None, *numbers, *texts]) | st.builds(list) | st.builds(dict)
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


def keys_of_containers(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in nested JSON values together with each of its keys or indices."""
    for key in (
        list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    ):
        yield value, key
        yield from keys_of_containers(value[key])


@st.composite
def corrupted(draw: Any, valid: st.SearchStrategy[Any]) -> Any:
    """Draw a value with up to two of its nested values changed or removed."""
    content = draw(valid)
    for _ in range(draw(st.integers(0, 2))):
        container, key = draw(st.sampled_from(list(keys_of_containers(content))))
        if draw(st.booleans()):
            container[key] = draw(invalid_values)
        else:
            del container[key]
    return content


def json_bytes(content: Any) -> bytes:
    return json.dumps(content).encode()


def report_line(content: Any) -> bytes:
    text = json_bytes(content)
    return b"%08x %s\n" % (zlib.crc32(text), text)


contents = st.binary(max_size=200) | (anything | corrupted(tickets_of_others)).map(json_bytes)
report_contents = st.just(b"") | st.binary(max_size=200) | (anything | corrupted(reports)).map(report_line)
files = st.tuples(
    st.from_regex(r"[0-9]{1,16}-[0-9]{1,2}-[0-9a-z]{1,16}", fullmatch=True)
    | st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=40),
    contents,
    report_contents,
)


def ticket_content(**more: Any) -> bytes:
    content = {"v": 1, "pid": 1, "pid_namespace": 1, "since": 0, "count": 0, "pack": False}
    return json_bytes(content | {"gpu_needs": [], "parts": [], "host_needs": [], **more})


def granted_ticket(name: str, amount: int, budget: int) -> bytes:
    part = {"uuid": name, "memory_bytes": amount, "budget_bytes": budget, "alone": False}
    return ticket_content(parts=[part])


def waiting_ticket(name: str, amount: int) -> bytes:
    return ticket_content(host_needs=[{"resource": name, "amount": amount, "least": 0, "capacity": 0}])


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
@example([("1-1-a", waiting_ticket(CORES, 10**400), b"")])
@example([("1-1-a", granted_ticket(CORES, 10**400, GIB), b"")])
@example([("1-1-a", granted_ticket(card_of_task(OTHER, 7), 1, 0), b"")])
@given(ticket_files=st.lists(files, min_size=1, max_size=4, unique_by=itemgetter(0)))
def test_no_ticket_of_another_account_makes_a_call_fail(
    root: Path, ticket_files: list[tuple[str, bytes, bytes]]
) -> None:
    def host_needs() -> tuple[HostNeed, ...]:
        return (
            HostNeed(CORES, 500, 500),
            HostNeed(MEMORY, 1 << 20, 1 << 20),
            HostNeed(card_of_task(os.getuid(), 7), 1 << 20, 1 << 20, capacity=GIB),
        )

    # The ledger has no reserve here, because on a busy machine all free memory may be within the reserve.
    ledger = Ledger(LedgerFolder(root.parent), host_reserve_bytes=0)
    claimant = Claimant(lambda gpus: tuple(GPUNeed(gpu.uuid, 8 * GIB) for gpu in gpus), host_needs=host_needs)
    with ExitStack() as stack:
        for name, data, report in ticket_files:
            path = root / f"{name}.ticket"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            except OSError:  # the name is too long
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
        assert got == {A: 8 * GIB} | {need.resource: need.amount for need in host_needs()}
        state = ledger.status()
        assert ticket.entry.id in {entry.id for entry in state.holders}
        assert "\x1b" not in "\n".join([*leases._lines(state), *map(describe, state.waiting)])
        json.dumps(leases.describe(ledger, state), allow_nan=False)
        assert what_is_held(ledger.status(), ticket.entry, "x")


def test_a_grant_counts_only_if_the_mutex_was_not_replaced_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the mutex can replace it, and then a third process decides at the same time."""
    written_parts: list[tuple[Part, ...]] = []
    write = Ticket.write

    def write_and_replace_mutex(ticket: Ticket, entry: Entry) -> None:
        write(ticket, entry)
        written_parts.append(entry.parts)
        # The first write creates the ticket, the third grants it later.
        if len(written_parts) in (1, 3):
            mutex = root.parent / "flower-gpu-leases.mutex"
            mutex.unlink()
            mutex.touch()

    monkeypatch.setattr(Ticket, "write", write_and_replace_mutex)
    ledger = Ledger(LedgerFolder(root.parent))
    claimant = Claimant(lambda gpus: tuple(GPUNeed(gpu.uuid, 8 * GIB) for gpu in gpus))
    ticket = ledger.acquire(claimant, deadline=time.monotonic() + 60)
    assert [bool(parts) for parts in written_parts] == [True, False, True, False, True]
    assert ticket.entry.parts == written_parts[-1]
    ledger.release(ticket)


def test_invalid_tickets_are_logged_once_with_path_and_owner(
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
