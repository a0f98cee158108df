"""What the system gives: limits, the state folder, fork servers, and the SuperLink that ``flwr run`` left."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from socket import socket

from flower_gpu import control_group
from flower_gpu.doctor import Found
from flower_gpu.errors import ConfigError
from flower_gpu.printable import format_bytes, path_text
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.messages import Gone
from flower_gpu.workers.state_folder import state_dir, state_dir_problem

_GOOD_FILES, _ENOUGH_FILES, _TOO_FEW_FILES = 4096, 1024, 256
_ENOUGH_SHM_BYTES = 1 << 30
_ANSWER_S = 1.0
# What workers inherit from the process that starts a run, and what differs in any case.
_INHERITED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")
_NOT_COMPARED = ("FLOWER_GPU_RUN_DIR", "FLOWER_GPU_CLIENT", "FLOWER_GPU_LEASE")


def system() -> Iterator[Found]:
    """Check main memory, and limits that many workers run into."""
    if not sys.platform.startswith("linux"):
        yield "note", f"{sys.platform}: workers are spawned, which is slower; there is no fork server"
    available, total = control_group.available_memory()
    yield "ok", f"{format_bytes(available)} of {format_bytes(total)} of main memory can be used"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        level = "problem" if soft < _TOO_FEW_FILES else "note"
        more = _GOOD_FILES if hard == resource.RLIM_INFINITY else min(_GOOD_FILES, hard)
        yield level, f"a process may open {soft} files only", f"ulimit -n {more}, before what is started here"
    with suppress(OSError):  # there need not be one
        room = shutil.disk_usage("/dev/shm").total
        if room < _ENOUGH_SHM_BYTES:
            text = f"/dev/shm has {format_bytes(room)}: a DataLoader with workers of its own may need more"
            yield "note", text, "in a container: docker run --shm-size=8g, or --ipc=host"


def state_folder() -> Iterator[Found]:
    """Check the folder of what processes of this account share."""
    path = state_dir()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if problem := _state_problem():
        yield ("problem", *problem)
    elif not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        todo = "set FLOWER_GPU_STATE_DIR to a folder of yours on this host"
        yield "problem", f"{path_text(there)} cannot be written to", todo
    else:
        yield "ok", f"{path_text(path)}{'' if there == path else ' is made with the first call'}"


def _state_problem() -> tuple[str, str] | None:
    with suppress(OSError):  # it is not there yet, and perhaps cannot be made
        return state_dir_problem()
    return None


def fork_servers() -> Iterator[Found]:
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
            with suppress(Gone):  # left by one that was killed; the next one takes its place
                connections.append(sockets.connect(name, _ANSWER_S))
    for connection in connections:
        with connection:
            yield _asked(connection)
    if not connections:
        yield "ok", "none is running; the first call starts one"


def _asked(connection: socket) -> Found:
    pid = messages.peer(connection)[0]
    try:
        messages.send(connection, {"op": "status"})
        told = messages.receive_answer(connection)
    except Gone:
        text = f"fork server {pid} does not answer within {_ANSWER_S:g} s"
        return "problem", text, f"kill -CONT {pid} if it was stopped, else kill {pid}"
    python = str(told.get("python"))
    other = "" if Path(python) == Path(sys.executable) else f", for {python}"
    return "ok", f"fork server {pid} answers, {told.get('calls')} calls so far{other}"


def superlinks() -> Iterator[Found]:
    """Check that the SuperLink that an earlier ``flwr run`` has left here has this shell's variables."""
    import psutil

    found = False
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another account's
            command = process.cmdline()
            # As flwr.cli.local_superlink starts it.
            if any(each.endswith("local-superlink/superlink.log") for each in command):
                found = True
                yield _compared(process.pid, command[0], process.environ())
    if not found:
        yield "ok", "flwr run has left no SuperLink running"


def _compared(pid: int, python: str, there: Mapping[str, str]) -> Found:
    name = f"the local SuperLink {pid}, which flwr run has left running,"
    todo = f"kill {pid}; the next `flwr run` starts a new one"
    different = [
        f"{variable} ({_shown(there.get(variable))} there, {_shown(os.environ.get(variable))} here)"
        for variable in sorted({*there, *os.environ})
        if variable.startswith("FLOWER_GPU_") or variable in _INHERITED
        if variable not in _NOT_COMPARED and there.get(variable) != os.environ.get(variable)
    ]
    if different:
        return "problem", f"{name} has other variables than this shell: {', '.join(different)}", todo
    # Not resolved: the pythons of virtual environments are links to the same file.
    if Path(python).parent != Path(sys.executable).parent:
        return "problem", f"{name} belongs to another Python, {python}", todo
    return "ok", f"{name} has the variables of this shell"


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)
