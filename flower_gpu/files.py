"""Files that processes share: replaced at once, locked, in folders that only their account can change.

A copy of a locked file's descriptor in a fork would hold the lock: :func:`opened` makes descriptors without.
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
_LOCK_WAIT_S = 10.0  # a lock is held for a few ms; a process that was stopped may hold it for ever
_REMOVAL_S = 1.0  # a folder that is removed is locked meanwhile


@contextmanager
def replaced(path: Path, *, mode: int | None = None, has_one_writer: bool = False) -> Iterator[Path]:
    """Yield a new, empty file to write to; it takes the place of ``path`` after the block.

    A reader sees the old file or the new one, and nothing in between. After an error, or where the block
    removes the new file, the old one stays. ``mode``: its permissions, by default those of any new file; the
    block cannot change them by accident (safetensors makes files that only their owner can read).
    ``has_one_writer``: no other process or thread writes it; then what a killed process has left is
    overwritten.
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
        wanted = new.stat().st_mode
        yield new
        with suppress(FileNotFoundError):
            if new.stat().st_mode != wanted:
                new.chmod(wanted)
            new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink()


def is_own_folder(path: Path, *, user: int | None = None, forbidden: int = 0o022) -> bool:
    """Tell whether this is a folder, and no link, that belongs to an account and that no other can change.

    ``user``: by default this process's. ``forbidden``: permissions that it must not have.
    """
    found = path.lstat()
    owner = os.getuid() if user is None else user
    return stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & forbidden


# Of each folder and beginning of names: when the folder had changed last, and the names.
_listed: dict[tuple[Path, str], tuple[tuple[int, int, int], tuple[str, ...]]] = {}
_CLOCK_STEP_NS = 30_000_000  # of the kernel's clock for files; most have 1 to 10 ms


def names_with_prefix(folder: Path, prefix: str) -> tuple[str, ...]:
    """Return the names in a folder that begin with ``prefix``, in no order.

    The answer is kept until the folder changes. A shared ``/tmp`` may hold 100,000 files of other programs,
    which take 20 ms to list. Only for file systems that note the time of each change, not for control groups.
    """
    key, found = (folder, prefix), folder.stat()
    stamp = (found.st_dev, found.st_ino, found.st_mtime_ns)
    known = _listed.get(key)
    if known is not None and known[0] == stamp:
        return known[1]
    entries = os.listdir(folder)  # noqa: PTH208 - Path.iterdir takes several times as long
    names = tuple(name for name in entries if name.startswith(prefix))
    if not changed_just_now(found.st_mtime_ns):
        _listed[key] = stamp, names
    return names


def changed_just_now(mtime_ns: int) -> bool:
    """Return True if another change may get the same time, because the kernel's clock goes in steps."""
    return abs(time.time_ns() - mtime_ns) < _CLOCK_STEP_NS


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file unless another process has; tell whether that is done."""
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
    """Lock an open file; TimeoutError if another process holds the lock until ``deadline``.

    ``flock`` itself does not wait here: it would wait for ever, and in a thread nothing could end it.
    ``pauses_s``: the first pause between two tries, and the longest one.
    """
    pause_s, longest_s = pauses_s
    while True:
        before_try()
        if try_lock(descriptor):
            return
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(late)
        # Hundreds of processes may wait for one file. Not by the generator that users have seeded: how often
        # one waits is chance.
        sleep(pause_s * random.SystemRandom().uniform(0.5, 1.5))
        pause_s = min(pause_s * 1.5, longest_s)


@contextmanager
def locked(path: Path, wait_s: float | None = _LOCK_WAIT_S) -> Iterator[None]:
    """Hold the lock of a file; TimeoutError, an OSError, if somebody else does not give it back in time."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = opened(path, flags)
    try:
        late = f"another process has locked {path.name} for {wait_s or 0:g} s"
        lock(descriptor, None if wait_s is None else time.monotonic() + wait_s, late=late)
        try:
            yield
        finally:
            # Said, not left to close: a fork in another thread may have a copy for a moment.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        descriptor.close()


