"""The ledger: where it is, whether it works, and whether it is the only one of this host."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from flower_gpu import config
from flower_gpu.doctor import processes
from flower_gpu.doctor.findings import Found
from flower_gpu.doctor.processes import OtherProcess
from flower_gpu.errors import LeaseError
from flower_gpu.gpu import tickets
from flower_gpu.gpu.inventory import Inventory
from flower_gpu.gpu.ledger import Ledger
from flower_gpu.gpu.ledger_folder import LedgerFolder
from flower_gpu.gpu.tickets import Entry

_VARIABLE = "FLOWER_GPU_LEDGER_DIR"
_DEFAULT = "/tmp"
_STATE = "FLOWER_GPU_STATE_DIR"
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
        yield (
            "problem",
            f"anybody can take away others' leases in {root}: it is not sticky",
            f"chmod +t {root}",
        )
    elif not mode & stat.S_IWOTH:
        text = f"{root}: not every account can write there, and those that cannot have their own ledgers"
        yield "note", text, f"nothing, if only this account uses GPUs; else chmod 1777 {root}"
    else:
        yield "ok", f"{root}, for all accounts of this host"
    if (kind := _filesystem(root)).startswith(_NETWORK):
        text = f"{root} is on a network file system ({kind}): leases are those of one host"
        yield "problem", text, f"{_VARIABLE}=a folder on this host's own disk"


def leases() -> Iterator[Found]:
    """Check the mutex, and count who is in the ledger."""
    try:
        found = LedgerFolder.find()
        ledger = LedgerFolder(found.root, mutex_wait_s=_MUTEX_WAIT_S)
        state = Ledger(ledger).status()
    except LeaseError as error:
        yield "problem", str(error), "without it no call gets a GPU: let that process go on, or end it"
        return
    alive = len(state.holders) + len(state.waiting)
    written = sum(1 for _, path in ledger.all() for _ in path.glob("*.ticket"))
    text = f"{len(state.holders)} held, {len(state.waiting)} waiting"
    if written > alive:
        text += f"; {written - alive} left by processes that were killed, which hold nothing"
    yield "ok", text


def only_one(found: Inventory) -> Iterator[Found]:
    """Check that nobody on this host keeps leases elsewhere: two ledgers would give out the same memory."""
    try:
        own = LedgerFolder.find().root
    except LeaseError:
        return  # the check of the folder tells
    uuids = {gpu.uuid for gpu in found.gpus}
    seen = {_identity(own)}
    clean = True
    for root, who in _other_roots():
        identity = _identity(root)
        if identity is None or identity in seen:
            continue
        seen.add(identity)
        alive = _alive(root)
        ours = [entry for entry in alive if uuids & _uuids(entry)]
        if not ours and not who:
            continue
        clean = False
        todo = f"start all that share these GPUs with {_VARIABLE}={own}"
        if ours:
            number = "1 lease or request is" if len(ours) == 1 else f"{len(ours)} leases or requests are"
            text = f"{number} in another ledger, {root}{who}: both give out the same memory"
            yield "problem", text, todo
        else:
            yield "note", f"{root} is the ledger{who}, and {own} is that of this shell", todo
    if found.usable and (private := _private(own)):
        clean = False
        todo = f"{_VARIABLE}=a folder that all of them share (docker run -v /tmp/leases:/tmp/leases)"
        yield "note", private, todo
    if clean:
        yield "ok", f"no other ledger was found beside {own}"


def _other_roots() -> Iterator[tuple[Path, str]]:
    """Yield folders that may be a ledger, with who uses each, where a process says so."""
    own = _namespace(os.getpid())
    namespaces = {own, ""}
    for process in processes.others():
        namespace = _namespace(process.pid)
        if process.environ is not None and _may_lease(process):
            asked = Path(process.environ.get(_VARIABLE) or _DEFAULT)
            if namespace != own:  # it means a folder of its own container by that
                asked = Path(f"/proc/{process.pid}/root") / asked.relative_to(asked.anchor)
            yield asked, f" of process {process.pid} ({_program(process)})"
        if namespace not in namespaces:
            namespaces.add(namespace)
            # One for each mount namespace: containers, and services with a /tmp of their own.
            yield Path(f"/proc/{process.pid}/root{_DEFAULT}"), ""
    for name in (_DEFAULT, "/var/tmp", "/dev/shm"):
        yield Path(name), ""
    states = [config.state_dir(), *Path(_DEFAULT).glob("flower-gpu-*")]
    yield from ((state / "ledger", "") for state in states)


def _may_lease(process: OtherProcess) -> bool:
    assert process.environ is not None
    return _VARIABLE in process.environ or any(map(process.runs, _FLOWER))


def _program(process: OtherProcess) -> str:
    named = next((name for name in _FLOWER if process.runs(name)), "")
    text = named or process.command[0].rpartition("/")[2]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:  # another account's
        return ""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


def _alive(root: Path) -> list[Entry]:
    """Return the tickets in a ledger whose processes are there."""
    with suppress(OSError):  # not ours to look at
        return [entry for entry in tickets.Reader().read(LedgerFolder(root).all()) if entry.is_alive()]
    return []


def _uuids(entry: Entry) -> set[str]:
    return {part.uuid for part in entry.parts} | {option.uuid for option in entry.options}


def _private(root: Path) -> str:
    """Return why others of this host may not see this ledger; empty where they do."""
    if "systemd-private" in _mounted_from(root):
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


def _filesystem(path: Path) -> str:
    fields = _mount(path)
    return fields[fields.index("-") + 1] if "-" in fields else ""


def _mounted_from(path: Path) -> str:
    fields = _mount(path)
    return fields[3] if fields else ""
