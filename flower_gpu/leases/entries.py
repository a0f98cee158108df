"""What every process can read of tickets, and how far it believes them.

A ticket of another account is data of somebody who may mean harm: :func:`_read` takes what a ticket can say.
Whose it is, the folder and the owner of the file tell. A ticket whose lock is free counts for nothing.
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
    is_of_account,
    kind_of,
)
from flower_gpu.printable import account_name, path_text

T = TypeVar("T")

_log = logging.getLogger("flwr.flower_gpu")

VERSION = 1
#: The files of a ticket.
TICKET, WAKE, LABEL, NEW = ".ticket", ".wake", ".label", ".new"
#: Where the report of its worker is: far behind the claim. The hole in between takes no room on the disk.
REPORT_AT = 1 << 16
REPORT_BYTES = 8192
LABEL_BYTES = 4096

#: The last place in the line. Tickets that share it are in the order of their names.
LAST_ORDER = 10**15 - 1

_NAME = re.compile(r"(\d{1,100})-\d{1,100}-([0-9a-z]{1,32})\.ticket", re.ASCII)
# Tickets of another account that count: more than its processes need. All of them are read in each look.
_MOST_TICKETS = 20_000

# Bytes, or thousandths of a core: more than any host will have for long.
_MOST_AMOUNT = 1 << 50
_MOST_PID = 1 << 31
_MOST_NAMESPACE = 1 << 64
_LATEST_S = 1e11  # seconds since the epoch
_GPU = re.compile(r"[a-z0-9./-]{1,100}", re.ASCII | re.IGNORECASE)
_GROUP = re.compile(r"\d{1,30}", re.ASCII)

_said: set[int] = set()  # accounts

# ``struct flock`` of fcntl(2): kind, from where, first byte, number of bytes (0: all), process.
_LOCK = struct.Struct("hhqqi4x")

# Errors from reading a file that may contain anything at all.
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Entry(Claim):
    """What every process can read of a ticket."""

    # ``id`` is its owner and the name of its file: no account can have a ticket with the id of another's.
    path: Path  # its file
    user: int  # the account it belongs to
    pid: int  # the process that waits or has asked
    pid_namespace: int  # where that process id is valid
    since: float  # when the claim was made, or granted; seconds since the epoch

    @property
    def name(self) -> str:
        """What the names of its files have in common."""
        return self.id.rpartition("-")[2]

    @property
    def gpu_parts(self) -> tuple[Part, ...]:
        """What it holds of GPUs."""
        return tuple(part for part in self.parts if part.is_gpu)

    @property
    def cores(self) -> float | None:
        """The cores that it holds, or asks for while it waits; None: it is not about cores."""
        amount = self._amount_of(CORES)
        return None if amount is None else amount / 1000

    @property
    def host_memory_bytes(self) -> int | None:
        """The main memory that it holds, or asks for while it waits; None: it is not about memory."""
        return self._amount_of(MEMORY)

    def _amount_of(self, resource: str) -> int | None:
        found = {part.uuid: part.memory_bytes for part in self.parts}
        if not self.parts:
            found = {need.resource: need.amount for need in self.host_needs}
        return found.get(resource)

    def label(self) -> str:
        """Return the call's name; empty for another account's."""
        if self.user != os.getuid():  # text of other accounts is never shown
            return ""
        with suppress(OSError), opened(self.path.parent / f"{self.name}{LABEL}") as descriptor:
            return os.pread(descriptor, LABEL_BYTES, 0).decode(errors="replace")
        return ""

    def could_use(self, parts: Iterable[Part]) -> bool:
        """Tell whether a request could use the cards of these parts; for GPUs, one of their GPUs."""
        names = {need.uuid for need in self.gpu_needs}
        if not self.count:
            names = {need.resource for need in self.host_needs if need.least}
        return any(part.uuid in names for part in parts)

    def is_alive(self) -> bool:
        """Tell whether a process still has the file open."""
        return is_locked(self.path)

    def wake(self) -> None:
        """Make its owner look again."""
        with suppress(OSError):  # the owner is gone, or its pipe is full of such messages
            path = self.path.parent / f"{self.name}{WAKE}"
            with opened(path, os.O_WRONLY) as descriptor:
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # not a link of another account
                    os.write(descriptor, b"1")

    def reported(self) -> tuple[int, dict[str, int]]:
        """Return the last report of its worker: process id (0: none), and the bytes it uses by GPU."""
        pid, used, *_ = self._report()
        return pid, used

    def is_idle(self) -> bool:
        """Tell whether its worker waits for another call, as it says itself."""
        return self._report()[3]

    def own_memory_bytes(self) -> int:
        """Return the main memory that its worker has taken, by its last report; 0 where there is none.

        Other processes cannot look themselves: the worker may be in another pid namespace, or hidden
        (``hidepid`` of proc(5)).
        """
        return self._report()[2]

    def _report(self) -> tuple[int, dict[str, int], int, bool]:
        try:
            with opened(self.path) as descriptor:
                data = os.pread(descriptor, REPORT_BYTES, REPORT_AT)
            checksum, _, text = data.partition(b"\n")[0].partition(b" ")
            if int(checksum, 16) != zlib.crc32(text):  # read while it was being written
                return 0, {}, 0, False
            told = json.loads(text)
            used = {uuid: _whole(nbytes) for uuid, nbytes in told["used"].items()}
            memory_bytes, is_idle = _whole(told["memory_bytes"]), told["idle"] is True
            return _whole(told["pid"], _MOST_PID), used, memory_bytes, is_idle
        except (OSError, *_NOT_OURS):
            return 0, {}, 0, False


class Reader:
    """Reads the tickets of all accounts, each file once."""

    def __init__(self) -> None:
        self._known: dict[str, Entry | None] = {}
        #: What was found that is no ticket, with its owner
        self.invalid: dict[str, int] = {}

    def read(self, folders: Iterable[tuple[int, Path]]) -> list[Entry]:
        """Return the tickets in these folders, in the order of the line, also of processes that have ended.

        Raises OSError if this process can open no more files: a ticket must not be overlooked.
        """
        known: dict[str, Entry | None] = {}
        for user, folder in folders:
            try:
                names = os.listdir(folder)
            except (FileNotFoundError, PermissionError):
                continue
            names = [name for name in names if name.endswith(TICKET)]
            if len(names) > _MOST_TICKETS and user != os.getuid():
                names = sorted(names)[:_MOST_TICKETS]
            for name in names:
                path = f"{folder}/{name}"
                if path in self._known:
                    known[path] = self._known[path]
                    continue
                try:
                    known[path] = _read(Path(path), user)
                except _NOT_OURS:
                    known[path] = None
                    self.invalid[path] = user
        self._known = known
        self.invalid = {path: user for path, user in self.invalid.items() if path in known}
        entries = [entry for entry in known.values() if entry is not None]
        return sorted(entries, key=lambda entry: (entry.order, entry.id))

    def say_invalid(self) -> None:
        """Log files that are not valid tickets, once for each account. With the mutex held.

        Otherwise it may be one that is just being written.
        """
        for path, user in self.invalid.items():
            if user not in _said:
                _said.add(user)
                _log.warning(
                    "%s of account %s is no valid ticket of the ledger, and counts for nothing",
                    path_text(path),
                    account_name(user),
                )

    def forget(self, entry: Entry) -> None:
        """Leave out a ticket from now on: its process has ended."""
        self._known[str(entry.path)] = None


def _read(path: Path, user: int) -> Entry | None:
    """Return the content of a ticket; None if it is gone, or another version's.

    Raises ValueError, KeyError, TypeError and the others of ``_NOT_OURS`` if the file is no ticket. Whatever
    other accounts can write is checked here.
    Raises OSError if this process can open no more files.
    """
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise ValueError("name")
    try:
        with opened(path) as descriptor:
            found = os.fstat(descriptor)
            data = os.pread(descriptor, REPORT_AT, 0) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        if error.errno in (errno.ENOENT, errno.EACCES):  # gone; an account's own secret
            return None
        raise ValueError("no file") from None
    if found.st_uid != user:
        raise ValueError("owner")
    fields = json.loads(data.partition(b"\n")[0])
    if fields["v"] != VERSION:
        return None
    gpu_needs = tuple(_gpu_need(**need) for need in fields["gpu_needs"])
    entry = Entry(
        id=f"{user}-{named[2]}",
        order=min(int(named[1]), LAST_ORDER),
        path=path,
        user=user,
        pid=_whole(fields["pid"], _MOST_PID),
        pid_namespace=_whole(fields["pid_namespace"], _MOST_NAMESPACE),
        since=_number(fields["since"], _LATEST_S),
        gpu_needs=gpu_needs,
        # More GPUs than it names are never free.
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


# What a ticket can say. Each of these returns the value that it checks; ValueError or TypeError: it is none.


def _exactly(kind: type[T], value: object) -> T:
    """Check a type; True is no number."""
    if type(value) is not kind:
        raise TypeError(kind)
    return value


def _whole(value: object, most: int = _MOST_AMOUNT) -> int:
    """Return a whole number from 0 on. A negative one would make room for leases that do not fit."""
    number = _exactly(int, value)
    if not 0 <= number <= most:
        raise ValueError(number)
    return number


def _number(value: object, most: float) -> float:
    """Check a number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(value)
    return float(value)


