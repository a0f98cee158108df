"""What the system gives: kernel, limits, the folder of this account's state, fork servers."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from socket import socket

import flower_gpu
from flower_gpu.doctor import Found
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.forkserver.sockets import Gone
from flower_gpu.workers.state_folder import state_dir, state_dir_problem

_GOOD_FILES, _ENOUGH_FILES, _TOO_FEW_FILES = 4096, 1024, 256
_ENOUGH_SHM_BYTES = 1 << 30
_ANSWER_S = 1.0


def system() -> Iterator[Found]:
    """Tell the kernel, and check limits that many workers run into."""
    if not sys.platform.startswith("linux"):
        yield "note", f"{sys.platform}: workers are spawned, which is slower; there is no fork server"
    else:
        yield "ok", f"Linux {os.uname().release}"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        level = "problem" if soft < _TOO_FEW_FILES else "note"
        more = _GOOD_FILES if hard == resource.RLIM_INFINITY else min(_GOOD_FILES, hard)
        yield level, f"a process may open {soft} files only", f"ulimit -n {more}, before what is started here"
    else:
        number = "any number of" if soft == resource.RLIM_INFINITY else f"{soft}"
        yield "ok", f"a process may open {number} files"
    with suppress(OSError):  # there need not be one
        room = shutil.disk_usage("/dev/shm").total
        if room < _ENOUGH_SHM_BYTES:
            text = f"/dev/shm has {room >> 20} MiB: a DataLoader with workers of its own may need more"
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
    """Check whether fork servers can be used, and those that run."""
    if not hasattr(os, "fork") or not sys.platform.startswith("linux"):
        return
    if not state_dir().exists() and not _state_problem():
        yield "ok", "none is running; the first call starts one"
        return
    try:
        names = sockets.names()
    except (ConfigError, OSError) as error:
        text = f"workers are spawned, which is slower: {error}"
        yield "problem", text, "see the line about the state folder"
        return
    running = 0
    for name in names:
        try:
            connection = sockets.connect(name, _ANSWER_S)
        except Gone:
            continue  # left by one that was killed; the next one takes its place
        running += 1
        with connection:
            yield _asked(connection)
    if not running:
        yield "ok", "none is running; the first call starts one"


def _asked(connection: socket) -> Found:
    pid = sockets.peer(connection)[0]
    try:
        sockets.send(connection, {"op": "status"})
        told = sockets.receive_answer(connection)
    except Gone:
        text = f"fork server {pid} does not answer within {_ANSWER_S:g} s"
        return "problem", text, f"kill -CONT {pid} if it was stopped, else kill {pid}"
    version, python = told.get("version"), told.get("python")
    text = f"fork server {pid} answers, {told.get('calls')} calls so far"
    if version != flower_gpu.__version__ and python == sys.executable:
        text = f"fork server {pid} has flower-gpu {version}, and here is {flower_gpu.__version__}"
        return "note", text, "nothing: it serves older processes only; or `flower-gpu workers stop`"
    other = "" if Path(str(python)) == Path(sys.executable) else f", for {python}"
    return "ok", text + other
