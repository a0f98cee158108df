"""Where the host's leases are written down: a folder for each account, and one mutex for all of them.

An account writes into its own folder only, and no other account can change it: the folders lie in a sticky
folder of the system, such as ``/tmp``. Every account reads all of them.
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
# A user id in one form only. By leading zeros, or digits of other scripts, an account could have many folders
# and so any number of tickets that count.
_USER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_PAUSES_S = (0.0002, 0.02)  # between two tries to get the mutex: the first, the longest


@dataclass(frozen=True)
class LedgerFolder:
    """The ledger of a host."""

    root: Path  # the folder that all users of the ledger share
    # How long to wait for the mutex, in seconds. It is held for milliseconds; a process that was stopped
    # may hold it for ever.
    mutex_wait_s: float = 60.0

    @classmethod
    def find(cls) -> LedgerFolder:
        """Return the host's ledger (``FLOWER_GPU_LEDGER_DIR``).

        Raises LeaseError if its folder is not there, or this account cannot write to it. Leases in another
        folder would be of the same GPUs.
        """
        root = Path(LEDGER_DIR.resolve(None, os.environ)).absolute()
        try:
            is_there = root.is_dir()
        except PermissionError as error:
            raise LeaseError(
                f"FLOWER_GPU_LEDGER_DIR={root} cannot be opened by this account: {error}"
            ) from error
        if not is_there:
            raise LeaseError(f"FLOWER_GPU_LEDGER_DIR={root} is not a folder; make it, with mode 1777")
        if not os.access(root, os.W_OK | os.X_OK | os.R_OK):
            raise LeaseError(
                f"FLOWER_GPU_LEDGER_DIR={root} cannot be written to by this account; give it mode 1777, or "
                "have all accounts of this host use another folder"
            )
        return cls(root)

    def own(self) -> Path:
        """Return this account's folder, which is made if it is missing.

        Raises LeaseError if another account has made it, or can write to it.
        """
        path = self.root / f"{_PREFIX}{os.getuid()}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o755)
            path.chmod(0o755)  # whatever the umask is
        if not _belongs_to(path, os.getuid()):
            raise LeaseError(_why_not_own(path))
        return path

    def all(self) -> list[tuple[int, Path]]:
        """Return the folders of all accounts, with their user ids."""
        users = (name.removeprefix(_PREFIX) for name in files.names_with_prefix(self.root, _PREFIX))
        named = ((int(user), self.root / f"{_PREFIX}{user}") for user in users if _USER.fullmatch(user))
        return sorted((user, path) for user, path in named if _belongs_to(path, user))

    @staticmethod
    def stamps(folders: Iterable[tuple[int, Path]]) -> tuple[object, ...]:
        """Return values that differ from earlier ones if a ticket was made, changed or removed since."""
        found: list[object] = []
        for _, path in folders:
            try:
                changed_ns = path.stat().st_mtime_ns
            except OSError:
                changed_ns = 0
            # Another change may have the same time as this one: then the stamp equals nothing.
            found.append((path, object() if files.changed_just_now(changed_ns) else changed_ns))
        return tuple(found)

    @contextmanager
    def locked(self, before_try: Callable[[], object] = lambda: None) -> Iterator[Callable[[], bool]]:
        """Hold the mutex: no other process changes the ledger.

        Yields a function that tells whether that is so up to now. The account that has made the file can put
        another one in its place at any time, and another process could lock that one.

        ``before_try``: called before each try to get it.
        Raises LeaseError if another process does not give it back.
        """
        descriptor = self._lock(before_try)
        try:
            yield lambda: files.still_has_name(descriptor, self.root / _MUTEX)
        finally:
            # Not left to close: a fork in another thread may have a copy of the descriptor for a moment.
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
                    "if it was stopped (Ctrl-Z), let it go on or end it"
                ) from None
            descriptor.close()  # another process has removed the file and made a new one


def _open(path: Path) -> files.Descriptor:
    # Not with O_CREAT at once: fs.protected_regular forbids that for another account's file in /tmp.
    while True:
        try:
            return files.opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            with suppress(FileExistsError):
                made = files.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(made, 0o644)  # to lock it, others need to read it only
                made.close()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ELOOP):
                owner = path.lstat().st_uid
                text = f"{path} of account {account_name(owner)} is not a file that everybody can read"
                raise LeaseError(f"{text}; {_who_removes(owner)}") from error
            raise LeaseError(f"the ledger cannot be used: {error}") from error


def _belongs_to(path: Path, user: int) -> bool:
    with suppress(OSError):
        return files.is_own_folder(path, user=user)
    return False


def _why_not_own(path: Path) -> str:
    """Return why this account cannot have its folder at ``path``, and who can change that."""
    owner = path.lstat().st_uid
    if owner == os.getuid():
        return f"{path} must be a folder that nobody but this account can write to; remove it"
    return (
        f"account {account_name(owner)} has made {path}, where this account writes down its leases, so this "
        f"account gets none; {_who_removes(owner)}"
    )


def _who_removes(owner: int) -> str:
    if owner == os.getuid():
        return "remove it"
    return "an administrator must remove it, as nobody else can in a sticky folder"


def _holder(descriptor: int) -> str:
    """Name the process that holds the lock of a file, as far as this account can see it."""
    inode = f":{os.fstat(descriptor).st_ino} "
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if inode in line and "->" not in line and len(fields) > 4:
                user = Path(f"/proc/{fields[4]}").stat().st_uid
                return f"process {fields[4]} of account {account_name(user)}"
    return "another process"
