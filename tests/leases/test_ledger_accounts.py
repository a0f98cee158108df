"""Several accounts share one ledger, and no account can damage the leases of another."""

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

requires_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can start processes of another account"
)


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


@requires_root
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


@requires_root
def test_dead_processes_of_another_account_hold_no_lease(open_host: LedgerHost) -> None:
    """This account cannot remove the files that the other account's dead processes have left."""
    [theirs, *also_theirs] = open_host.start(3, CLAIMANT_USER=str(OTHER))
    [mine, next_claimant] = open_host.start(2, CLAIMANT_USER=str(OTHER - 1))
    whole = {"memory": 16 * GIB, "gpus": [0]}
    theirs("acquire", **whole)
    open_host.line_up(*((claimant, whole) for claimant in (*also_theirs, mine)))
    for claimant in (theirs, *also_theirs):
        claimant.kill()
    assert mine.answer()
    open_host.line_up((next_claimant, whole))
    mine("release")
    assert next_claimant.answer()
    state = open_host.status()
    assert state["holders"] == [next_claimant.pid]
    assert state["waiting"] == []


@requires_root
def test_an_account_can_only_wake_claims_of_another_account(open_host: LedgerHost) -> None:
    holder, waiter = open_host.start(2)
    [theirs] = open_host.start(1, CLAIMANT_USER=str(OTHER))
    holder("acquire", memory=16 * GIB, count=2, label="secret")
    open_host.line_up((waiter, {"memory": 16 * GIB, "label": "secret, too"}))
    state = theirs("status")
    assert state["holders"] == [holder.pid]
    assert set(state["labels"].values()) == {""}
    for path in open_host.account_folder.iterdir():
        outcome = {action: theirs("attempt", action=action, path=str(path)) for action in ("read", "write")}
        expected = {
            ".ticket": {"read": "done", "write": "PermissionError"},
            ".label": {"read": "PermissionError", "write": "PermissionError"},
            ".wake": {"read": "PermissionError", "write": "done"},
        }
        assert outcome == expected[path.suffix]
        for action in ("remove", "rename"):
            assert theirs("attempt", action=action, path=str(path)) == "PermissionError"
    for action in ("add", "remove folder"):
        assert theirs("attempt", action=action, path=str(open_host.account_folder)) == "PermissionError"
    mutex = str(open_host.root / "flower-gpu-leases.mutex")
    assert theirs("attempt", action="write", path=mutex) == "PermissionError"
    assert theirs("attempt", action="remove", path=mutex) == "PermissionError"
    assert set(open_host.status()["labels"].values()) == {"secret", "secret, too"}


@requires_root
def test_a_ticket_of_another_account_with_the_same_name_changes_no_grant(open_host: LedgerHost) -> None:
    """That ticket asks for one byte of the other GPU and precedes this account's ticket in the queue."""
    holder, waiter = open_host.start(2)
    holder("acquire", memory=16 * GIB, count=2)
    open_host.line_up((waiter, {"memory": 8 * GIB, "gpus": [0]}))
    [name] = [path.name for path in open_host.account_folder.glob("*2-1-*.ticket")]
    theirs = open_host.root / f"flower-gpu-leases-{OTHER}"
    theirs.mkdir()
    os.chown(theirs, OTHER, -1)
    first_uuid, second_uuid = open_host.stub.uuids
    need = {"uuid": second_uuid, "memory_bytes": 1, "share": None, "alone": False}
    with ExitStack() as stack:
        for order in (0, 9):
            content = json.dumps(fields(parts=[], gpu_needs=[need])).encode()
            descriptor = put(theirs, f"{order:015d}{name[15:]}", content)
            stack.callback(os.close, descriptor)
            os.fchown(descriptor, OTHER, -1)
            entries.lock(descriptor)
        assert open_host.status()["users"] == [0, OTHER]
        holder("release")
        assert waiter.answer() == {first_uuid: 8 * GIB}
        # The error names the claim that stays first in the queue although it holds nothing.
        with pytest.raises(RefusedError, match=f"first in line: process .pid 1 of user {OTHER}. for"):
            holder("acquire", memory=16 * GIB, timeout_s=0, gpus=[1])


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such locks")
def test_a_lock_by_a_process_that_can_only_read_a_ticket_keeps_no_lease(open_host: LedgerHost) -> None:
    killed, waiter = open_host.start(2)
    killed("acquire", memory=16 * GIB, gpus=[0])
    [path] = open_host.account_folder.glob("*.ticket")
    killed.kill()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiter("acquire", memory=16 * GIB, gpus=[0], timeout_s=90)
    os.close(descriptor)


@requires_root
def test_a_ledger_folder_created_by_another_account_is_refused(open_host: LedgerHost) -> None:
    """The error names the account that created the folder, and says who can remove it."""
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


@requires_root
def test_a_mutex_file_that_only_another_account_can_open_needs_an_administrator(
    open_host: LedgerHost,
) -> None:
    mutex = open_host.root / "flower-gpu-leases.mutex"
    mutex.touch(0o600)
    [theirs] = open_host.start(1, CLAIMANT_USER=str(OTHER))
    with pytest.raises(RefusedError, match=r"of account root is not a file .* an administrator must remove"):
        theirs("acquire", memory=GIB)


@pytest.mark.parametrize("user", ["0{}", "00{}", "+{}", " {}", "\N{ARABIC-INDIC DIGIT ZERO}{}", "{}_0"])
def test_an_account_has_one_folder_only(open_host: LedgerHost, user: str) -> None:
    """With several folders, an account could have more tickets than the limit per account."""
    [mine] = open_host.start(1)
    assert mine("acquire", memory=GIB)
    second = open_host.root / f"flower-gpu-leases-{user.format(os.getuid())}"
    shutil.copytree(open_host.account_folder, second, ignore=shutil.ignore_patterns("*.wake"))
    assert [path for _, path in LedgerFolder(open_host.root).all()] == [open_host.account_folder]


def test_the_folder_of_a_new_account_is_listed_at_once(open_host: LedgerHost) -> None:
    """The list of folders is cached, but only until the next change."""
    ledger = LedgerFolder(open_host.root)
    other = OTHER if os.getuid() == 0 else os.getuid()
    for _ in range(20):
        # An old modification time makes the ledger cache the list.
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
os.utime(root, (0, 0))  # an old modification time makes the ledger cache the list
for _ in range(10):
    lease()
print(before, listed.count(root) - before)
"""


def test_the_files_of_other_programs_are_listed_once(open_host: LedgerHost, run_script: Any) -> None:
    """The folder is ``/tmp`` by default, which may hold 100,000 files of other programs."""
    before, later = map(int, run_script(_LEASES, env=open_host.env).stdout.split())
    assert before > 1, "the folder has just been changed"
    assert later == 1


def test_an_unusable_ledger_folder_is_an_error(open_host: LedgerHost) -> None:
    open_host.root.chmod(0o555)
    user = {"CLAIMANT_USER": str(OTHER)} if os.getuid() == 0 else {}
    refused = open_host.start_refused(**user)
    assert refused.kind == "LeaseError"
    assert f"this account cannot write to FLOWER_GPU_LEDGER_DIR={open_host.root}" in refused.message
    refused = open_host.start_refused(FLOWER_GPU_LEDGER_DIR="/nowhere/at/all")
    assert refused.kind == "LeaseError"
    assert "FLOWER_GPU_LEDGER_DIR=/nowhere/at/all" in refused.message