def locked_folder(path: Path) -> int:
    """Make an empty folder that only this account can enter, and lock it; return a descriptor of it.

    So others can tell a folder in use from what a killed process has left, which may be removed by anybody
    who can lock it. Forks have the descriptor, too.
    """
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # removed by somebody else before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                lock(descriptor, time.monotonic() + _REMOVAL_S)
            except TimeoutError:  # a child of an earlier process with this name is still there
                with suppress(OSError, RecursionError):
                    remove(path)
            else:
                if still_has_name(descriptor, path):
                    for left in path.iterdir():
                        remove(left)
                    return descriptor
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all in it, also one made to stay; OSError if that cannot be."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        # Folders that are too deep for Python, or that nobody may enter.
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)
        if path.exists():
            raise


def remove_unlocked_folders(paths: Iterable[Path]) -> None:
    """Remove those folders of ``locked_folder`` whose processes have ended without doing it."""
    for path in paths:
        with suppress(OSError, RecursionError):  # gone meanwhile, or it stays
            descriptor = opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # Whoever makes a folder of the same name waits for the lock.
                if try_lock(descriptor) and still_has_name(descriptor, path):
                    remove(path)
            finally:
                descriptor.close()


_TEMPORARY = "flower-gpu-temporary-"


@contextmanager
def temporary_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder for this process, in the temporary folder or another parent; it goes with the block.

    The folder of a process that was killed goes with the next block of any kind, or with
    :func:`remove_left_folders`.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_left_folders(parent)
    path = parent / f"{_TEMPORARY}{kind}-{os.getpid()}-{random.SystemRandom().randrange(1 << 32):08x}"
    descriptor = locked_folder(path)
    try:
        yield path
    finally:
        with suppress(OSError, RecursionError):
            remove(path)
        os.close(descriptor)


def remove_left_folders(parent: Path | None = None) -> None:
    """Remove the folders of :func:`temporary_folder` whose processes were killed."""
    folder = parent or Path(tempfile.gettempdir())
    with suppress(OSError):  # there is none, or a confined process may not look
        found = [folder / name for name in names_with_prefix(folder, _TEMPORARY)]
        # Folders of other accounts are neither locked nor removed.
        remove_unlocked_folders(path for path in found if _is_private(path))


def _is_private(path: Path) -> bool:
    with suppress(OSError):  # it is gone
        return is_own_folder(path, forbidden=0o077)
    return False


def still_has_name(descriptor: int, path: Path) -> bool:
    """Tell whether an open file or folder is still found at ``path``: not removed, and not made anew.

    To be asked after a lock was taken: the process that had it may have removed the file.
    """
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


# Open here, and to be closed in forks.
_own: set[int] = set()
_passed_on = threading.local()
# No fork comes between a descriptor and the note of it. Held for a system call on a file, never for waiting.
_lock = threading.RLock()


class Descriptor(int):
    """The number of a file that this process has opened; closed at the latest when nobody has it any more.

    So an exception at any moment, as Ctrl-C raises one, leaves no file open, and none locked.
    """

    process: int | None = None  # which has it open; in a fork the number may be another file's

    def close(self) -> None:
        """Close the file, unless that is done."""
        with _lock:
            if self.process in (None, os.getpid()):
                self.process = -1
                _own.discard(int(self))
                os.close(self)

    __del__ = close


def opened(path: Path, flags: int, mode: int = 0o600) -> Descriptor:
    """Open a file as ``os.open`` does; the descriptor is closed in forks of this process."""
    with _lock:
        # In one step of the interpreter: before the next one, a signal's handler may raise.
        [descriptor] = map(Descriptor, map(os.open, [path], [flags | os.O_CLOEXEC], [mode]))
        return _kept_from_forks(descriptor)


def duplicated(descriptor: int) -> Descriptor:
    """Return another descriptor of an open file, which has the same locks; it is closed in forks too."""
    with _lock:
        [duplicate] = map(Descriptor, map(os.dup, [descriptor]))
        return _kept_from_forks(duplicate)


def _kept_from_forks(descriptor: Descriptor) -> Descriptor:
    descriptor.process = os.getpid()
    _own.add(int(descriptor))
    return descriptor


@contextmanager
def passed_on(descriptor: int) -> Iterator[None]:
    """Let forks of this thread inherit a descriptor in the block."""
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