def _gpu(uuid: object) -> str:
    """Check the name of a GPU."""
    name = _exactly(str, uuid)
    if not _GPU.fullmatch(name) or kind_of(name) is not None:
        raise ValueError("GPU")
    return name


def _of_host(resource: object, user: int) -> str:
    """Check a name of cores or main memory in a ticket of an account."""
    name = _exactly(str, resource)
    kind, _, group = name.partition(":")
    of_account = kind == UNKNOWN_MEMORY
    if not (of_account or kind in (CORES, MEMORY)) or not _GROUP.fullmatch(group or "0"):
        raise ValueError("resource")
    if of_account and not (group and is_of_account(int(group), user)):
        raise ValueError("task of another account")
    return name


def _gpu_need(uuid: str, memory_bytes: int | None, share: float | None, alone: bool) -> GPUNeed:
    """Check a ticket's request on one GPU."""
    part = None if share is None else _number(share, 1.0)
    if part == 0:
        raise ValueError("share")
    return GPUNeed(
        _gpu(uuid), None if memory_bytes is None else _whole(memory_bytes), part, _exactly(bool, alone)
    )


def _part(user: int, uuid: str, memory_bytes: int, budget_bytes: int, alone: bool) -> Part:
    """Check a ticket's part of one card."""
    name = _gpu(uuid) if kind_of(_exactly(str, uuid)) is None else _of_host(uuid, user)
    part = Part(name, _whole(memory_bytes), _whole(budget_bytes), _exactly(bool, alone))
    if not (part.is_gpu or part.budget_bytes):  # it is what there is of it in all, see host.cards
        raise ValueError("budget")
    return part


