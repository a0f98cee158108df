"""Reading tickets of all accounts, without trusting them.

Another account may write anything into its tickets. So :func:`_read` accepts only values that a real ticket
can have. The owner of a ticket is the owner of its folder and file, never a field of its content. A ticket
without a lock is ignored, because the kernel releases the lock when the last process of the claim ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from flower_gpu import files
from flower_gpu.leases.admission import (
    CORES,
    MEMORY,
    UNKNOWN_MEMORY,
    Claim,
    GPUNeed,
    HostNeed,
    Part,
    belongs_to_account,
    kind_of,
)
from flower_gpu.printable import account_name, path_text

T = TypeVar("T")

_log = logging.getLogger("flwr.flower_gpu")

VERSION = 1
#: Suffixes of the files of a ticket.
TICKET, WAKE, LABEL, NEW = ".ticket", ".wake", ".label", ".new"
#: Offset of the worker's report, far behind the claim. The hole in between uses no disk space.
REPORT_AT = 1 << 16
REPORT_BYTES = 8192
LABEL_BYTES = 4096

#: The last place in the queue. Tickets at this place are sorted by name.
LAST_ORDER = 10**15 - 1

_NAME = re.compile(r"(\d{1,100})-\d{1,100}-([0-9a-z]{1,32})\.ticket", re.ASCII)
# Limit of the tickets of another account, more than its processes can need. Without it, an account could slow
# down all others with millions of tickets.
_MAX_TICKETS = 20_000

# Upper limits of numbers in a ticket. Amounts are bytes or thousandths of a core.
_MAX_AMOUNT = 1 << 50
_MAX_PID = 1 << 31
_MAX_NAMESPACE = 1 << 64
_LATEST_S = 1e11  # seconds since the epoch
_GPU = re.compile(r"[a-z0-9./-]{1,100}", re.ASCII | re.IGNORECASE)
_GROUP = re.compile(r"\d{1,30}", re.ASCII)

# Accounts with invalid tickets that this process has warned of
_warned_accounts: set[int] = set()

# ``struct flock`` of fcntl(2): type, whence, first byte, number of bytes (0 for all), process
_LOCK = struct.Struct("hhqqi4x")

# Errors from parsing a file with arbitrary content
_INVALID = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Entry(Claim):
    """The content of a ticket, as any process of the host can read it.

    ``id`` consists of the account and the name of the file, so accounts cannot use each other's ids.
    """

    path: Path  # its file
    user: int  # user id of the account that owns it
    pid: int  # process that made the claim
    pid_namespace: int  # namespace of ``pid``
    since: float  # time of the claim or of its grant, in seconds since the epoch

    @property
    def name(self) -> str:
        """Common part of the names of the ticket's files."""
        return self.id.rpartition("-")[2]

    @property
    def gpu_parts(self) -> tuple[Part, ...]:
        """Granted parts of GPUs."""
        return tuple(part for part in self.parts if part.is_gpu)

    @property
    def cores(self) -> float | None:
        """Number of cores held, or requested by a waiting claim. None if the claim needs no cores."""
        amount = self._amount_of(CORES)
        return None if amount is None else amount / 1000

    @property
    def host_memory_bytes(self) -> int | None:
        """Main memory held, or requested by a waiting claim. None if the claim needs no main memory."""
        return self._amount_of(MEMORY)

    def _amount_of(self, resource: str) -> int | None:
        amounts = {part.uuid: part.memory_bytes for part in self.parts}
        if not self.parts:
            amounts = {need.resource: need.amount for need in self.host_needs}
        return amounts.get(resource)

    def label(self) -> str:
        """Return the name of the call, or an empty text if the ticket belongs to another account."""
        if self.user != os.getuid():  # texts written by other accounts are never shown
            return ""
        with suppress(OSError), opened(self.path.parent / f"{self.name}{LABEL}") as descriptor:
            return os.pread(descriptor, LABEL_BYTES, 0).decode(errors="replace")
        return ""

    def could_use(self, parts: Iterable[Part]) -> bool:
        """Return True if the claim needs one of the cards of these parts.

        A claim with GPUs is compared by its GPUs only.
        """
        names = {need.uuid for need in self.gpu_needs}
        if not self.count:
            names = {need.resource for need in self.host_needs if need.least}
        return any(part.uuid in names for part in parts)

    def is_alive(self) -> bool:
        """Return True if a process of the claim still runs: it has the ticket's lock."""
        return is_locked(self.path)

    def wake(self) -> None:
        """Wake the owner of the ticket, so that it reads the ledger again."""
        # An OSError means that the owner has ended, or that its pipe is full of earlier wake-ups.
        with suppress(OSError):
            path = self.path.parent / f"{self.name}{WAKE}"
            with opened(path, os.O_WRONLY) as descriptor:
                # Another account may have put a different kind of file there.
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    os.write(descriptor, b"1")

    def reported(self) -> tuple[int, dict[str, int]]:
        """Return the worker's last report: its process id (0: no report), and the bytes used by GPU."""
        pid, used, *_ = self._report()
        return pid, used

    def is_idle(self) -> bool:
        """Return True if the worker has reported that it waits for another call."""
        return self._report()[3]

    def worker_memory_bytes(self) -> int:
        """Return the main memory used by the worker since its start, by its last report, or 0.

        Other processes cannot measure it: the worker may be in another pid namespace, or hidden (``hidepid``
        of proc(5)).
        """
        return self._report()[2]

    def _report(self) -> tuple[int, dict[str, int], int, bool]:
        try:
            with opened(self.path) as descriptor:
                data = os.pread(descriptor, REPORT_BYTES, REPORT_AT)
            checksum, _, text = data.partition(b"\n")[0].partition(b" ")
            if int(checksum, 16) != zlib.crc32(text):  # a half-written report
                return 0, {}, 0, False
            report = json.loads(text)
            used = {uuid: _whole(nbytes) for uuid, nbytes in report["used"].items()}
            memory_bytes, is_idle = _whole(report["memory_bytes"]), report["idle"] is True
            return _whole(report["pid"], _MAX_PID), used, memory_bytes, is_idle
        except (OSError, *_INVALID):
            return 0, {}, 0, False


