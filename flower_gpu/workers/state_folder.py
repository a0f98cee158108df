"""The state folder, in which this user's processes on this host find each other."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.options import STATE_DIR
from flower_gpu.printable import path_text


def state_parent() -> Path:
    """Folder that the state folder is made in."""
    # Not TMPDIR: it may be another one for each job or session, and they would not meet.
    return Path(STATE_DIR.resolve(None, os.environ)).absolute()


def state_dir() -> Path:
    """Folder in which this user's processes on this host find each other; all in it is this package's.

    A folder of its own below :func:`state_parent`, which may be full of the user's files.
    """
    return state_parent() / f"flower-gpu-{os.getuid()}"


def state_dir_problem() -> tuple[str, str] | None:
    """Return why others could change what is in the state folder, and what to do; None if they cannot."""
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
