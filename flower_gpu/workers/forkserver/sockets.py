"""How fork servers are found: by Unix sockets in a folder that only this user can enter.

Landlock keeps a process from opening files, but not from connecting to a socket that has a path. So a worker
that is confined, and runs as the same account, gets as far as a fork server's socket. A caller sends a
descriptor of a file of the state folder along (:data:`PROOF`), open for reading; a confined process has none
and cannot open one. That is no secret that could be found in the memory of a server, which all its forks have
a copy of.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text
from flower_gpu.workers import state_folder
from flower_gpu.workers.interrupts import allowed_interrupts
from flower_gpu.workers.messages import Gone, peer, send

#: Callers that the kernel may keep until they are accepted; it keeps no more than net.core.somaxconn.
QUEUE = 4096
_PAUSES_S = (0.02, 0.25)  # between two tries to get a lock: the first, the longest
_LOOK_S = 1.0
#: The first message of a connection. The descriptor of :data:`PROOF` comes with it; there is no answer.
CALLER: dict[str, Any] = {"caller": True}
_KEPT_S = 7 * 24 * 3600.0
# The files of a server; a name that begins with a dot is one that is being written.
_OURS = re.compile(r"\.?([0-9a-f]{20})\.(?:socket|lock|log|libraries|\d+|libraries\.\d+\.[0-9a-f]+\.tmp)")


def folder() -> Path:
    """Return the folder of this user's fork servers; make it where it is missing.

    Raises ConfigError if it is not safe: somebody else could put a socket of theirs into it.
    """
    try:
        return state_folder.made_state_dir()
    except OSError as error:
        path, reason = state_folder.state_dir(), error.strerror
        raise ConfigError(
            f"{path} cannot be made: {reason}. Set FLOWER_GPU_STATE_DIR to another folder"
        ) from error


def names() -> list[str]:
    """Return the names of all fork servers of this user that have a socket, running or not."""
    return sorted(path.stem for path in folder().glob("*.socket"))


def remove_old_files() -> None:
    """Remove the files of servers that have not been started for a week: their environments are gone.

    Nothing else: other files in the folder, such as footprints, do not age.
    """
    oldest = time.time() - _KEPT_S
    files: dict[str, list[Path]] = {}
    for path in folder().iterdir():
        if found := _OURS.fullmatch(path.name):
            files.setdefault(found[1], []).append(path)
    for name, paths in files.items():
        with suppress(OSError):  # also a TimeoutError: somebody is starting it
            if max(path.lstat().st_mtime for path in paths) < oldest:
                with locked(name, deadline=0.0):
                    if not _runs(name):
                        for path in paths:
                            path.unlink(missing_ok=True)
                        (folder() / f"{name}.lock").unlink(missing_ok=True)


def _runs(name: str) -> bool:
    """Tell whether there is a server of this name, also one that takes no more calls."""
    try:
        connect(name, _LOOK_S).close()
    except Gone as gone:
        # Anything else, such as a full queue, comes from a server that is there.
        if isinstance(gone.__cause__, ConnectionRefusedError | FileNotFoundError):
            return _is_locked(folder() / f"{name}.log")
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not files.try_lock(descriptor)
    finally:
        os.close(descriptor)


def open_log(name: str) -> int:
    """Open an empty log for fork server ``name``, locked for as long as a server has it as its output."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(folder() / f"{name}.log", flags, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # shared with one of this name that takes no more calls
    return descriptor


def is_server(pid: int) -> bool:
    """Tell whether a process is a fork server of this user, also one that starts or takes no more calls.

    Its errors go to a log that :func:`open_log` has made. Those of a worker go to its caller. What a confined
    worker has left cannot write to such a log, but can have it open without any right.
    """
    with suppress(OSError, LookupError, ValueError):
        log = Path(os.readlink(f"/proc/{pid}/fd/2").removesuffix(" (deleted)"))
        words = Path(f"/proc/{pid}/fdinfo/2").read_text().split()
        flags = int(words[words.index("flags:") + 1], 8)
        return (
            flags & (os.O_ACCMODE | os.O_PATH) == os.O_WRONLY
            and log.suffix == ".log"
            and bool(_OURS.fullmatch(log.name))
            and log.parent == state_folder.state_dir().resolve()
        )
    return False


