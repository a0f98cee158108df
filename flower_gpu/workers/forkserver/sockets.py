"""Sockets, locks and logs of fork servers, in a folder that only this user can enter.

Who may use a server: Landlock keeps a confined process from opening files, but not from connecting to a Unix
socket. So a confined worker of the same account can connect to a fork server. A caller therefore sends a
descriptor of a file in the state folder (:data:`PROOF`), open for reading. A confined process has no such
descriptor and cannot open the file. A secret in memory would not help, because each fork has a copy of the
memory of its server.

Who may start a server: the process that holds the lock of its name (:func:`locked`). A new server inherits
the lock, and releases it when it is ready.

Races:

- A socket must be listening when it gets its name, or a caller would be refused. So it is bound to a
  temporary name, and then renamed. This also replaces the socket of an earlier server (:func:`listen`).
- A server may only remove its own socket file, not the file of a later server. So it compares the file's
  identity under the lock (:func:`remove`).
- A lock file may be removed as an old file while a process waits for it. So the process checks that its file
  still has the name, and otherwise opens the new file.
- Another thread may fork while the proof is open, and the fork would have the descriptor. So a lock is held
  across all forks (``_proof_lock``).
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

#: Number of callers that may wait to be accepted. The kernel limits it to net.core.somaxconn.
QUEUE = 4096
_PAUSES_S = (0.02, 0.25)  # first and longest pause between two tries to get a lock
_LOOK_S = 1.0
#: First message of a connection. The descriptor of :data:`PROOF` is sent with it. It gets no answer.
CALLER: dict[str, Any] = {"caller": True}
_KEPT_S = 7 * 24 * 3600.0  # age at which the files of a server are removed
# Names of a server's files. A name that begins with a dot is a file that is being written.
_OURS = re.compile(r"\.?([0-9a-f]{20})\.(?:socket|lock|log|libraries|\d+|libraries\.\d+\.[0-9a-f]+\.tmp)")


def folder() -> Path:
    """Return the folder of this user's fork servers. Create it if it is missing.

    Raises ConfigError if the folder is not safe, because another user could put a socket into it.
    """
    try:
        return state_folder.made_state_dir()
    except OSError as error:
        path, reason = state_folder.state_dir(), error.strerror
        raise ConfigError(
            f"{path} cannot be made: {reason}. Set FLOWER_GPU_STATE_DIR to another folder"
        ) from error


def names() -> list[str]:
    """Return the names of this user's fork servers that have a socket file, even if they have ended."""
    return sorted(path.stem for path in folder().glob("*.socket"))


def remove_old_files() -> None:
    """Remove the files of servers that have not been started for a week, because their environment is gone.

    Other files in the folder, such as footprints, are kept.
    """
    oldest = time.time() - _KEPT_S
    files: dict[str, list[Path]] = {}
    for path in folder().iterdir():
        if match := _OURS.fullmatch(path.name):
            files.setdefault(match[1], []).append(path)
    for name, paths in files.items():
        # TimeoutError, which is an OSError, means that another process is starting the server.
        with suppress(OSError):
            if max(path.lstat().st_mtime for path in paths) < oldest:
                with locked(name, deadline=0.0):
                    if not _runs(name):
                        for path in paths:
                            path.unlink(missing_ok=True)
                        (folder() / f"{name}.lock").unlink(missing_ok=True)


