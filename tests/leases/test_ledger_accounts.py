"""Several accounts share one ledger, and none can break what is another's."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB
from test_ledger_files import fields, put

from flower_gpu.leases import entries
from flower_gpu.leases.ledger_folder import LedgerFolder

OTHER = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of another account")


@pytest.fixture
def open_host() -> Iterator[LedgerHost]:
    """A host in a folder that other accounts can reach."""
    folder = Path(tempfile.mkdtemp(prefix="flower-gpu-accounts-"))
    folder.chmod(0o755)
    state = folder / "state"
    state.mkdir()
    os.chown(state, OTHER if os.getuid() == 0 else -1, -1)
    host = LedgerHost(folder)
    host.env["FLOWER_GPU_STATE_DIR"] = str(state)
    yield host
    host.close()
    shutil.rmtree(folder)


@as_root
def test_accounts_share_the_gpus(open_host: LedgerHost) -> None:
    [mine] = open_host.start(1)
    [theirs] = open_host.start(1, CLAIMANT_USER=str(OTHER))
    mine("acquire", memory=10 * GIB, gpus=[0])
    open_host.line_up((theirs, {"memory": 10 * GIB, "gpus": [0]}))
    state = open_host.status()
    assert state["users"] == [0, OTHER]
    assert state["ready"] == []
    mine("release")
    assert theirs.answer()
    open_host.line_up((mine, {"memory": 10 * GIB, "gpus": [0]}))
    theirs("release")
    assert mine.answer()


@as_root
def test_the_dead_of_another_account_take_nothing(open_host: LedgerHost) -> None:
    """This account cannot remove what they have left."""
    [theirs, *also_theirs] = open_host.start(3, CLAIMANT_USER=str(OTHER))
    [mine, next_one] = open_host.start(2, CLAIMANT_USER=str(OTHER - 1))
    whole = {"memory": 16 * GIB, "gpus": [0]}
    theirs("acquire", **whole)
    open_host.line_up(*((claimant, whole) for claimant in (*also_theirs, mine)))
    for claimant in (theirs, *also_theirs):
        claimant.kill()
    assert mine.answer()
    open_host.line_up((next_one, whole))
    mine("release")
    assert next_one.answer()
    state = open_host.status()
    assert state["holders"] == [next_one.pid]
    assert state["waiting"] == []


@as_root
def test_an_account_can_wake_another_and_nothing_else(open_host: LedgerHost) -> None:
    holder, waiter = open_host.start(2)
    [theirs] = open_host.start(1, CLAIMANT_USER=str(OTHER))
    holder("acquire", memory=16 * GIB, count=2, label="secret")
    open_host.line_up((waiter, {"memory": 16 * GIB, "label": "secret, too"}))
    state = theirs("status")
    assert state["holders"] == [holder.pid]
    assert set(state["labels"].values()) == {""}
    for path in open_host.own.iterdir():
        outcome = {what: theirs("attempt", what=what, path=str(path)) for what in ("read", "write")}
        expected = {
            ".ticket": {"read": "done", "write": "PermissionError"},
            ".label": {"read": "PermissionError", "write": "PermissionError"},
            ".wake": {"read": "PermissionError", "write": "done"},
        }
        assert outcome == expected[path.suffix]
        for what in ("remove", "rename"):
            assert theirs("attempt", what=what, path=str(path)) == "PermissionError"
    for what in ("add", "remove folder"):
        assert theirs("attempt", what=what, path=str(open_host.own)) == "PermissionError"
    mutex = str(open_host.root / "flower-gpu-leases.mutex")
    assert theirs("attempt", what="write", path=mutex) == "PermissionError"
    assert theirs("attempt", what="remove", path=mutex) == "PermissionError"
    assert set(open_host.status()["labels"].values()) == {"secret", "secret, too"}


@as_root
def test_a_ticket_of_another_account_with_the_same_name_changes_no_grant(open_host: LedgerHost) -> None:
    """It would be granted one byte of the other GPU, and is before this account's in the line."""
    holder, waiter = open_host.start(2)
    holder("acquire", memory=16 * GIB, count=2)
    open_host.line_up((waiter, {"memory": 8 * GIB, "gpus": [0]}))
    [name] = [path.name for path in open_host.own.glob("*2-1-*.ticket")]
    theirs = open_host.root / f"flower-gpu-leases-{OTHER}"
    theirs.mkdir()
    os.chown(theirs, OTHER, -1)
    one, other = open_host.stub.uuids
    option = {"uuid": other, "memory_bytes": 1, "share": None, "alone": False}
    with ExitStack() as stack:
        for order in (0, 9):
            said = json.dumps(fields(parts=[], gpu_needs=[option])).encode()
            descriptor = put(theirs, f"{order:015d}{name[15:]}", said)
            stack.callback(os.close, descriptor)
            os.fchown(descriptor, OTHER, -1)
            entries.lock(descriptor)
        assert open_host.status()["users"] == [0, OTHER]
        holder("release")
        assert waiter.answer() == {one: 8 * GIB}
        # Who holds nothing, and is first in the line for ever, is told to those who wait.
        with pytest.raises(RefusedError, match=f"first in line: process .pid 1 of user {OTHER}. for"):
            holder("acquire", memory=16 * GIB, timeout_s=0, gpus=[1])


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such locks")
def test_who_can_only_read_a_ticket_does_not_keep_it_alive(open_host: LedgerHost) -> None:
    killed, waiter = open_host.start(2)
    killed("acquire", memory=16 * GIB, gpus=[0])
    [path] = open_host.own.glob("*.ticket")
    killed.kill()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiter("acquire", memory=16 * GIB, gpus=[0], timeout_s=90)
    os.close(descriptor)


