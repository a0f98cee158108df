"""The files of a host's ledger: one folder for each account, and one mutex file for all accounts.

All of them lie in a root folder that the accounts share, by default ``/tmp``. Each account creates its own
folder, to which only that account can write. All accounts can read all folders. The root is sticky, so no
account can remove or rename the folder of another.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flower_gpu import files
from flower_gpu.errors import LeaseError
from flower_gpu.options import LEDGER_DIR
from flower_gpu.printable import account_name

_PREFIX = "flower-gpu-leases-"
_MUTEX = "flower-gpu-leases.mutex"
# A user id in canonical form. Leading zeros and digits of other scripts are refused, because an account could
# use them to create many folders and so exceed its limit of tickets.
_USER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
# Shortest and longest pause between two attempts to lock the mutex
_PAUSES_S = (0.0002, 0.02)


@dataclass(frozen=True)
class LedgerFolder:
    """The root folder of a host's ledger, with the mutex and the folder of each account."""

    root: Path  # shared by all accounts
    # Longest wait for the mutex. A process normally holds it for milliseconds, but a stopped process keeps it
    # until it continues or is killed.
    mutex_wait_s: float = 60.0

    @classmethod
    def find(cls) -> LedgerFolder:
        """Return the host's ledger (``FLOWER_GPU_LEDGER_DIR``).

        Raises LeaseError if the folder does not exist, or this account cannot write to it. There is no
        fallback to another folder, because two ledgers would lease the same GPUs twice.
        """
        root = Path(LEDGER_DIR.resolve(None, os.environ)).absolute()
        try:
            is_folder = root.is_dir()
        except PermissionError as error:
            raise LeaseError(
                f"FLOWER_GPU_LEDGER_DIR={root} cannot be opened by this account: {error}"
            ) from error
        if not is_folder:
            raise LeaseError(f"FLOWER_GPU_LEDGER_DIR={root} is not a folder; create it with mode 1777")
        if not os.access(root, os.W_OK | os.X_OK | os.R_OK):
            raise LeaseError(
                f"this account cannot write to FLOWER_GPU_LEDGER_DIR={root}; give it mode 1777, or "
                "let all accounts of this host use another folder"
            )
        return cls(root)

    def own_folder(self) -> Path:
        """Return this account's folder. It is created if it is missing.

        Raises LeaseError if the folder belongs to another account, or another account can write to it.
        """
        path = self.root / f"{_PREFIX}{os.getuid()}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o755)
            path.chmod(0o755)  # independent of the umask
        if not _belongs_to(path, os.getuid()):
            raise LeaseError(_why_unusable(path))
        return path

    def all(self) -> list[tuple[int, Path]]:
        """Return the user id and folder of each account that has used the ledger, sorted by user id."""
        users = (name.removeprefix(_PREFIX) for name in files.names_with_prefix(self.root, _PREFIX))
        folders = ((int(user), self.root / f"{_PREFIX}{user}") for user in users if _USER.fullmatch(user))
        return sorted((user, path) for user, path in folders if _belongs_to(path, user))

    @staticmethod
    def stamps(folders: Iterable[tuple[int, Path]]) -> tuple[object, ...]:
        """Return one stamp for each folder. It changes whenever a ticket is created, changed or removed."""
        stamps: list[object] = []
        for _, path in folders:
            try:
                changed_ns = path.stat().st_mtime_ns
            except OSError:
                changed_ns = 0
            # The next change may get the same mtime if it follows at once. So a folder that has just changed
            # gets a new object as its stamp, which equals no other stamp.
            stamps.append((path, object() if files.changed_just_now(changed_ns) else changed_ns))
        return tuple(stamps)

    @contextmanager
    def locked(self, before_try: Callable[[], object] = lambda: None) -> Iterator[Callable[[], bool]]:
        """Hold the mutex, so that no other process changes the ledger.

        Yields a function that returns True if the locked file is still the ledger's mutex. The account that
        created the mutex file can replace it at any time. Another process can then lock the new file and
        change the ledger too.

        ``before_try``: called before each attempt to lock the mutex.
        Raises LeaseError if another process holds the mutex for longer than ``mutex_wait_s``.
        """
        descriptor = self._lock(before_try)
        try:
            yield lambda: files.still_has_name(descriptor, self.root / _MUTEX)
        finally:
            # Closing the descriptor is not enough: a fork in another thread may hold a copy for a moment.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            descriptor.close()

    def _lock(self, before_try: Callable[[], object]) -> files.Descriptor:
        path = self.root / _MUTEX
        deadline = time.monotonic() + self.mutex_wait_s
        while True:
            descriptor = _open(path)
            try:
                files.lock(descriptor, deadline, pauses_s=_PAUSES_S, before_try=before_try)
                if files.still_has_name(descriptor, path):
                    return descriptor
            except TimeoutError:
                holder = _holder(descriptor)
                descriptor.close()
                raise LeaseError(
                    f"{path} has been locked for {self.mutex_wait_s:g} s by {holder}; "
                    "if it was stopped (Ctrl-Z), let it continue or end it"
                ) from None
            descriptor.close()  # another process has replaced the file, so try again with the new one


def _open(path: Path) -> files.Descriptor:
    # Not with O_CREAT at once: fs.protected_regular forbids it for another account's file in /tmp.
    while True:
        try:
            return files.opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            with suppress(FileExistsError):
                created = files.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(created, 0o644)  # read access is enough to lock the file
                created.close()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ELOOP):
                owner = path.lstat().st_uid
                text = f"{path} of account {account_name(owner)} is not a file that all accounts can read"
                raise LeaseError(f"{text}; {_who_removes(owner)}") from error
            raise LeaseError(f"the ledger cannot be used: {error}") from error


def _belongs_to(path: Path, user: int) -> bool:
    with suppress(OSError):
        return files.is_own_folder(path, user=user)
    return False


def _why_unusable(path: Path) -> str:
    """Return the reason why this account cannot keep its tickets in ``path``, and who can remove it."""
    owner = path.lstat().st_uid
    if owner == os.getuid():
        return f"{path} must be a folder that only this account can write to; remove it"
    return (
        f"account {account_name(owner)} has created {path}, the folder for this account's leases, so this "
        f"account cannot get a lease; {_who_removes(owner)}"
    )


def _who_removes(owner: int) -> str:
    if owner == os.getuid():
        return "remove it"
    return "an administrator must remove it, because only its owner can remove it from a sticky folder"


def _holder(descriptor: int) -> str:
    """Return the pid and account of the process that has locked a file, or a general term if unknown."""
    inode = f":{os.fstat(descriptor).st_ino} "
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            # A line with "->" is for a process that waits for the lock.
            if inode in line and "->" not in line and len(fields) > 4:
                user = Path(f"/proc/{fields[4]}").stat().st_uid
                return f"process {fields[4]} of account {account_name(user)}"
    return "another process"