def _runs(name: str) -> bool:
    """Return True if a server of this name is running, including a server that is draining."""
    try:
        connect(name, _LOOK_S).close()
    except Gone as gone:
        # Any other error, such as a full queue, means that the server is running.
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
    """Return a descriptor of an empty log for fork server ``name``, locked while a server writes to it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(folder() / f"{name}.log", flags, 0o600)
    # The lock is shared with a draining server of this name.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_server(pid: int) -> bool:
    """Return True if a process is a fork server of this user, even if it is starting or draining.

    The error stream of a server is a log of :func:`open_log`. The error stream of a worker belongs to its
    caller. A process of a confined worker cannot open such a log for writing, but it can open it with
    ``O_PATH``. So the flags are checked as well.
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
    """Return a connection to the fork server ``name``. Sends the proof that this process may use it.

    Raises Gone if the server is not running.
    Raises ConfigError if this process may not use it, because it is confined.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        with state_folder.short_name(folder()) as here:
            connection.connect(f"{here}/{name}.socket")
            if peer(connection)[1] != os.getuid():
                raise Gone(f"the socket of fork server {name} is another user's")
            with proof_opened() as proof:
                send(connection, CALLER, [proof])
    except OSError as error:
        connection.close()
        raise Gone(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def listen(name: str) -> socket.socket:
    """Return a listening socket with the file name ``name``. Replaces an existing socket file."""
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
        # folder() is not used, because it would create a removed folder again.
        file = (state_folder.state_dir() / f"{name}.socket").stat()
    except OSError:
        return None
    return file.st_ino, file.st_ctime_ns


def remove(name: str, which: tuple[int, int] | None) -> None:
    """Remove the socket file ``name`` if its identity is still ``which``."""
    # Check before locked(), because locked() would create a removed folder again.
    if identity(name) != which:
        return
    with suppress(OSError, ConfigError, TimeoutError), locked(name, deadline=0.0):
        if identity(name) == which:
            (folder() / f"{name}.socket").unlink()


class BeingStartedError(TimeoutError):
    """Another process holds the lock to start a fork server."""


@contextmanager
def locked(name: str, deadline: float | None, say: Callable[[str], object] = lambda _: None) -> Iterator[int]:
    """Hold the lock to start fork server ``name``, and yield its descriptor.

    A process that inherits the descriptor holds the lock, too.

    ``say``: called repeatedly during the wait, with the reason for it.

    Raises BeingStartedError if another process holds the lock until ``deadline`` (of ``time.monotonic``).
    Raises ConfigError if this process is confined, because its server would be confined as well.
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
            # If the name belongs to another file or none, this file was removed as an old file. Then try
            # again with a new file.
            if files.still_has_name(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def name_starter(lock: int) -> None:
    """Write the pid of this process into the lock file, so that waiting callers can name the process."""
    # The disk may be full. Then waiting callers cannot name the process.
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _sleep(lock: int, name: str, say: Callable[[str], object], seconds: float) -> None:
    say(_is_starting(lock, name))
    with allowed_interrupts():
        time.sleep(seconds)


def _is_starting(lock: int, name: str) -> str:
    """Return the reason for a wait, with the pid of the process that is starting the server if known."""
    pid = os.pread(lock, 20, 0).decode(errors="replace")
    return f"fork server {name} is being started by another process" + (f" (pid {pid})" if pid else "")


#: Name of the file in the state folder that proves a caller's rights. The file is empty.
PROOF: Final = "callers"

_PROOF_FLAGS: Final = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

# Held while the descriptor is open. Otherwise, a fork by another thread would have the descriptor as well.
_proof_lock = threading.RLock()


@contextmanager
def proof_opened() -> Iterator[int]:
    """Yield a descriptor of :data:`PROOF`. Creates the file if it is missing.

    Raises ConfigError if this process may not read the file.
    """
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
    """Return True if this process may read :data:`PROOF`. For a confined process this must be False."""
    with suppress(OSError, ConfigError), proof_opened():
        return True
    return False


def is_proof(descriptors: Sequence[int]) -> bool:
    """Return True if ``descriptors`` holds exactly one descriptor of :data:`PROOF`, open for reading."""
    if len(descriptors) != 1:
        return False
    try:
        # The file is looked up by name each time. A descriptor that this process kept open would be
        # inherited by each fork, which could then use it as a proof.
        proof, received = (state_folder.state_dir() / PROOF).lstat(), os.fstat(descriptors[0])
        if not stat.S_ISREG(proof.st_mode) or not os.path.samestat(proof, received):
            return False
        # Reading is the test, not the flags: Landlock lets any process open a file with O_PATH or for
        # ioctl(2).
        os.pread(descriptors[0], 1, 0)
    except OSError:
        return False
    return True


os.register_at_fork(
    before=_proof_lock.acquire, after_in_parent=_proof_lock.release, after_in_child=_proof_lock.release
)