def _host_need(user: int, resource: str, amount: int, least: int, capacity: int) -> HostNeed:
    """Check a ticket's request of cores or main memory."""
    most = _whole(amount)
    return HostNeed(_of_host(resource, user), most, min(_whole(least), most), _whole(capacity))


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file that another account may have made: never wait for it, never follow a link."""
    descriptor = files.opened(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        descriptor.close()


@cache
def _has_locks_of_writers() -> bool:
    """Tell whether there are locks that only who can write a file gets: from Linux 3.15 on, not on macOS."""
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
    """Lock a ticket until the last process that has its file open is gone.

    Every account can read a ticket, so every account could keep one alive by a ``flock``.
    """
    if _has_locks_of_writers():
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Tell whether some process has a ticket's lock."""
    try:
        descriptor = files.opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False
    except OSError as error:
        # Links and pipes are no tickets. Without a free descriptor this process takes the owner for alive.
        return error.errno not in (errno.ELOOP, errno.ENXIO)
    try:
        if not _has_locks_of_writers():
            return not files.try_lock(descriptor, fcntl.LOCK_SH)
        asked = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
        return bool(kind != fcntl.F_UNLCK)
    finally:
        descriptor.close()


def pid_namespace() -> int:
    """Return a number for this process's pid namespace; 0 where it is not known.

    NVML returns process ids of the asking process's namespace, and leaves out processes outside of it
    (``os_find_ns_pid`` in NVIDIA's open GPU kernel modules).
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