@as_root
def test_a_folder_that_another_account_has_made_is_not_used(open_host: LedgerHost) -> None:
    """The error says who has made the folder, and who alone can remove it."""
    taken = open_host.root / f"flower-gpu-leases-{OTHER}"
    taken.mkdir(mode=0o777)
    [theirs] = open_host.start(1, CLAIMANT_USER=str(OTHER))
    with pytest.raises(RefusedError, match=r"account root has created .* an administrator must remove it"):
        theirs("acquire", memory=GIB)
    taken.rmdir()
    assert theirs("acquire", memory=GIB)
    theirs("release")
    taken.chmod(0o777)
    with pytest.raises(RefusedError, match="only this account can write to; remove it"):
        theirs("acquire", memory=GIB)


@as_root
def test_a_mutex_that_another_account_keeps_to_itself_needs_an_administrator(open_host: LedgerHost) -> None:
    mutex = open_host.root / "flower-gpu-leases.mutex"
    mutex.touch(0o600)
    [theirs] = open_host.start(1, CLAIMANT_USER=str(OTHER))
    with pytest.raises(RefusedError, match=r"of account root is not a file .* an administrator must remove"):
        theirs("acquire", memory=GIB)


@pytest.mark.parametrize("user", ["0{}", "00{}", "+{}", " {}", "\N{ARABIC-INDIC DIGIT ZERO}{}", "{}_0"])
def test_an_account_has_one_folder_only(open_host: LedgerHost, user: str) -> None:
    """In several folders it could have more tickets than count of one account."""
    [mine] = open_host.start(1)
    assert mine("acquire", memory=GIB)
    second = open_host.root / f"flower-gpu-leases-{user.format(os.getuid())}"
    shutil.copytree(open_host.own, second, ignore=shutil.ignore_patterns("*.wake"))
    assert [path for _, path in LedgerFolder(open_host.root).all()] == [open_host.own]


def test_a_folder_of_a_new_account_is_seen_at_once(open_host: LedgerHost) -> None:
    """The list of folders is kept, but not beyond the next change."""
    ledger = LedgerFolder(open_host.root)
    other = OTHER if os.getuid() == 0 else os.getuid()
    for _ in range(20):
        # As if nothing had changed for a while, so that the list is kept.
        os.utime(open_host.root, (0, 0))
        assert ledger.all() == []
        path = open_host.root / f"flower-gpu-leases-{other}"
        path.mkdir()
        os.chown(path, other, -1)
        assert ledger.all() == [(other, path)]
        path.rmdir()
        assert ledger.all() == []


_LEASES = """
import os, sys
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.ledger import Claimant, Ledger
root = os.environ["FLOWER_GPU_LEDGER_DIR"]
listed = []
def note(event, args):
    if event in ("os.listdir", "os.scandir"):
        listed.append(str(args[0]))
sys.addaudithook(note)
claimant = Claimant(count=0, host_needs=lambda: (HostNeed(CORES, 10, 10),))
def lease():
    ledger = Ledger()
    ledger.release(ledger.acquire(claimant))
lease()
before = listed.count(root)
os.utime(root, (0, 0))  # as if no program had changed the folder for a while
for _ in range(10):
    lease()
print(before, listed.count(root) - before)
"""


def test_the_files_of_other_programs_are_listed_once(open_host: LedgerHost, run_script: Any) -> None:
    """The folder is ``/tmp``, where there may be 100,000 of them."""
    before, then = map(int, run_script(_LEASES, env=open_host.env).stdout.split())
    assert before > 1, "the folder has just been changed"
    assert then == 1


def test_a_ledger_folder_that_cannot_be_used_is_an_error(open_host: LedgerHost) -> None:
    open_host.root.chmod(0o555)
    user = {"CLAIMANT_USER": str(OTHER)} if os.getuid() == 0 else {}
    refused = open_host.start_refused(**user)
    assert refused.kind == "LeaseError"
    assert f"this account cannot write to FLOWER_GPU_LEDGER_DIR={open_host.root}" in refused.message
    refused = open_host.start_refused(FLOWER_GPU_LEDGER_DIR="/nowhere/at/all")
    assert refused.kind == "LeaseError"
    assert "FLOWER_GPU_LEDGER_DIR=/nowhere/at/all" in refused.message
