"""A folder for each worker's Unix sockets: only its account can enter it, and it goes with the worker.

multiprocessing makes sockets in a worker: in each DataLoader worker, for a Manager or a Listener, and for a
fork server of its own. Names in Linux's abstract namespace would leave no files, but they have no
permissions: every account of the host can connect to them. A folder of mode 0700 keeps others out. It is
removed by the process that sees the worker end: a worker may be killed at any time.

Workers of the same account get to each other's sockets; multiprocessing asks for a key there, and unpickles
what comes from those that have it. So each worker has a key of its own, which no other fork of its fork
server has.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache
from multiprocessing import process
from pathlib import Path
from typing import Any

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.workers import state_folder
from flower_gpu.workers.own_process import facts

_PARENT = "sockets"
_NAMES = re.compile(r"\d+-\d+")
_MAX_BYTES = 80  # an address has 107 at most, and multiprocessing puts a name of 18 behind this

_KEY_BYTES = 32  # as multiprocessing's own


def take() -> None:
    """Give this process, the first of its group, a folder, where it and its children make their sockets.

    And a key for them. Without a folder that is safe, multiprocessing makes one of its own, which others
    cannot enter either.
    """
    process.current_process().authkey = os.urandom(_KEY_BYTES)
    if sys.platform != "linux":
        return
    if facts.sockets_lock >= 0:  # inherited from the process that was forked
        os.close(facts.sockets_lock)
        facts.sockets_lock = -1
    settings: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    settings["tempdir"] = None
    with suppress(OSError, ConfigError):
        parent = state_folder.made_state_dir() / _PARENT
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        path = parent / _own_name(os.getpid())
        facts.sockets_lock = files.locked_folder(path)
        name = str(path)
        if len(os.fsencode(name)) > _MAX_BYTES:
            name = f"/proc/{os.getpid()}/fd/{facts.sockets_lock}"
        # multiprocessing passes it on to processes that it spawns, too.
        settings["tempdir"] = name


def path() -> str | None:
    """Return this process's folder; None where it has none."""
    settings: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    return str(settings["tempdir"]) if facts.sockets_lock >= 0 and settings.get("tempdir") else None


def remove(pid: int) -> None:
    """Remove the folder of a worker that is gone, while nobody else can have its process id."""
    if (parent := _parent()) is not None:
        with suppress(OSError, RecursionError):
            files.remove(parent / _own_name(pid))


def remove_left() -> None:
    """Remove the folders of processes that have ended when nobody was left to see it."""
    files.remove_left_folders()
    if (parent := _parent()) is None:
        return
    found: list[Path] = []
    with suppress(PermissionError):  # this worker is confined, and so are those that it starts
        found = list(parent.iterdir())
    files.remove_unlocked_folders(path for path in found if _NAMES.fullmatch(path.name))


def _parent() -> Path | None:
    """Return where the folders are; None where there are none, or they may be somebody else's."""
    path = state_folder.state_dir() / _PARENT
    with suppress(OSError):
        return path if files.is_own_folder(path, forbidden=0o077) else None
    return None


def _own_name(pid: int) -> str:
    # Containers may share the state folder, and have processes with the same ids.
    return f"{_pid_namespace()}-{pid}"


@cache
def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
