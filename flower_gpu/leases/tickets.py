"""Tickets: one file for each request that waits and for each lease, locked by its owner while that lives.

Nothing needs to be given back: the kernel lets go of the lock when the last process that has the file open is
gone, whatever ended it. A ticket whose lock is free counts for nothing. Only its owner writes it.

A ticket of another account is data of somebody who may mean harm: :func:`_read` takes what a ticket can say.
Whose it is, the folder and the owner of the file tell.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import select
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flower_gpu import files
from flower_gpu.leases import ticket_checks
from flower_gpu.leases.admission import CORES, MEMORY, CardRequest, Claim, Holding, Need, Part
from flower_gpu.leases.lease import Lease
from flower_gpu.printable import account_name, path_text

_log = logging.getLogger("flwr.flower_gpu")

_VERSION = 1
_TICKET, _WAKE, _LABEL, _NEW = ".ticket", ".wake", ".label", ".new"
# Far behind the request. The hole between the two takes no room on the disk.
_REPORT_AT = 1 << 16
_REPORT_BYTES = 8192
_LABEL_BYTES = 4096

_DYING_S = 2.0  # a killed process needs a moment, on a busy host a long one
_LOOK_S = 0.002

#: The last place in the line. Tickets that share it are in the order of their names.
LAST_ORDER = 10**15 - 1

_NAME = re.compile(r"(\d{1,100})-\d{1,100}-([0-9a-z]{1,32})\.ticket", re.ASCII)
# Tickets of another account that count: more than its processes need. All of them are read in each look.
_MOST_TICKETS = 20_000

_said: set[int] = set()  # accounts

# ``struct flock`` of fcntl(2): kind, from where, first byte, number of bytes (0: all), process.
_LOCK = struct.Struct("hhqqi4x")

# Errors from reading a file that may contain anything at all.
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """What every process can read of a ticket."""

    id: str  # its owner and the name of its file: no account can have a ticket with the id of another's
    order: int  # its place in the line; smaller ones came first
    path: Path  # its file
    user: int  # the account it belongs to
    pid: int  # the process that waits or has asked
    pid_namespace: int  # where that process id is valid
    since: float  # when the request was made, or granted; seconds since the epoch
    options: tuple[CardRequest, ...]  # the GPUs it may be on
    count: int = 1  # how many of them it needs; 0: it asks for cores and memory only
    pack: bool = False  # see :class:`flower_gpu.leases.admission.Claim`
    parts: tuple[Part, ...] = ()  # what it holds; empty while it waits
    needs: tuple[Need, ...] = ()  # what it asks for beside GPUs

    @property
    def name(self) -> str:
        """What the names of its files have in common."""
        return self.id.rpartition("-")[2]

    @property
    def claim(self) -> Claim:
        """The request, for admission."""
        return Claim(self.id, self.order, self.options, self.count, self.pack, self.needs)

    @property
    def holding(self) -> Holding:
        """The lease, for admission."""
        return Holding(self.id, self.order, self.parts)

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
            found = {need.resource: need.amount for need in self.needs}
        return found.get(resource)

    def label(self) -> str:
        """Return what the request is for; empty where it is another account's."""
        if self.user != os.getuid():  # text of other accounts is never shown
            return ""
        with suppress(OSError), _opened(self.path.parent / f"{self.name}{_LABEL}") as descriptor:
            return os.pread(descriptor, _LABEL_BYTES, 0).decode(errors="replace")
        return ""

    def could_use(self, parts: Iterable[Part]) -> bool:
        """Tell whether a request could use what these are parts of; if it asks for GPUs, of these."""
        names = {option.uuid for option in self.options}
        if not self.count:
            names = {need.resource for need in self.needs if need.least}
        return any(part.uuid in names for part in parts)

    def is_alive(self) -> bool:
        """Tell whether a process still has the file open."""
        return _is_locked(self.path)

    def wake(self) -> None:
        """Make its owner look again."""
        with suppress(OSError):  # the owner is gone, or its pipe is full of such messages
            path = self.path.parent / f"{self.name}{_WAKE}"
            with _opened(path, os.O_WRONLY) as descriptor:
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # not a link of another account
                    os.write(descriptor, b"1")

    def reported(self) -> tuple[int, dict[str, int]]:
        """Return the last report of its worker: process id (0: none), and the bytes it uses by GPU."""
        pid, used, *_ = self._report()
        return pid, used

    def is_idle(self) -> bool:
        """Tell whether its worker waits for another call, as it says itself."""
        return self._report()[3]

    def own_memory_bytes(self, of_process: Callable[[int], int]) -> int:
        """Return the main memory that its worker has taken by now; 0 where that is not known.

        ``of_process`` returns what a process of this pid namespace has.
        """
        pid, _, base_bytes, _ = self._report()
        if not pid or self.pid_namespace != pid_namespace():
            return 0
        return max(0, of_process(pid) - base_bytes)

    def _report(self) -> tuple[int, dict[str, int], int, bool]:
        try:
            with _opened(self.path) as descriptor:
                data = os.pread(descriptor, _REPORT_BYTES, _REPORT_AT)
            checksum, _, text = data.partition(b"\n")[0].partition(b" ")
            if int(checksum, 16) != zlib.crc32(text):  # read while it was being written
                return 0, {}, 0, False
            told = json.loads(text)
            used = {uuid: ticket_checks.whole(nbytes) for uuid, nbytes in told["used"].items()}
            base_bytes = ticket_checks.whole(told["base_bytes"])
            return (
                ticket_checks.whole(told["pid"], ticket_checks.MOST_PID),
                used,
                base_bytes,
                told["idle"] is True,
            )
        except (OSError, *_NOT_OURS):
            return 0, {}, 0, False


