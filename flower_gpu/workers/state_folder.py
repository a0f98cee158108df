"""The state folder, in which this user's processes on this host find each other, and workers' sockets in it.

multiprocessing makes sockets in a worker: in each DataLoader worker, for a Manager or a Listener, and for a
fork server of its own. Names in Linux's abstract namespace would leave no files, but they have no
permissions: every account of the host can connect to them. So each worker has a folder of mode 0700, which
the process removes that sees the worker end: a worker may be killed at any time.

Workers of the same account get to each other's sockets; multiprocessing asks for a key there, and unpickles
what comes from those that have it. So each worker has a key of its own, which no other fork of its fork
server has.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import process
from pathlib import Path
from typing import Any

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.options import STATE_DIR
from flower_gpu.printable import account_name, path_text
from flower_gpu.workers.own_process import facts


def state_parent() -> Path:
    """Folder that the state folder is made in."""
    # Not TMPDIR: it may be another one for each job or session, and they would not meet.
    return Path(STATE_DIR.resolve(None, os.environ)).absolute()


def state_dir() -> Path:
    """Folder in which this user's processes on this host find each other; all in it is this package's.

    A folder of its own below :func:`state_parent`, which may be full of the user's files.
    """
    return state_parent() / f"flower-gpu-{os.getuid()}"


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield a short name of a folder, by its descriptor: a socket's address has 107 bytes at most."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def state_dir_problem() -> tuple[str, str] | None:
    """Return why others could change the state folder, and a way out; None if they cannot."""
    parent, path = state_parent(), state_dir()
    # Not of /tmp itself: in many containers that is an empty volume, not sticky, with nobody else in it.
    if os.environ.get("FLOWER_GPU_STATE_DIR"):
        found = parent.stat()
        is_safe = found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022
        # In a sticky folder nobody can replace what is another account's.
        if not stat.S_ISDIR(found.st_mode) or not (is_safe or found.st_mode & stat.S_ISVTX):
            return (
                f"{path_text(parent)} must be a folder of this user that nobody else can write to",
                "chmod go-w it, or set FLOWER_GPU_STATE_DIR to another folder",
            )
    with suppress(FileNotFoundError):
        if not files.is_own_folder(path):
            if (owner := path.lstat().st_uid) != os.getuid():
                return (
                    f"account {account_name(owner)} has made {path_text(path)}, the folder of this account",
                    "an administrator must remove it, or set FLOWER_GPU_STATE_DIR to another folder",
                )
            return (
                f"{path_text(path)} must be a folder of this user that nobody else can write to",
                "remove it, or set FLOWER_GPU_STATE_DIR to another folder",
            )
    return None


def made_state_dir() -> Path:
    """Return the state folder, made where it is missing; ConfigError if others could change it."""
    path = state_dir()
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700, parents=True)
    problem = state_dir_problem()
    if problem is None:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        problem = state_dir_problem()  # of the folder itself
    if problem is not None:
        raise ConfigError("; ".join(problem))
    if path.stat().st_mode & 0o777 != 0o700:  # the umask, or an older version
        path.chmod(0o700)
    return path


_PARENT = "sockets"
_NAMES = re.compile(r"\d+-\d+")
_MAX_BYTES = 80  # an address has 107 at most, and multiprocessing puts a name of 18 behind this

_KEY_BYTES = 32  # as multiprocessing's own


def take_socket_folder() -> None:
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
        parent = made_state_dir() / _PARENT
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        path = parent / _own_name(os.getpid())
        facts.sockets_lock = files.locked_folder(path)
        name = str(path)
        if len(os.fsencode(name)) > _MAX_BYTES:
            name = f"/proc/{os.getpid()}/fd/{facts.sockets_lock}"
        # multiprocessing passes it on to processes that it spawns, too.
        settings["tempdir"] = name


def socket_folder() -> str | None:
    """Return this process's folder; None where it has none."""
    settings: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    return str(settings["tempdir"]) if facts.sockets_lock >= 0 and settings.get("tempdir") else None


def remove_socket_folder(pid: int) -> None:
    """Remove the folder of a worker that is gone, while nobody else can have its process id."""
    if (parent := _sockets()) is not None:
        with suppress(OSError, RecursionError):
            files.remove(parent / _own_name(pid))


def remove_left_socket_folders() -> None:
    """Remove the folders of processes that have ended when nobody was left to see it."""
    files.remove_stale_folders()
    if (parent := _sockets()) is None:
        return
    found: list[Path] = []
    with suppress(PermissionError):  # this worker is confined, and so are those that it starts
        found = list(parent.iterdir())
    files.remove_unlocked_folders(path for path in found if _NAMES.fullmatch(path.name))


def _sockets() -> Path | None:
    """Return where the folders are; None where there are none, or they may be somebody else's."""
    path = state_dir() / _PARENT
    with suppress(OSError):
        return path if files.is_own_folder(path, forbidden=0o077) else None
    return None


def _own_name(pid: int) -> str:
    # Containers may share the state folder, and have processes with the same ids.
    return f"{_pid_namespace()}-{pid}"


@cache
def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