def connect(name: str, timeout_s: float) -> socket.socket:
    """Connect to the fork server ``name``, and show it that this process may.

    Raises Gone if there is none.
    Raises ConfigError if this process may not: it is confined.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        with state_folder.short_name(folder()) as here:
            connection.connect(f"{here}/{name}.socket")
            if peer(connection)[1] != os.getuid():
                raise Gone(f"the socket of fork server {name} is another user's")
            with proof_opened() as shown:
                send(connection, CALLER, [shown])
    except OSError as error:
        connection.close()
        raise Gone(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def listen(name: str) -> socket.socket:
    """Open the socket ``name`` and put it in the place of one that is there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with state_folder.short_name(folder()) as here:
        temporary = f"{here}/.{name}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        listener.bind(temporary)
        listener.listen(QUEUE)
        os.rename(temporary, f"{here}/{name}.socket")
    return listener


def identity(name: str) -> tuple[int, int] | None:
    """Return the identity of the socket file ``name``, or None if it is missing."""
    try:
        # Not folder(): that would make one again that has been removed.
        found = (state_folder.state_dir() / f"{name}.socket").stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def remove(name: str, which: tuple[int, int] | None) -> None:
    """Remove the socket file ``name`` if it is still the one with identity ``which``."""
    if identity(name) != which:  # also where the folder is gone, which must not be made again for this
        return
    with suppress(OSError, ConfigError, TimeoutError), locked(name, deadline=0.0):
        if identity(name) == which:
            (folder() / f"{name}.socket").unlink()


class BeingStartedError(TimeoutError):
    """Another process holds the right to start a fork server."""


@contextmanager
def locked(name: str, deadline: float | None, say: Callable[[str], object] = lambda _: None) -> Iterator[int]:
    """Hold the right to start fork server ``name``; yield the descriptor of the lock.

    A process that inherits the descriptor holds the lock, too. ``say``: receives the reason for the wait,
    now and then.

    Raises BeingStartedError if another process holds it until ``deadline`` (of ``time.monotonic``).
    Raises ConfigError if this process is confined: what it starts would be confined as well.
    """
    path = folder() / f"{name}.lock"
    with proof_opened():
        pass
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sleep = partial(_sleep, descriptor, name, say)
        try:
            try:
                files.lock(descriptor, deadline, pauses_s=_PAUSES_S, sleep=sleep)
            except TimeoutError:
                raise BeingStartedError(_is_starting(descriptor, name)) from None
            if files.still_has_name(descriptor, path):  # else it was removed as an old file
                yield descriptor
                return
        finally:
            os.close(descriptor)


def name_starter(lock: int) -> None:
    """Write into a file that :func:`locked` has locked that this process is the one to wait for."""
    with suppress(OSError):  # a full disk: then other callers cannot name the process
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _sleep(lock: int, name: str, say: Callable[[str], object], seconds: float) -> None:
    say(_is_starting(lock, name))
    with allowed_interrupts():
        time.sleep(seconds)


def _is_starting(lock: int, name: str) -> str:
    """Return a clause that says which process starts a server."""
    pid = os.pread(lock, 20, 0).decode(errors="replace")
    return f"fork server {name} is being started by another process" + (f" (pid {pid})" if pid else "")


#: The file, in the state folder. It is empty.
PROOF: Final = "callers"

_PROOF_FLAGS: Final = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

# Held while the descriptor is open: a fork of this process by another thread would have it as well.
_proof_lock = threading.RLock()


@contextmanager
def proof_opened() -> Iterator[int]:
    """Open :data:`PROOF`, made where it is missing; ConfigError if this process may not read it."""
    path = state_folder.state_dir() / PROOF
    with _proof_lock:
        try:
            descriptor = os.open(path, _PROOF_FLAGS, 0o600)
        except PermissionError as error:
            raise ConfigError(
                f"fork servers fork workers only for processes that may read {path_text(path)}, and this one "
                "may not: it is confined. Use start_method='spawn': then the worker is confined as well"
            ) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def has_proof() -> bool:
    """Tell whether this process may read the file: after it was confined it must not."""
    with suppress(OSError, ConfigError), proof_opened():
        return True
    return False


def is_proof(descriptors: Sequence[int]) -> bool:
    """Tell whether these are one descriptor of the file, open for reading."""
    if len(descriptors) != 1:
        return False
    try:
        # By its name, each time: a descriptor kept here would be open in each fork, too.
        wanted, given = (state_folder.state_dir() / PROOF).lstat(), os.fstat(descriptors[0])
        if not stat.S_ISREG(wanted.st_mode) or not os.path.samestat(wanted, given):
            return False
        # Read, not asked for its flags: Landlock lets everybody open a file with O_PATH, or for ioctl(2).
        os.pread(descriptors[0], 1, 0)
    except OSError:
        return False
    return True


os.register_at_fork(
    before=_proof_lock.acquire, after_in_parent=_proof_lock.release, after_in_child=_proof_lock.release
)