class Reader:
    """Reads the tickets of all accounts and parses each file only once.

    A ticket changes its name with its content, so a known name never has to be read again.
    """

    def __init__(self) -> None:
        # Entries by path. None marks an invalid ticket, or a ticket without a living process
        self._known: dict[str, Entry | None] = {}
        #: User ids of the owners of invalid tickets, by path
        self.invalid: dict[str, int] = {}

    def read(self, folders: Iterable[tuple[int, Path]]) -> list[Entry]:
        """Return the tickets in these folders in the order of the queue, including those of ended processes.

        Raises OSError if this process cannot open more files, because a ticket must not be overlooked.
        """
        known: dict[str, Entry | None] = {}
        for user, folder in folders:
            try:
                names = os.listdir(folder)
            except (FileNotFoundError, PermissionError):
                continue
            names = [name for name in names if name.endswith(TICKET)]
            if len(names) > _MAX_TICKETS and user != os.getuid():
                names = sorted(names)[:_MAX_TICKETS]
            for name in names:
                path = f"{folder}/{name}"
                if path in self._known:
                    known[path] = self._known[path]
                    continue
                try:
                    known[path] = _read(Path(path), user)
                except _INVALID:
                    known[path] = None
                    self.invalid[path] = user
        self._known = known
        self.invalid = {path: user for path, user in self.invalid.items() if path in known}
        entries = [entry for entry in known.values() if entry is not None]
        return sorted(entries, key=lambda entry: (entry.order, entry.id))

    def warn_of_invalid(self) -> None:
        """Warn of invalid tickets, once for each account.

        The ledger's mutex must be held. Without it, the file may be a half-written ticket.
        """
        for path, user in self.invalid.items():
            if user not in _warned_accounts:
                _warned_accounts.add(user)
                _log.warning(
                    "%s of account %s is not a valid ticket of the ledger and is ignored",
                    path_text(path),
                    account_name(user),
                )

    def forget(self, entry: Entry) -> None:
        """Ignore a ticket in all later reads, because its process has ended."""
        self._known[str(entry.path)] = None


