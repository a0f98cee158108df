"""The state folder, where this user's processes on this host find each other, and the sockets of workers.

multiprocessing makes sockets in a worker: in each DataLoader worker, for a Manager or a Listener, and for its
own fork server. Sockets in Linux's abstract namespace would leave no files. But they have no permissions, so
every account of the host can connect to them. So each worker has a folder with mode 0700 instead. A worker
may be killed at any time, so the process that sees the worker end removes its folder.

Workers of the same account can connect to each other's sockets. multiprocessing then asks for a key, and
unpickles data from any process that has the key. So each worker has its own key, which no other fork of its
fork server has.
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
    """Return the parent of the state folder."""
    # TMPDIR may differ between jobs or sessions, so their processes would not find each other.
    return Path(STATE_DIR.resolve(None, os.environ)).absolute()


def state_dir() -> Path:
    """Return the folder in which this user's processes on this host find each other.

    It holds files of this package only. Its parent (:func:`state_parent`) may be full of the user's files.
    """
    return state_parent() / f"flower-gpu-{os.getuid()}"


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield a short path of a folder, because the address of a socket has at most 107 bytes."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def state_dir_problem() -> tuple[str, str] | None:
    """Return why other accounts could change the state folder, and the remedy; None if they cannot."""
    parent, path = state_parent(), state_dir()
    # The default, /tmp, is not checked. In many containers it is an empty volume that is not sticky, and
    # there are no other accounts.
    if os.environ.get("FLOWER_GPU_STATE_DIR"):
        status = parent.stat()
        is_safe = status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022
        # In a sticky folder, an account cannot replace files of another account.
        if not stat.S_ISDIR(status.st_mode) or not (is_safe or status.st_mode & stat.S_ISVTX):
            return (
                f"{path_text(parent)} must be a folder of this user that no other user can write to",
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
                f"{path_text(path)} must be a folder of this user that no other user can write to",
                "remove it, or set FLOWER_GPU_STATE_DIR to another folder",
            )
    return None


def made_state_dir() -> Path:
    """Return the path of the state folder. Create the folder if it is missing.

    Raises ConfigError if other accounts could change it.
    """
    path = state_dir()
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700, parents=True)
    problem = state_dir_problem()
    if problem is None:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        # The first check looked at the parent only, unless the folder existed.
        problem = state_dir_problem()
    if problem is not None:
        raise ConfigError("; ".join(problem))
    # The mode may differ because of the umask, or because an older version made the folder.
    if path.stat().st_mode & 0o777 != 0o700:
        path.chmod(0o700)
    return path


_PARENT = "sockets"
_NAMES = re.compile(r"\d+-\d+")
# Limit for the path of a socket folder. The address of a socket can have up to 107 bytes, and multiprocessing
# appends a name of 18 bytes.
_MAX_BYTES = 80

_KEY_BYTES = 32  # length of multiprocessing's own keys


def take_socket_folder() -> None:
    """Give this process a key and a folder for the sockets that it and its children make.

    Call it in the worker itself, before the worker starts child processes. If no safe folder can be made,
    multiprocessing makes its own folder, which other accounts cannot enter either.
    """
    process.current_process().authkey = os.urandom(_KEY_BYTES)
    if sys.platform != "linux":
        return
    # A fork has inherited the lock of its parent's folder.
    if facts.sockets_lock >= 0:
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
        # multiprocessing passes this setting on to processes that it spawns.
        settings["tempdir"] = name


def socket_folder() -> str | None:
    """Return the socket folder of this process, or None."""
    settings: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    return str(settings["tempdir"]) if facts.sockets_lock >= 0 and settings.get("tempdir") else None


def remove_socket_folder(pid: int) -> None:
    """Remove the socket folder of an exited worker. Call it before the pid can belong to another process."""
    if (parent := _sockets()) is not None:
        with suppress(OSError, RecursionError):
            files.remove(parent / _own_name(pid))


def remove_left_socket_folders() -> None:
    """Remove the socket folders of processes that ended after their callers did."""
    files.remove_stale_folders()
    if (parent := _sockets()) is None:
        return
    folders: list[Path] = []
    # A confined worker cannot remove such folders, nor can the workers that it starts.
    with suppress(PermissionError):
        folders = list(parent.iterdir())
    files.remove_unlocked_folders(path for path in folders if _NAMES.fullmatch(path.name))


def _sockets() -> Path | None:
    """Return the parent of the socket folders; None if it is missing or may belong to another account."""
    path = state_dir() / _PARENT
    with suppress(OSError):
        return path if files.is_own_folder(path, forbidden=0o077) else None
    return None


def _own_name(pid: int) -> str:
    # Containers may share the state folder, and their processes may have the same pids.
    return f"{_pid_namespace()}-{pid}"


@cache
def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
