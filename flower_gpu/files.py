"""Files shared by processes: atomic replacement, locks, temporary folders, and descriptors closed in forks.

A fork inherits copies of all descriptors, and a copy of a locked file's descriptor holds the lock. So a file
opened by :func:`opened` is closed in each fork of the process.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# Longest wait for a lock. It is normally held for a few milliseconds, but a stopped process holds it for
# ever.
_LOCK_WAIT_S = 10.0
# Longest wait for the lock of a folder that another process is removing
_REMOVAL_S = 1.0


@contextmanager
def replaced(path: Path, *, mode: int | None = None, has_one_writer: bool = False) -> Iterator[Path]:
    """Yield a new, empty file to write to, which replaces ``path`` at the end of the block.

    A reader sees either the old file or the complete new one. After an error, or if the block removes the new
    file, the old file stays.

    ``mode``: permissions, by default those of any new file. They are set again after the block, because some
    libraries change them (safetensors creates files that only their owner can read).
    ``has_one_writer``: True if no other process or thread writes the file. Then the temporary file has a
    fixed name, so the next writer overwrites what a killed process has left behind.
    """
    unique = f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    new = path.with_name(f"{path.name}.tmp" if has_one_writer else unique)
    try:
        new.unlink(missing_ok=True)
        try:
            opened(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666).close()
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, "the folder does not exist", str(path.parent)) from None
        if mode is not None:
            new.chmod(mode)
        initial_mode = new.stat().st_mode
        yield new
        with suppress(FileNotFoundError):
            if new.stat().st_mode != initial_mode:
                new.chmod(initial_mode)
            new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink()


def is_own_folder(path: Path, *, user: int | None = None, forbidden: int = 0o022) -> bool:
    """Return True if the path is a folder, not a link, that no other account owns or can change.

    ``user``: user id of the owner, by default the account of this process.
    ``forbidden``: permission bits that must not be set.
    """
    status = path.lstat()
    owner = os.getuid() if user is None else user
    return stat.S_ISDIR(status.st_mode) and status.st_uid == owner and not status.st_mode & forbidden


# Cached listings by folder and prefix: the version of the folder, and the names
_listings: dict[tuple[Path, str], tuple[tuple[int, int, int], tuple[str, ...]]] = {}
# Upper limit of the step of the kernel's clock for files. Most kernels have steps of 1 to 10 ms.
_CLOCK_STEP_NS = 30_000_000


def names_with_prefix(folder: Path, prefix: str) -> tuple[str, ...]:
    """Return the names in a folder that begin with ``prefix``, unsorted.

    The listing is cached until the folder changes. A shared ``/tmp`` may hold 100,000 files of other
    programs, which take 20 ms to list. The cache relies on the folder's modification time, which control
    groups lack.
    """
    key, status = (folder, prefix), folder.stat()
    version = (status.st_dev, status.st_ino, status.st_mtime_ns)
    cached = _listings.get(key)
    if cached is not None and cached[0] == version:
        return cached[1]
    entries = os.listdir(folder)  # noqa: PTH208 - Path.iterdir takes several times as long
    names = tuple(name for name in entries if name.startswith(prefix))
    if not changed_just_now(status.st_mtime_ns):
        _listings[key] = version, names
    return names


def changed_just_now(mtime_ns: int) -> bool:
    """Return True if another change may get the same time, because the kernel's clock goes in steps."""
    return abs(time.time_ns() - mtime_ns) < _CLOCK_STEP_NS


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file. Return False if another process has the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(
    descriptor: int,
    deadline: float | None,
    *,
    pauses_s: tuple[float, float] = (_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
    late: str = "another process has locked the file",
    before_try: Callable[[], object] = lambda: None,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Lock an open file. Raises TimeoutError if another process holds the lock until ``deadline``.

    This polls, because a blocking ``flock`` has no timeout and cannot be interrupted in a thread.

    ``pauses_s``: shortest and longest pause between two attempts.
    ``late``: text of the error.
    ``before_try``: called before each attempt.
    """
    pause_s, longest_s = pauses_s
    while True:
        before_try()
        if try_lock(descriptor):
            return
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(late)
        # Random pauses, because hundreds of processes may wait for one file. From the system's generator,
        # because draws from the seeded one would change the results of users.
        sleep(pause_s * random.SystemRandom().uniform(0.5, 1.5))
        pause_s = min(pause_s * 1.5, longest_s)


@contextmanager
def locked(path: Path, wait_s: float | None = _LOCK_WAIT_S) -> Iterator[None]:
    """Hold the lock of a file. Raises TimeoutError if another process does not release it in time."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = opened(path, flags)
    try:
        late = f"another process has locked {path.name} for {wait_s or 0:g} s"
        lock(descriptor, None if wait_s is None else time.monotonic() + wait_s, late=late)
        try:
            yield
        finally:
            # Closing the descriptor is not enough: a fork in another thread may hold a copy for a moment.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        descriptor.close()


def locked_folder(path: Path) -> int:
    """Create an empty folder that only this account can enter, and lock it. Return its descriptor.

    The lock shows that the folder is in use. A folder without a lock was left behind by a killed process, and
    any process that gets the lock may remove it. Forks inherit the descriptor and the lock.
    """
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # another process has removed the folder before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                lock(descriptor, time.monotonic() + _REMOVAL_S)
            except TimeoutError:
                # A child of an earlier process still holds the lock of a folder with this name.
                with suppress(OSError, RecursionError):
                    remove(path)
            else:
                if still_has_name(descriptor, path):
                    for entry in path.iterdir():
                        remove(entry)
                    return descriptor
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content and without write permission. Raises OSError."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        # The tree is too deep for Python, or a folder has no permissions.
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)
        if path.exists():
            raise


def remove_unlocked_folders(paths: Iterable[Path]) -> None:
    """Remove the folders of :func:`locked_folder` that ended processes have left behind."""
    for path in paths:
        with suppress(OSError, RecursionError):  # removed by another process, or impossible to remove
            descriptor = opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # A process that creates a folder with the same name waits for this lock.
                if try_lock(descriptor) and still_has_name(descriptor, path):
                    remove(path)
            finally:
                descriptor.close()


_TEMPORARY = "flower-gpu-temporary-"


@contextmanager
def temporary_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder for this process, and remove it at the end of the block.

    The folder of a killed process is removed by the next call with the same parent, or by
    :func:`remove_stale_folders`.

    ``kind``: part of the name.
    ``parent``: where to create the folder, by default the system's temporary folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_stale_folders(parent)
    path = parent / f"{_TEMPORARY}{kind}-{os.getpid()}-{random.SystemRandom().randrange(1 << 32):08x}"
    descriptor = locked_folder(path)
    try:
        yield path
    finally:
        with suppress(OSError, RecursionError):
            remove(path)
        os.close(descriptor)


def remove_stale_folders(parent: Path | None = None) -> None:
    """Remove the folders of :func:`temporary_folder` that killed processes have left behind."""
    folder = parent or Path(tempfile.gettempdir())
    with suppress(OSError):  # the folder does not exist, or a confined process cannot list it
        paths = [folder / name for name in names_with_prefix(folder, _TEMPORARY)]
        # Folders of other accounts are neither locked nor removed.
        remove_unlocked_folders(path for path in paths if _is_private(path))


def _is_private(path: Path) -> bool:
    with suppress(OSError):  # removed meanwhile
        return is_own_folder(path, forbidden=0o077)
    return False


def still_has_name(descriptor: int, path: Path) -> bool:
    """Return True if ``path`` is still the open file or folder, not removed or replaced.

    Check this after locking a file, because the previous holder of the lock may have removed it.
    """
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


# Descriptors to close in forks
_own: set[int] = set()
_passed_on = threading.local()
# Held while a descriptor is opened and added to the set, so that no fork happens in between. Never held while
# waiting for something else.
_lock = threading.RLock()


class Descriptor(int):
    """A file descriptor that is closed when its last reference is deleted.

    So an exception at any moment, such as a KeyboardInterrupt, leaves no file open or locked.
    """

    # Process that opened the file. In a fork, the number may belong to another file
    process: int | None = None

    def close(self) -> None:
        """Close the file. Calling it again has no effect."""
        with _lock:
            if self.process in (None, os.getpid()):
                self.process = -1
                _own.discard(int(self))
                os.close(self)

    __del__ = close


def opened(path: Path, flags: int, mode: int = 0o600) -> Descriptor:
    """Open a file like ``os.open``. Forks of this process close the descriptor."""
    with _lock:
        # One step of the interpreter opens the file and creates the object that closes it. Between two steps,
        # a signal handler may raise an exception.
        [descriptor] = map(Descriptor, map(os.open, [path], [flags | os.O_CLOEXEC], [mode]))
        return _kept_from_forks(descriptor)


def duplicated(descriptor: int) -> Descriptor:
    """Return another descriptor of an open file, with the same locks. Forks close it as well."""
    with _lock:
        [duplicate] = map(Descriptor, map(os.dup, [descriptor]))
        return _kept_from_forks(duplicate)


def _kept_from_forks(descriptor: Descriptor) -> Descriptor:
    descriptor.process = os.getpid()
    _own.add(int(descriptor))
    return descriptor


@contextmanager
def passed_on(descriptor: int) -> Iterator[None]:
    """Let forks of this thread keep a descriptor, within the block."""
    _passed_on.descriptor = descriptor
    try:
        yield
    finally:
        _passed_on.descriptor = None


def _after_fork_in_child() -> None:
    _lock.release()
    kept = getattr(_passed_on, "descriptor", None)
    for descriptor in _own - {kept}:
        with suppress(OSError):
            os.close(descriptor)
    _own.clear()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)