def _read(path: Path, user: int) -> Entry | None:
    """Return the content of a ticket, or None if it was removed or written by another version.

    All values that another account can write are checked here.
    Raises the errors of ``_INVALID`` if the file is not a valid ticket.
    Raises OSError if this process cannot open more files.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError("name")
    try:
        with opened(path) as descriptor:
            status = os.fstat(descriptor)
            data = os.pread(descriptor, REPORT_AT, 0) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        if error.errno in (errno.ENOENT, errno.EACCES):  # removed, or private to its account
            return None
        raise ValueError("no file") from None
    if status.st_uid != user:
        raise ValueError("owner")
    fields = json.loads(data.partition(b"\n")[0])
    if fields["v"] != VERSION:
        return None
    gpu_needs = tuple(_gpu_need(**need) for need in fields["gpu_needs"])
    entry = Entry(
        id=f"{user}-{match[2]}",
        order=min(int(match[1]), LAST_ORDER),
        path=path,
        user=user,
        pid=_whole(fields["pid"], _MAX_PID),
        pid_namespace=_whole(fields["pid_namespace"], _MAX_NAMESPACE),
        since=_number(fields["since"], _LATEST_S),
        gpu_needs=gpu_needs,
        # A claim for more GPUs than it names could never be granted.
        count=max(1, _whole(fields["count"], len(gpu_needs))) if gpu_needs else 0,
        pack=_exactly(bool, fields["pack"]),
        parts=tuple(_part(user, **part) for part in fields["parts"]),
        host_needs=tuple(_host_need(user, **need) for need in fields["host_needs"]),
    )
    for names in (
        [need.uuid for need in gpu_needs],
        [part.uuid for part in entry.parts],
        [need.resource for need in entry.host_needs],
    ):
        if len(set(names)) < len(names):
            raise ValueError("a name twice")
    return entry


# Checks of the values of a ticket. Each function returns the checked value, or raises ValueError or
# TypeError.


def _exactly(kind: type[T], value: object) -> T:
    """Check the exact type of a value, so that True is not accepted as a number."""
    if type(value) is not kind:
        raise TypeError(kind)
    return value


def _whole(value: object, maximum: int = _MAX_AMOUNT) -> int:
    """Check a whole number. A negative amount would make room for leases that do not fit."""
    number = _exactly(int, value)
    if not 0 <= number <= maximum:
        raise ValueError(number)
    return number


def _number(value: object, maximum: float) -> float:
    """Check a number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
        raise ValueError(value)
    return float(value)


def _gpu(uuid: object) -> str:
    """Check the UUID of a GPU."""
    name = _exactly(str, uuid)
    if not _GPU.fullmatch(name) or kind_of(name) is not None:
        raise ValueError("GPU")
    return name


def _host_resource(resource: object, user: int) -> str:
    """Check the name of a card of cores or main memory in a ticket of ``user``."""
    name = _exactly(str, resource)
    kind, _, group = name.partition(":")
    is_of_task = kind == UNKNOWN_MEMORY
    if not (is_of_task or kind in (CORES, MEMORY)) or not _GROUP.fullmatch(group or "0"):
        raise ValueError("resource")
    if is_of_task and not (group and belongs_to_account(int(group), user)):
        raise ValueError("task of another account")
    return name


def _gpu_need(uuid: str, memory_bytes: int | None, share: float | None, alone: bool) -> GPUNeed:
    """Check a request on one GPU."""
    part = None if share is None else _number(share, 1.0)
    if part == 0:
        raise ValueError("share")
    return GPUNeed(
        _gpu(uuid), None if memory_bytes is None else _whole(memory_bytes), part, _exactly(bool, alone)
    )


def _part(user: int, uuid: str, memory_bytes: int, budget_bytes: int, alone: bool) -> Part:
    """Check a granted part of one card."""
    name = _gpu(uuid) if kind_of(_exactly(str, uuid)) is None else _host_resource(uuid, user)
    part = Part(name, _whole(memory_bytes), _whole(budget_bytes), _exactly(bool, alone))
    # The budget of a host part is the size of its card: HostReading.cards uses it.
    if not (part.is_gpu or part.budget_bytes):
        raise ValueError("budget")
    return part


def _host_need(user: int, resource: str, amount: int, least: int, capacity: int) -> HostNeed:
    """Check a request for cores or main memory."""
    wanted = _whole(amount)
    return HostNeed(_host_resource(resource, user), wanted, min(_whole(least), wanted), _whole(capacity))


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file of another account, without following links and without blocking on a pipe."""
    descriptor = files.opened(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        descriptor.close()


@cache
def _has_locks_of_writers() -> bool:
    """Return True if the kernel has open file description locks: Linux 3.15 and later, not macOS."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return False
    descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def lock(descriptor: int) -> None:
    """Lock a ticket until the last process with its file open has ended.

    A write lock needs a descriptor open for writing, so only the owner can take it. A ``flock`` would not do:
    every account can read a ticket, so every account could keep another's ticket alive.
    """
    if _has_locks_of_writers():
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Return True if a process has the ticket's lock."""
    try:
        descriptor = files.opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False
    except OSError as error:
        # Links and pipes are not tickets. Any other error, such as too many open files, says nothing about
        # the owner, so the owner is assumed to be alive.
        return error.errno not in (errno.ELOOP, errno.ENXIO)
    try:
        if not _has_locks_of_writers():
            return not files.try_lock(descriptor, fcntl.LOCK_SH)
        query = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        lock_type, *_ = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, query))
        return bool(lock_type != fcntl.F_UNLCK)
    finally:
        descriptor.close()


def pid_namespace() -> int:
    """Return a number that identifies this process's pid namespace, or 0 if it is unknown.

    NVML reports process ids in the namespace of the caller and omits processes outside of it
    (``os_find_ns_pid`` in NVIDIA's open GPU kernel modules).
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
