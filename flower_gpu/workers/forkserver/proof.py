"""What a fork server asks of whoever connects to it: to show that it may read a file of the state folder.

Landlock keeps a process from opening files, but not from connecting to a socket that has a path. So a worker
that is confined, and runs as the same account, gets as far as a fork server's socket. A caller sends a
descriptor of the file along, open for reading; a confined process has none and cannot open one.

That is no secret that could be found in the memory of a server, which all its forks have a copy of.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text
from flower_gpu.workers import state_folder

#: The file, in the state folder. It is empty.
FILE: Final = "callers"

_FLAGS: Final = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

# Held while the descriptor is open: a fork of this process by another thread would have it as well.
_lock = threading.RLock()


@contextmanager
def opened(folder: int) -> Iterator[int]:
    """Open the file in the state folder, whose descriptor is ``folder``; make it where it is missing.

    Raises ConfigError if this process may not read it.
    """
    with _lock:
        try:
            descriptor = os.open(FILE, _FLAGS, 0o600, dir_fd=folder)
        except PermissionError as error:
            path = path_text(state_folder.state_dir() / FILE)
            raise ConfigError(
                f"fork servers fork workers only for processes that may read {path}, and this one may not: "
                "it is confined. Use start_method='spawn': then the worker is confined as well"
            ) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def can_be_opened() -> bool:
    """Tell whether this process may read the file: after it was confined it must not."""
    try:
        os.close(os.open(state_folder.state_dir() / FILE, _FLAGS, 0o600))
    except OSError:
        return False
    return True


def is_given(descriptors: Sequence[int]) -> bool:
    """Tell whether these are one descriptor of the file, open for reading."""
    if len(descriptors) != 1:
        return False
    try:
        # By its name, each time: a descriptor kept here would be open in each fork, too.
        wanted, given = (state_folder.state_dir() / FILE).lstat(), os.fstat(descriptors[0])
        if not stat.S_ISREG(wanted.st_mode) or not os.path.samestat(wanted, given):
            return False
        # Read, not asked for its flags: Landlock lets everybody open a file with O_PATH, or for ioctl(2).
        os.pread(descriptors[0], 1, 0)
    except OSError:
        return False
    return True


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
