"""Checks of this host: limits, folders, fork servers, the ledger, and a SuperLink left by ``flwr run``."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Final

from flower_gpu import control_group
from flower_gpu.doctor import FindingParts
from flower_gpu.errors import ConfigError, LeaseError
from flower_gpu.gpu import drivers
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.leases.entries import Reader, pid_namespace
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.printable import account_name, format_bytes, path_text
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.messages import Gone
from flower_gpu.workers.state_folder import state_dir, state_dir_problem

_GOOD_FILES, _ENOUGH_FILES, _TOO_FEW_FILES = 4096, 1024, 256
_ENOUGH_SHM_BYTES = 1 << 30
_ANSWER_S = 1.0
# Variables that workers inherit from the process that starts a run, and variables that always differ.
_INHERITED = (drivers.of_host().visible_variable, *drivers.of_host().variables, "LD_LIBRARY_PATH")
_NOT_COMPARED = ("FLOWER_GPU_RUN_DIR", "FLOWER_GPU_CLIENT", "FLOWER_GPU_LEASE")


def system() -> Iterator[FindingParts]:
    """Check main memory, the limit of open files, and ``/dev/shm``, which many workers can exhaust."""
    if not sys.platform.startswith("linux"):
        yield "note", f"{sys.platform}: workers are spawned, which is slower; there is no fork server"
    available, total = control_group.available_memory()
    yield "ok", f"{format_bytes(available)} of {format_bytes(total)} of main memory can be used"
    if control_group.is_killed_as_one():
        yield (
            "note",
            "if main memory runs out, the kernel kills all processes of this control group, not just one "
            "worker (memory.oom.group is 1, as Kubernetes sets it)",
            "have the administrator set singleProcessOOMKill: true for the kubelet (Kubernetes 1.32), give "
            "the container more memory, or leave more of it free with FLOWER_GPU_HOST_RESERVE",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        level = "problem" if soft < _TOO_FEW_FILES else "note"
        more = _GOOD_FILES if hard == resource.RLIM_INFINITY else min(_GOOD_FILES, hard)
        yield level, f"a process may open {soft} files only", f"ulimit -n {more}, before you start Flower"
    # Some hosts have no /dev/shm.
    with suppress(OSError):
        room = shutil.disk_usage("/dev/shm").total
        if room < _ENOUGH_SHM_BYTES:
            text = f"/dev/shm has {format_bytes(room)}: a DataLoader with workers of its own may need more"
            yield "note", text, "in a container: docker run --shm-size=8g, or --ipc=host"


def state_folder() -> Iterator[FindingParts]:
    """Check the folder that processes of this account share."""
    path = state_dir()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if problem := _state_problem():
        yield ("problem", *problem)
    elif not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        todo = "set FLOWER_GPU_STATE_DIR to a folder of yours on this host"
        yield "problem", f"{path_text(existing)} cannot be written to", todo
    else:
        yield "ok", f"{path_text(path)}{'' if existing == path else ' is made with the first call'}"


def _state_problem() -> tuple[str, str] | None:
    # The folder may not exist yet. The caller checks if it can be created.
    with suppress(OSError):
        return state_dir_problem()
    return None


def fork_servers() -> Iterator[FindingParts]:
    """Check that the fork servers of this account answer."""
    if not sys.platform.startswith("linux"):
        return
    connections = []
    if state_dir().exists() or _state_problem():
        try:
            names = sockets.names()
        except (ConfigError, OSError) as error:
            yield "problem", f"workers are spawned, which is slower: {error}", "see the state folder"
            return
        for name in names:
            # Ignore the socket of a killed fork server. The next fork server replaces it.
            with suppress(Gone):
                connections.append(sockets.connect(name, _ANSWER_S))
    for connection in connections:
        with connection:
            yield _server_finding(connection)
    if not connections:
        yield "ok", "none is running; the first call starts one"


def _server_finding(connection: socket) -> FindingParts:
    pid = messages.peer(connection)[0]
    try:
        messages.send(connection, {"op": "status"})
        status = messages.receive_answer(connection)
    except Gone:
        text = f"fork server {pid} does not answer within {_ANSWER_S:g} s"
        return "problem", text, f"kill -CONT {pid} if it was stopped; otherwise kill {pid}"
    python = str(status.get("python"))
    other = "" if Path(python) == Path(sys.executable) else f", for {python}"
    return "ok", f"fork server {pid} answers, {status.get('calls')} calls so far{other}"


def superlinks() -> Iterator[FindingParts]:
    """Check that a SuperLink left by an earlier ``flwr run`` has the same variables as this shell."""
    import psutil

    is_running = False
    for process in psutil.process_iter():
        # The process may have ended, or belong to another account.
        with suppress(psutil.Error):
            command = process.cmdline()
            # flwr.cli.local_superlink starts the SuperLink with this log file.
            if any(argument.endswith("local-superlink/superlink.log") for argument in command):
                is_running = True
                yield _superlink_finding(process.pid, command[0], process.environ())
    if not is_running:
        yield "ok", "flwr run has left no SuperLink running"


def _superlink_finding(pid: int, python: str, environ: Mapping[str, str]) -> FindingParts:
    name = f"the local SuperLink {pid}, which flwr run has left running,"
    todo = f"kill {pid}; the next `flwr run` starts a new one"
    different = [
        f"{variable} ({_shown(environ.get(variable))} there, {_shown(os.environ.get(variable))} here)"
        for variable in sorted({*environ, *os.environ})
        if variable.startswith("FLOWER_GPU_") or variable in _INHERITED
        if variable not in _NOT_COMPARED and environ.get(variable) != os.environ.get(variable)
    ]
    if different:
        return "problem", f"{name} has other variables than this shell: {', '.join(different)}", todo
    # Do not resolve links, because virtual environments may link to the same Python.
    if Path(python).parent != Path(sys.executable).parent:
        return "problem", f"{name} belongs to another Python, {python}", todo
    return "ok", f"{name} has the variables of this shell"


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)


# The ledger of leases

_VARIABLE: Final = "FLOWER_GPU_LEDGER_DIR"
_DEFAULT: Final = "/tmp"
_MUTEX_WAIT_S: Final = 2.0
# Inode number of the first pid namespace, which belongs to no container (PROC_PID_INIT_INO in the kernel).
_HOST_PID_NAMESPACE: Final = 0xEFFFFFFC


def ledger_folder() -> Iterator[FindingParts]:
    """Check the ledger's folder and its permissions."""
    asked = os.environ.get(_VARIABLE)
    root = Path(asked or _DEFAULT).absolute()
    try:
        LedgerFolder.find().own_folder()
    except (LeaseError, OSError) as error:
        todo = f"mkdir -p -m 1777 {root}" if not root.is_dir() else "make it writable, or name another folder"
        yield "problem", str(error), todo
        return
    mode = root.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        text = f"any account can remove the leases of others in {root}: it is not sticky"
        yield "problem", text, f"chmod +t {root}"
    elif not mode & stat.S_IWOTH:
        text = f"{root}: not every account can write there; the others get no lease"
        yield "note", text, f"nothing, if only this account uses GPUs; otherwise chmod 1777 {root}"
    else:
        yield "ok", f"{root}, for all accounts of this host"
    if not asked and pid_namespace() not in (0, _HOST_PID_NAMESPACE):
        text = f"this is a container: programs outside of it have another ledger than {root}"
        todo = f"{_VARIABLE}=a folder that all of them share (docker run -v /tmp/leases:/tmp/leases)"
        yield "note", text, todo


