"""The ledger: where it is, whether it works, who holds and waits, and whether there is another one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flower_gpu.doctor import Found
from flower_gpu.errors import LeaseError
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.leases.entries import Reader, pid_namespace
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.printable import account_name, path_text

_VARIABLE: Final = "FLOWER_GPU_LEDGER_DIR"
_DEFAULT: Final = "/tmp"
_MUTEX_WAIT_S: Final = 2.0
# The kernel gives this number to the first pid namespace (PROC_PID_INIT_INO): that of no container.
_HOST_PID_NAMESPACE: Final = 0xEFFFFFFC


def folder() -> Iterator[Found]:
    """Check the ledger's folder, and who can write there."""
    asked = os.environ.get(_VARIABLE)
    root = Path(asked or _DEFAULT).absolute()
    try:
        LedgerFolder.find().own()
    except (LeaseError, OSError) as error:
        todo = f"mkdir -p -m 1777 {root}" if not root.is_dir() else "make it writable, or name another folder"
        yield "problem", str(error), todo
        return
    mode = root.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        text = f"anybody can take away others' leases in {root}: it is not sticky"
        yield "problem", text, f"chmod +t {root}"
    elif not mode & stat.S_IWOTH:
        text = f"{root}: not every account can write there, and those that cannot get no lease"
        yield "note", text, f"nothing, if only this account uses GPUs; else chmod 1777 {root}"
    else:
        yield "ok", f"{root}, for all accounts of this host"
    if not asked and pid_namespace() not in (0, _HOST_PID_NAMESPACE):
        text = f"this is a container: programs outside of it have another ledger than {root}"
        todo = f"{_VARIABLE}=a folder that all of them share (docker run -v /tmp/leases:/tmp/leases)"
        yield "note", text, todo


def only_one(found: Inventory) -> Iterator[Found]:
    """Check that nobody leases these GPUs in the ledger that this shell would have without its variable."""
    root = Path(_DEFAULT)
    try:
        own = LedgerFolder.find().root
        if root.samefile(own):
            return
        there = [one for one in Reader().read(LedgerFolder(root).all()) if one.is_alive()]
    except (LeaseError, OSError):
        return  # the check of the folder tells
    uuids = {gpu.uuid for gpu in found.gpus}
    gpus = [{*(part.uuid for part in one.parts), *(need.uuid for need in one.gpu_needs)} for one in there]
    if ours := sum(not uuids.isdisjoint(each) for each in gpus):
        number = "1 lease or request is" if ours == 1 else f"{ours} leases or requests are"
        text = f"{number} in another ledger, {root}: both give out the same memory"
        yield "problem", text, f"start all that share these GPUs with {_VARIABLE}={own}"
    else:
        yield "ok", f"no leases in another ledger were found beside {own}"


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