class Ticket:
    """A ticket of this process, made and changed with the ledger's mutex held."""

    def __init__(self, entry: Entry, descriptor: files.Descriptor, wake: files.Descriptor) -> None:
        self.entry = entry
        self.descriptor = descriptor
        self._wake = wake
        self._revision = 0

    @classmethod
    def create(cls, folder: Path, entry: Entry, label: str) -> Ticket:
        """Write a ticket into ``folder``. It is locked before any process can see it."""
        new = folder / f"{entry.name}{_NEW}"
        wake_path = folder / f"{entry.name}{_WAKE}"
        try:
            said = files.opened(folder / f"{entry.name}{_LABEL}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(said, label.encode(errors="replace")[:_LABEL_BYTES])
            said.close()
            os.mkfifo(wake_path, 0o622)
            os.chmod(wake_path, 0o622)  # whatever the umask is: others may wake, not read
            # Open for writing as well: otherwise poll reports the missing writer all the time.
            wake = files.opened(wake_path, os.O_RDWR | os.O_NONBLOCK)
            made = files.opened(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            lock(made)
            os.fchmod(made, 0o644)
            ticket = cls(replace(entry, path=new), made, wake)
            ticket.write(entry)
            return ticket
        except BaseException:
            remove(folder, entry.name)
            raise

    def write(self, entry: Entry) -> None:
        """Change the content under a new name: readers that know the old name read the file again."""
        fields = {
            "v": _VERSION,
            "pid": entry.pid,
            "pid_namespace": entry.pid_namespace,
            "since": entry.since,
            "count": entry.count,
            "pack": entry.pack,
            "options": [asdict(option) for option in entry.options],
            "parts": [asdict(part) for part in entry.parts],
            "needs": [asdict(need) for need in entry.needs],
        }
        data = json.dumps(fields).encode() + b"\n"
        self._revision += 1
        path = self.entry.path.parent / f"{entry.order:015d}-{self._revision}-{entry.name}{_TICKET}"
        # No process reads it meanwhile: the mutex is held. If this process ends here, the ticket is free.
        os.pwrite(self.descriptor, data, 0)
        self.entry.path.rename(path)
        self.entry = replace(entry, path=path)

    @property
    def wake_descriptor(self) -> int:
        """What can be read when another process has woken this one, until the next :meth:`wait`."""
        return self._wake

    def wait(self, timeout_s: float) -> bool:
        """Wait for another process to wake this one; tell whether one did."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return False
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        return True

    def report_worker(self, pid: int, base_bytes: int, used_bytes: Mapping[str, int] | None = None) -> None:
        """Report, for a worker that has just started or cannot write here, which process it is.

        ``base_bytes``: main memory that it has by then, in common with the process that it is a fork of.
        ``used_bytes``: what it uses of each GPU in its lease, by UUID.
        """
        data = _report_of(pid, used_bytes or {}, base_bytes)
        if len(data) <= _REPORT_BYTES:
            with suppress(OSError):  # the disk is full
                os.pwrite(self.descriptor, data, _REPORT_AT)

    def let_go(self) -> None:
        """Give up the lock; wait a moment for forks of a worker that have it, too: they are being killed."""
        self.descriptor.close()
        deadline = time.monotonic() + _DYING_S
        while self.entry.is_alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def remove(self) -> None:
        """Remove it. The lock ends with the last process that has it, which may be a worker."""
        remove(self.entry.path.parent, self.entry.name, self.entry.path)
        self._wake.close()
        self.descriptor.close()


def remove(folder: Path, name: str, path: Path | None = None) -> None:
    """Remove the files of a ticket."""
    for file in (path, *(folder / f"{name}{suffix}" for suffix in (_NEW, _WAKE, _LABEL))):
        if file is not None:
            with suppress(OSError):
                file.unlink()


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
            names = [name for name in names if name.endswith(_TICKET)]
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
        """Log what was found that is no ticket, once for each account. With the mutex held.

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


def clean(folder: Path, alive: Iterable[Entry]) -> None:
    """Remove files of this account's ended processes. The mutex must be held."""
    kept = {entry.name for entry in alive}
    left = []
    for file in os.listdir(folder):
        stem, suffix = os.path.splitext(file)
        name = stem.rpartition("-")[2]
        if suffix in (_TICKET, _WAKE, _LABEL, _NEW) and name not in kept:
            if suffix == _TICKET and _is_locked(folder / file):
                kept.add(name)  # another version of this package has written it
            else:
                left.append((name, folder / file))
    for name, path in left:
        if name not in kept:
            with suppress(OSError):
                path.unlink()


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
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


def _is_locked(path: Path) -> bool:
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
        with _opened(path) as descriptor:
            found = os.fstat(descriptor)
            data = os.pread(descriptor, _REPORT_AT, 0) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        if error.errno in (errno.ENOENT, errno.EACCES):  # gone; an account's own secret
            return None
        raise ValueError("no file") from None
    if found.st_uid != user:
        raise ValueError("owner")
    fields = json.loads(data.partition(b"\n")[0])
    if fields["v"] != _VERSION:
        return None
    options = tuple(ticket_checks.option(**option) for option in fields["options"])
    entry = Entry(
        id=f"{user}-{named[2]}",
        order=min(int(named[1]), LAST_ORDER),
        path=path,
        user=user,
        pid=ticket_checks.whole(fields["pid"], ticket_checks.MOST_PID),
        pid_namespace=ticket_checks.whole(fields["pid_namespace"], ticket_checks.MOST_NAMESPACE),
        since=ticket_checks.number(fields["since"], ticket_checks.LATEST_S),
        options=options,
        # More GPUs than it names are never free.
        count=max(1, ticket_checks.whole(fields["count"], len(options))) if options else 0,
        pack=ticket_checks.exactly(bool, fields["pack"]),
        parts=tuple(ticket_checks.part(user, **part) for part in fields["parts"]),
        needs=tuple(ticket_checks.need(user, **need) for need in fields["needs"]),
    )
    for names in (
        [option.uuid for option in options],
        [part.uuid for part in entry.parts],
        [need.resource for need in entry.needs],
    ):
        if len(set(names)) < len(names):
            raise ValueError("a name twice")
    return entry


def new_entry(
    folder: Path,
    order: int,
    options: tuple[CardRequest, ...],
    count: int,
    pack: bool,
    needs: tuple[Need, ...] = (),
) -> Entry:
    """Return the content of a new ticket of this process."""
    return Entry(
        id=f"{os.getuid()}-{os.urandom(8).hex()}",
        order=min(order, LAST_ORDER),
        path=folder,
        user=os.getuid(),
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        since=time.time(),
        options=options,
        count=count,
        pack=pack,
        needs=needs,
    )


def pid_namespace() -> int:
    """Return a number for this process's pid namespace; 0 where it is not known.

    NVML returns process ids of the asking process's namespace, and leaves out processes outside of it
    (``os_find_ns_pid`` in NVIDIA's open GPU kernel modules).
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _report_of(pid: int, used_bytes: Mapping[str, int], base_bytes: int, *, is_idle: bool = False) -> bytes:
    told: dict[str, Any] = {"pid": pid, "used": dict(used_bytes), "base_bytes": base_bytes, "idle": is_idle}
    text = json.dumps(told).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def report(used_bytes: Mapping[str, int], base_bytes: int = 0, *, is_idle: bool = False) -> None:
    """Report, in a worker, how much memory it uses of each GPU in its lease.

    Other processes then know which use is not ours. Unreported use counts as another program's.

    ``used_bytes``: by UUID, the CUDA context included.
    ``base_bytes``: main memory that it had when it started, in common with the process that it is a fork of.
    ``is_idle``: whether it waits for another call.
    """
    lease = Lease.from_environment(os.environ)
    if lease is None:
        return
    data = _report_of(os.getpid(), used_bytes, base_bytes, is_idle=is_idle)
    if len(data) > _REPORT_BYTES:
        return
    with suppress(OSError):  # the ticket is gone, or the disk is full
        descriptor = os.open(lease.ticket, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(descriptor, data, _REPORT_AT)
        finally:
            os.close(descriptor)