def other_ledger(host_gpus: Inventory) -> Iterator[FindingParts]:
    """Check that the default ledger has no leases on these GPUs, if this shell uses another ledger."""
    root = Path(_DEFAULT)
    try:
        own_root = LedgerFolder.find().root
        if root.samefile(own_root):
            return
        entries = [entry for entry in Reader().read(LedgerFolder(root).all()) if entry.is_alive()]
    except (LeaseError, OSError):
        # The check of the folder reports this problem.
        return
    uuids = {gpu.uuid for gpu in host_gpus.gpus}
    gpus = [
        {*(part.uuid for part in entry.parts), *(need.uuid for need in entry.gpu_needs)} for entry in entries
    ]
    if shared_count := sum(not uuids.isdisjoint(entry_gpus) for entry_gpus in gpus):
        number = "1 lease or request is" if shared_count == 1 else f"{shared_count} leases or requests are"
        text = f"{number} in another ledger, {root}: both lease the same memory"
        yield "problem", text, f"start all that share these GPUs with {_VARIABLE}={own_root}"
    else:
        yield "ok", f"no leases in another ledger were found beside {own_root}"


def leases() -> Iterator[FindingParts]:
    """Check the mutex, and count the tickets in the ledger."""
    try:
        folder = LedgerFolder(LedgerFolder.find().root, mutex_wait_s=_MUTEX_WAIT_S)
        state = Ledger(folder).status()
    except LeaseError as error:
        yield "problem", str(error), "without it no call gets a GPU: let that process continue, or end it"
        return
    abandoned = sum(1 for _, path in folder.all() for _ in path.glob("*.ticket"))
    abandoned -= len(state.holders) + len(state.waiting) + len(state.invalid)
    text = f"{len(state.holders)} held, {len(state.waiting)} waiting"
    if abandoned > 0:
        text += f"; {abandoned} left by processes that were killed, which hold nothing"
    yield "ok", text
    for path, user in list(state.invalid.items())[:1]:
        number = "1 file is" if len(state.invalid) == 1 else f"{len(state.invalid)} files are"
        text = f"{number} no valid ticket and counted for nothing, as {path_text(path)}"
        yield "note", text, f"ask account {account_name(user)} to remove it"
