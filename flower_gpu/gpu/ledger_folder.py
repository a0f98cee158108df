"""Where the host's leases are written down: a folder for each account, and one mutex for all of them.

An account writes into its own folder only, which nobody else can change: the folders lie in one that is
sticky and belongs to the system, as ``/tmp`` does. Everybody reads all of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flower_gpu import config
from flower_gpu.errors import ConfigError, LeaseError
from flower_gpu.gpu import descriptors

_PREFIX = "flower-gpu-leases-"
_MUTEX = "flower-gpu-leases.mutex"
_CLOCK_STEP_NS = 30_000_000  # of the kernel's clock for files; most have 1 to 10 ms
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


@dataclass(frozen=True)
class LedgerFolder:
    """The ledger of a host.

    Parameters
    ----------
    root : Path
        Folder that all who use the ledger share.
    reason : str, optional
        Why it is not the host's, if it is this account's alone.
    mutex_wait_s : float
        How long to wait for the mutex, in seconds. It is held for milliseconds; a process that was stopped
        may hold it for ever.
    """

    root: Path
    reason: str | None = None
    mutex_wait_s: float = 60.0

    @classmethod
    def find(cls) -> LedgerFolder:
        """Return the host's ledger (``FLOWER_GPU_LEDGER_DIR``), or this account's where that is not writable.

        Raises
        ------
        LeaseError
            If a folder was asked for that is not there, or there is none that can be used.
        """
        asked = os.environ.get("FLOWER_GPU_LEDGER_DIR")
        root = Path(asked or "/tmp").absolute()
        if asked and not root.is_dir():
            raise LeaseError(f"FLOWER_GPU_LEDGER_DIR={asked} is not a folder; make it, with mode 1777")
        if os.access(root, os.W_OK | os.X_OK | os.R_OK):
            return cls(root)
        reason = f"{root} cannot be written to by this account"
        try:
            own = config.made_state_dir() / "ledger"
            own.mkdir(mode=0o700, exist_ok=True)
        except (ConfigError, OSError) as error:
            raise LeaseError(f"{reason}, and it can have no ledger of its own: {error}") from error
        return cls(own, f"{reason}: its leases do not see those of others")

    def own(self) -> Path:
        """Return this account's folder; make it where it is missing.

        Raises
        ------
        LeaseError
            If somebody else has made it.
        """
        path = self.root / f"{_PREFIX}{os.getuid()}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o755)
            path.chmod(0o755)  # whatever the umask is
        if not _belongs_to(path, os.getuid()):
            raise LeaseError(
                f"{path} must be a folder of this account that nobody else can write to; remove it"
            )
        return path

    def all(self) -> list[tuple[int, Path]]:
        """Return the folders of all accounts, with their user ids."""
        found = []
        with os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX):
                    user = entry.name.removeprefix(_PREFIX)
                    if user.isdecimal() and _belongs_to(Path(entry.path), int(user)):
                        found.append((int(user), Path(entry.path)))
        return sorted(found)

    @staticmethod
    def stamps(folders: Iterable[tuple[int, Path]]) -> tuple[object, ...]:
        """Return what is unequal to the stamps of before if a ticket was made, changed or removed since."""
        found: list[object] = []
        for _, path in folders:
            try:
                changed_ns = path.stat().st_mtime_ns
            except OSError:
                changed_ns = 0
            # The kernel's clock for files goes in steps: a change that is this young may not be the last of
            # its step, so it equals nothing.
            is_young = abs(time.time_ns() - changed_ns) < _CLOCK_STEP_NS
            found.append((path, object() if is_young else changed_ns))
        return tuple(found)

    @contextmanager
    def locked(self, before_try: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Hold the mutex: nobody else changes what is in the ledger.

        Parameters
        ----------
        before_try : callable
            Called before each try to get it.

        Raises
        ------
        LeaseError
            If another process does not give it back.
        """
        descriptor = self._lock(before_try)
        try:
            yield
        finally:
            # Said, not left to close: a fork in another thread may have a copy for a moment.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            descriptors.close(descriptor)

    def _lock(self, before_try: Callable[[], object]) -> int:
        path = self.root / _MUTEX
        deadline = time.monotonic() + self.mutex_wait_s
        pause_s = _FIRST_PAUSE_S
        while True:
            descriptor = _open(path)
            try:
                while True:
                    before_try()
                    # Not waiting in flock: that would wait for ever, and in a thread nothing could end it.
                    with suppress(BlockingIOError):
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    if time.monotonic() > deadline:
                        raise LeaseError(
                            f"{path} has been locked for {self.mutex_wait_s:g} s by {_holder(descriptor)}; "
                            "if it was stopped (Ctrl-Z), let it go on or end it"
                        )
                    time.sleep(pause_s * random.uniform(0.5, 1.5))
                    pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
                with suppress(FileNotFoundError):
                    if os.fstat(descriptor).st_ino == path.stat().st_ino:
                        return descriptor
            except BaseException:
                descriptors.close(descriptor)
                raise
            descriptors.close(descriptor)  # it was removed, and made anew by somebody else


def _open(path: Path) -> int:
    # Not with O_CREAT at once: fs.protected_regular forbids that for another account's file in /tmp.
    while True:
        try:
            return descriptors.opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            with suppress(FileExistsError):
                made = descriptors.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(made, 0o644)  # to lock it, others need to read it only
                descriptors.close(made)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ELOOP):
                raise LeaseError(f"{path} is not a file that everybody can read; remove it") from error
            raise LeaseError(f"the ledger cannot be used: {error}") from error


def _belongs_to(path: Path, user: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022


def _holder(descriptor: int) -> str:
    """Name the process that holds the lock of a file, as far as this account can see it."""
    inode = f":{os.fstat(descriptor).st_ino} "
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if inode in line and "->" not in line and len(fields) > 4:
                return f"process {fields[4]}"
    return "another process"
