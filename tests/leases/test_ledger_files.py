"""Foreign or broken files in the ledger's folder cause no crash, no wait and no grant beyond the capacity."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB

from flower_gpu.leases import admission, entries

WHOLE = {"memory": 16 * GIB, "gpus": [0]}
OTHER = 65534


def fields(uuid: str = "GPU-x", **changes: Any) -> dict[str, Any]:
    part = {"uuid": uuid, "memory_bytes": GIB, "budget_bytes": GIB, "alone": False}
    option = {"uuid": uuid, "memory_bytes": GIB, "share": None, "alone": False}
    return {
        "v": 1,
        "pid": 1,
        "pid_namespace": 1,
        "since": 1.0,
        "count": 1,
        "pack": False,
        "gpu_needs": [option],
        "parts": [part],
        "host_needs": [],
        **changes,
    }


def broken_tickets(uuid: str) -> dict[str, bytes]:
    """Return the contents of invalid tickets by file name.

    The properties in test_hostile_tickets.py draw more of them.
    """
    good = fields(uuid)
    [part], [option] = good["parts"], good["gpu_needs"]
    parts = [
        {**part, "memory_bytes": -16 * GIB},
        {**part, "memory_bytes": 1.5},
        {**part, "budget_bytes": float("nan")},
        {**part, "more": 1},
        {**part, "memory_bytes": 10**400},
        {**part, "uuid": "\x1b[2J"},
        {**part, "uuid": "cores:all"},
        # The resource belongs to tasks of another account.
        {**part, "uuid": f"unknown-memory:{1 << 60}", "budget_bytes": GIB},
        "part",
    ]
    # Resources of tasks of this account and of the other one. A budget of 0 would mean that the host has
    # none.
    names = ("cores", "memory:7", *(admission.card_of_task(user, 7) for user in (os.getuid(), OTHER)))
    host_parts = [{**part, "uuid": name} for name in names]
    options = [
        {**option, "memory_bytes": -GIB},
        {**option, "memory_bytes": None, "share": float("nan")},
        {**option, "memory_bytes": None, "share": -1},
        {**option, "uuid": "memory"},
    ]
    contents: list[Any] = [
        *({**good, "parts": [value]} for value in parts),
        *({**good, "parts": [], "gpu_needs": [value]} for value in options),
        *({**good, "parts": [value | {"budget_bytes": 0}]} for value in host_parts),
        {**good, "parts": [part, part]},
        {**good, "parts": [], "gpu_needs": [option, option]},
        {**good, "parts": [], "count": 2},
        {**good, "count": -1},
        {**good, "since": 10**400},
        {"v": 1},
    ]
    raw = [
        *(json.dumps(content).encode() for content in contents),
        b"",
        b"\n",
        b"\0" * 100,
        b"\xff\xfe garbage \x80",
        b"[" * 60000,
        b'{"v": 1, "pid":' + b"9" * 60000,
        json.dumps(good).encode()[:-20],
    ]
    return {f"{index + 1:015d}-1-{index:016x}.ticket": data for index, data in enumerate(raw)}


NAMES = ["x.ticket", "1-2.ticket", "-1-1-a.ticket", "a-b-c.ticket", "1-1-1-1.ticket", "é-\udcff-x.ticket"]


def put(folder: Path, name: str, data: bytes) -> int:
    """Write a file and return an open descriptor of it."""
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(descriptor, data)
    return descriptor


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("account", ["own", "other"])
def test_broken_tickets_block_no_claim(one_gpu: LedgerHost, account: str, alive: bool) -> None:
    if account == "other" and os.getuid() != 0:
        pytest.skip("only root can make files of another account")
    first, second = one_gpu.start(2)
    one_gpu.status()
    user = os.getuid() if account == "own" else OTHER
    folder = one_gpu.root / f"flower-gpu-leases-{user}"
    folder.mkdir(exist_ok=True)
    os.chown(folder, user, -1)
    files = broken_tickets(one_gpu.stub.uuids[0])
    files |= {name: json.dumps(fields(one_gpu.stub.uuids[0])).encode() for name in NAMES}
    with ExitStack() as stack:
        for name, data in files.items():
            descriptor = put(folder, name, data)
            stack.callback(os.close, descriptor)
            os.fchown(descriptor, user, -1)
            if alive:
                entries.lock(descriptor)
        first("acquire", **WHOLE)
        one_gpu.line_up((second, {"memory": GIB}))
        # No broken ticket adds capacity.
        assert one_gpu.status()["ready"] == []
        first("release")
        assert second.answer()
        second("release")
    remaining = {path.name for path in folder.iterdir()}
    assert remaining == (set(files) if alive or account == "other" else set())


def test_invalid_reports_are_ignored(one_gpu: LedgerHost) -> None:
    holder, waiter = one_gpu.start(2)
    holder("acquire", memory=8 * GIB)
    holder("use", gpu=0, nbytes=4 * GIB, is_reported=False)
    one_gpu.stub.set(0, hidden=1)
    [ticket] = one_gpu.account_folder.glob("*.ticket")
    uuid = one_gpu.stub.uuids[0]
    for report in (
        b"[" * 5000,
        b'{"pid": 1}',
        json.dumps({"pid": 1, "used": {uuid: -8 * GIB}}).encode(),
        json.dumps({"pid": 1, "used": {uuid: float("inf")}}).encode(),
        json.dumps({"pid": 1, "used": {uuid: 10**400}}).encode(),
        json.dumps({"pid": 10**400, "used": {uuid: GIB}}).encode(),
        b'{"pid": 1, "used": {"x": ' + b"9" * 5000 + b"}}",
    ):
        for line in (report, b"%08x %s\n" % (zlib.crc32(report), report)):
            with ticket.open("r+b") as file:
                file.seek(1 << 16)
                file.write(line)
            assert list(one_gpu.status()["cards"].values()) == [12 * GIB]
    one_gpu.line_up((waiter, {"memory": 5 * GIB}))
    assert one_gpu.status()["ready"] == []


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


OBJECTS: dict[str, Callable[[Path], None]] = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "huge": make_huge,
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


def test_tickets_that_are_not_regular_files_block_no_claim(one_gpu: LedgerHost) -> None:
    first, second = one_gpu.start(2)
    one_gpu.status()
    one_gpu.account_folder.mkdir(exist_ok=True)
    for number, make in enumerate(OBJECTS.values()):
        for suffix in ("ticket", "wake", "label", "new"):
            make(one_gpu.account_folder / f"{number:015d}-1-{number}.{suffix}")
    first("acquire", **WHOLE)
    one_gpu.line_up((second, WHOLE))
    first("release")
    assert second.answer()
    # Only folders remain, because the ledger never removes a folder.
    assert {path.is_dir() for path in one_gpu.account_folder.glob("*-*-?.*")} == {True}


def test_a_label_or_wake_pipe_of_another_file_type_blocks_no_claim(one_gpu: LedgerHost) -> None:
    holder, waiter = one_gpu.start(2)
    holder("acquire", **WHOLE)
    one_gpu.line_up((waiter, WHOLE))
    victim = one_gpu.root / "precious"
    victim.write_text("do not touch")
    for path in one_gpu.account_folder.glob("*.label"):
        path.unlink()
        os.mkfifo(path)
    for path in one_gpu.account_folder.glob("*.wake"):
        path.unlink()
        os.link(victim, path)
    assert set(one_gpu.status()["labels"].values()) == {""}
    holder("release")
    assert waiter.answer()
    assert victim.read_text() == "do not touch"


def test_a_ticket_of_another_version_is_kept_while_its_process_lives(one_gpu: LedgerHost) -> None:
    [claimant] = one_gpu.start(1)
    one_gpu.account_folder.mkdir()
    names = [f"{order:015d}-1-{order}.{suffix}" for order in (1, 2) for suffix in ("ticket",)]
    for name in names:
        put(one_gpu.account_folder, name, json.dumps(fields(v=2)).encode())
    for order in (1, 2):
        put(one_gpu.account_folder, f"{order}.label", b"")
    descriptor = os.open(one_gpu.account_folder / names[0], os.O_RDWR)
    entries.lock(descriptor)
    claimant("acquire", **WHOLE)
    claimant("release")
    assert {path.name for path in one_gpu.account_folder.iterdir()} == {names[0], "1.label"}
    os.close(descriptor)


def test_claims_behind_a_ticket_with_a_huge_order_are_granted(one_gpu: LedgerHost) -> None:
    """A ticket has an order so high that the next order cannot be counted on from it."""
    holder, *waiting = one_gpu.start(3)
    one_gpu.account_folder.mkdir()
    content = fields(one_gpu.stub.uuids[0], parts=[], gpu_needs=[])
    descriptor = put(one_gpu.account_folder, f"{10**30}-1-{'f' * 16}.ticket", json.dumps(content).encode())
    entries.lock(descriptor)
    holder("acquire", **WHOLE)
    one_gpu.line_up(*((waiter, WHOLE) for waiter in waiting))
    assert len(one_gpu.status()["waiting"]) == 3
    for name in ("release", "status"):
        holder(name)
    first = next(w for w in waiting if w.pid in one_gpu.until(lambda state: state["holders"])["holders"])
    assert first.answer()
    first("release")
    [second] = [waiter for waiter in waiting if waiter is not first]
    assert second.answer()
    os.close(descriptor)


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_mutex_of_another_file_type_works_or_is_a_clear_error(one_gpu: LedgerHost, kind: str) -> None:
    [claimant] = one_gpu.start(1)
    mutex = one_gpu.root / "flower-gpu-leases.mutex"
    OBJECTS[kind](mutex)
    # These can be opened, so they can be locked.
    if kind in ("huge", "pipe", "folder"):
        assert claimant("acquire", **WHOLE)
    else:
        with pytest.raises(RefusedError, match="LeaseError") as refused:
            claimant("acquire", **WHOLE)
        assert "flower-gpu-leases.mutex" in refused.value.message
        mutex.unlink()
        assert claimant("acquire", **WHOLE)


def test_a_waiter_whose_ticket_was_removed_gets_an_error(one_gpu: LedgerHost) -> None:
    holder, waiter = one_gpu.start(2)
    holder("acquire", **WHOLE)
    one_gpu.line_up((waiter, {**WHOLE, "label": "fit of client 2"}))
    for path in one_gpu.account_folder.iterdir():
        path.unlink()
    with pytest.raises(RefusedError, match=r"LeaseError: fit of client 2: its ticket .* was removed"):
        waiter.answer()


@pytest.mark.parametrize("remaining", range(6))
def test_a_process_without_free_descriptors_changes_no_lease(one_gpu: LedgerHost, remaining: int) -> None:
    holder, waiter, limited = one_gpu.start(3)
    # The first call loads the modules that are imported late.
    limited("status")
    holder("acquire", **WHOLE)
    one_gpu.line_up((waiter, WHOLE))
    files = sorted(path.name for path in one_gpu.account_folder.iterdir())
    limited("limit_open_files", remaining=remaining)
    with pytest.raises(RefusedError, match=r"Lease(Timeout)?Error"):
        limited("acquire", memory=GIB, timeout_s=0)
    assert sorted(path.name for path in one_gpu.account_folder.iterdir()) == files
    state = one_gpu.status()
    assert (state["holders"], state["waiting"]) == ([holder.pid], [waiter.pid])
