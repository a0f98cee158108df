"""The ledger: where it is, whether it works, and whether other programs use another one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from flower_gpu.doctor import Found
from flower_gpu.doctor.superlinks import OtherProcess, others
from flower_gpu.errors import LeaseError
from flower_gpu.gpu.inventory import Inventory
from flower_gpu.leases import tickets
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.tickets import Entry
from flower_gpu.printable import account_name, path_text, printable
from flower_gpu.workers import state_folder

_VARIABLE = "FLOWER_GPU_LEDGER_DIR"
_DEFAULT = "/tmp"
_MUTEX_WAIT_S = 2.0
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "afs")
_FLOWER: Final = (
    "flower-superlink",
    "flower-supernode",
    "flower-superexec",
    "flwr-clientapp",
    "flwr-serverapp",
    "flwr-simulation",
    "flower-gpu",
)
# The kernel gives this number to the first pid namespace (PROC_PID_INIT_INO): that of no container.
_HOST_PID_NAMESPACE = 0xEFFFFFFC


def folder() -> Iterator[Found]:
    """Check the ledger's folder."""
    asked = os.environ.get(_VARIABLE)
    root = Path(asked or _DEFAULT).absolute()
    try:
        ledger = LedgerFolder.find()
        if not ledger.reason:
            ledger.own()
    except (LeaseError, OSError) as error:
        todo = f"mkdir -p -m 1777 {root}" if not root.is_dir() else "make it writable, or name another folder"
        yield "problem", str(error), todo
        return
    if ledger.reason:
        todo = f"chmod 1777 {root}, or {_VARIABLE}=a folder that all accounts can write to"
        yield "problem" if asked else "note", f"{ledger.reason} (it is in {ledger.root})", todo
        return
    mode = root.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        text = f"anybody can take away others' leases in {root}: it is not sticky"
        yield "problem", text, f"chmod +t {root}"
    elif not mode & stat.S_IWOTH:
        text = f"{root}: not every account can write there, and those that cannot have their own ledgers"
        yield "note", text, f"nothing, if only this account uses GPUs; else chmod 1777 {root}"
    else:
        yield "ok", f"{root}, for all accounts of this host"
    mount = _mount(root)
    if "-" in mount and (kind := mount[mount.index("-") + 1]).startswith(_NETWORK):
        text = f"{root} is on a network file system ({kind}): leases are those of one host"
        yield "problem", text, f"{_VARIABLE}=a folder on this host's own disk"


def leases() -> Iterator[Found]:
    """Check the mutex, and count the tickets in the ledger."""
    try:
        found = LedgerFolder(LedgerFolder.find().root, mutex_wait_s=_MUTEX_WAIT_S)
        state = Ledger(found).status()
    except LeaseError as error:
        yield "problem", str(error), "without it no call gets a GPU: let that process go on, or end it"
        return
    left = sum(1 for _, path in found.all() for _ in path.glob("*.ticket"))
    left -= len(state.holders) + len(state.waiting) + len(state.invalid)
    text = f"{len(state.holders)} held, {len(state.waiting)} waiting"
    if left > 0:
        text += f"; {left} left by processes that were killed, which hold nothing"
    yield "ok", text
    for path, user in list(state.invalid.items())[:1]:
        number = "1 file is" if len(state.invalid) == 1 else f"{len(state.invalid)} files are"
        text = f"{number} no valid ticket and counted for nothing, as {path_text(path)}"
        yield "note", text, f"ask account {account_name(user)} to remove it"


def only_one(found: Inventory) -> Iterator[Found]:
    """Check that programs of this host keep their leases here: two ledgers give out the same memory."""
    try:
        own = LedgerFolder.find().root
    except LeaseError:
        return  # the check of the folder tells
    uuids = {gpu.uuid for gpu in found.gpus}
    clean = True
    for root, user in _other_ledgers(own).items():
        ours = [
            entry
            for entry in _alive(root)
            if uuids & ({part.uuid for part in entry.parts} | {option.uuid for option in entry.options})
        ]
        todo = f"start all that share these GPUs with {_VARIABLE}={own}"
        if ours:
            number = "1 lease or request is" if len(ours) == 1 else f"{len(ours)} leases or requests are"
            text = f"{number} in another ledger, {root}{user}: both give out the same memory"
            yield "problem", text, todo
        elif user:
            yield "note", f"{root} is the ledger{user}, and {own} is that of this shell", todo
        clean = clean and not (ours or user)
    if found.usable and (private := _private(own)):
        clean = False
        todo = f"{_VARIABLE}=a folder that all of them share (docker run -v /tmp/leases:/tmp/leases)"
        yield "note", private, todo
    if clean:
        yield "ok", f"no other ledger was found beside {own}"


def _other_ledgers(own: Path) -> dict[Path, str]:
    """Return other folders that are, or may be, a ledger, with the process that says so."""
    found: dict[Path, str] = {}
    for process in others():
        program = _program(process)
        if program and process.environ is not None:
            root = Path(process.environ.get(_VARIABLE) or _DEFAULT)
            found.setdefault(root, f" of process {process.pid} ({program})")
    found.setdefault(Path(_DEFAULT), "")
    found.setdefault(state_folder.state_dir() / "ledger", "")  # where the other one cannot be used
    different = {}
    for root, user in found.items():
        with suppress(OSError):  # not there, or not for this account
            if not root.samefile(own):
                different[root] = user
    return different


def _program(process: OtherProcess) -> str:
    """Return the name of a program that may take leases; empty for others."""
    named = next((name for name in _FLOWER if process.runs(name)), "")
    if not named and _VARIABLE in (process.environ or {}):
        named = process.command[0].rpartition("/")[2]
    return printable(named)


def _alive(root: Path) -> list[Entry]:
    """Return the tickets in a ledger whose processes are there."""
    with suppress(OSError):  # not ours to look at
        return [entry for entry in tickets.Reader().read(LedgerFolder(root).all()) if entry.is_alive()]
    return []


def _private(root: Path) -> str:
    """Return why others of this host may not see this ledger; empty where they do."""
    if "systemd-private" in "".join(_mount(root)[3:4]):
        return f"{root} is this service's own (PrivateTmp): others on this host have another ledger"
    if tickets.pid_namespace() not in (0, _HOST_PID_NAMESPACE):
        shared = root.stat().st_dev != Path("/").stat().st_dev
        if not (os.environ.get(_VARIABLE) and shared):
            return f"this is a container: programs outside of it have another ledger than {root}"
    return ""


def _mount(path: Path) -> list[str]:
    """Return the fields of the mount that a path is on (proc(5), mountinfo)."""
    best: list[str] = []
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if path.resolve().is_relative_to(fields[4]) and len(fields[4]) >= len(best[4] if best else ""):
                best = fields
    return best
