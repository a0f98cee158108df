"""Tickets: one file for each request that waits or is held, locked by its owner for as long as it lives.

Nothing needs to be given back: the kernel lets go of a ``flock`` when the last process that has the file
open is gone, whatever ended it, and a ticket whose lock is free stands for nothing. Only its owner writes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import stat
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flower_gpu.gpu import descriptors
from flower_gpu.gpu.admission import Claim, Holding, Option, Part
from flower_gpu.gpu.lease import Lease

#: The pid namespace that NVML's process ids are of; the kernel gives it this number (PROC_PID_INIT_INO).
HOST_PID_NAMESPACE = 0xEFFFFFFC

_VERSION = 1
_TICKET, _WAKE, _LABEL, _NEW = ".ticket", ".wake", ".label", ".new"
# Far behind anything that a request writes; what lies between takes no room on the disk.
_REPORT_AT = 1 << 16
_REPORT_BYTES = 8192


@dataclass(frozen=True)
class Entry:
    """What everybody can read of a ticket.

    Parameters
    ----------
    id : str
        Names it.
    order : int
        Its place in the line; smaller ones came first.
    path : Path
        Its file.
    user : int
        The account it belongs to.
    pid : int
        The process that waits or has asked.
    pid_namespace : int
        Where that process id is valid.
    since : float
        When it was asked for, or granted; seconds since the epoch.
    options : tuple of Option
        The GPUs it may be on.
    count : int
        How many of them it needs.
    pack : bool
        See :class:`flower_gpu.gpu.admission.Claim`.
    parts : tuple of Part
        What it holds; empty while it waits.
    """

    id: str
    order: int
    path: Path
    user: int
    pid: int
    pid_namespace: int
    since: float
    options: tuple[Option, ...]
    count: int = 1
    pack: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def claim(self) -> Claim:
        """The request, for admission."""
        return Claim(self.id, self.order, self.options, self.count, self.pack)

    @property
    def holding(self) -> Holding:
        """The lease, for admission."""
        return Holding(self.id, self.order, self.parts)

    def label(self) -> str:
        """Return what the request is for; empty where it is another account's."""
        try:
            return (self.path.parent / f"{self.id}{_LABEL}").read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def is_alive(self) -> bool:
        """Tell whether a process still has it."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def wake(self) -> None:
        """Have its owner look again."""
        with suppress(OSError):  # it is gone, or has been told so often that the pipe is full
            path = self.path.parent / f"{self.id}{_WAKE}"
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(descriptor, b"1")
            finally:
                os.close(descriptor)

    def reported(self) -> tuple[int, dict[str, int]]:
        """Return what its worker has told last: its process id (0: nothing), and the bytes it uses by GPU."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return 0, {}
        try:
            data = os.pread(descriptor, _REPORT_BYTES, _REPORT_AT)
        finally:
            os.close(descriptor)
        checksum, _, text = data.partition(b"\n")[0].partition(b" ")
        try:
            if int(checksum, 16) != zlib.crc32(text):  # read while it was being written
                return 0, {}
            told = json.loads(text)
            return int(told["pid"]), {str(uuid): int(used) for uuid, used in told["used"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return 0, {}


class Ticket:
    """A ticket of this process; made, and changed, with the ledger's mutex held."""

    def __init__(self, entry: Entry, descriptor: int, wake: int) -> None:
        self.entry = entry
        self.descriptor = descriptor
        self._wake = wake
        self._revision = 0

    @classmethod
    def create(cls, folder: Path, entry: Entry, label: str) -> Ticket:
        """Write a ticket into ``folder``, locked before anybody can see it."""
        new = folder / f"{entry.id}{_NEW}"
        wake_path = folder / f"{entry.id}{_WAKE}"
        made: list[int] = []
        try:
            with open(os.open(folder / f"{entry.id}{_LABEL}", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(label)
            os.mkfifo(wake_path, 0o622)
            os.chmod(wake_path, 0o622)  # whatever the umask is: others may wake, not read
            # For writing, too: the pipe has no end then that could be reported all the time.
            made.append(descriptors.own(os.open(wake_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)))
            made.append(
                descriptors.own(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            )
            os.fchmod(made[1], 0o644)
            fcntl.flock(made[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            ticket = cls(replace(entry, path=new), made[1], made[0])
            ticket.write(entry)
            return ticket
        except BaseException:
            for descriptor in made:
                descriptors.close(descriptor)
            remove(folder, entry.id)
            raise

    def write(self, entry: Entry) -> None:
        """Change what it says; what others have read before belongs to a name that is gone."""
        fields = {
            "v": _VERSION,
            "pid": entry.pid,
            "pid_namespace": entry.pid_namespace,
            "since": entry.since,
            "count": entry.count,
            "pack": entry.pack,
            "options": [asdict(option) for option in entry.options],
            "parts": [asdict(part) for part in entry.parts],
        }
        data = json.dumps(fields).encode() + b"\n"
        self._revision += 1
        path = self.entry.path.parent / f"{entry.order:015d}-{self._revision}-{entry.id}{_TICKET}"
        # Nobody reads it meanwhile, as the mutex is held; and if this process ends in between, it is free.
        os.pwrite(self.descriptor, data, 0)
        self.entry.path.rename(path)
        self.entry = replace(entry, path=path)

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody wakes this process; tell whether somebody did."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return False
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        return True

    def remove(self) -> None:
        """Take it away. The lock ends with the last process that has it, which may be a worker."""
        remove(self.entry.path.parent, self.entry.id, self.entry.path)
        for descriptor in (self._wake, self.descriptor):
            if descriptor >= 0:
                descriptors.close(descriptor)
        self._wake = self.descriptor = -1


def remove(folder: Path, id_: str, path: Path | None = None) -> None:
    """Remove the files of a ticket."""
    for file in (path, *(folder / f"{id_}{suffix}" for suffix in (_NEW, _WAKE, _LABEL))):
        if file is not None:
            with suppress(OSError):
                file.unlink()


class Reader:
    """Reads the tickets of all accounts; what it has read before it does not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, Entry | None] = {}

    def read(self, folders: Iterable[tuple[int, Path]]) -> list[Entry]:
        """Return the tickets in these folders, in their order, also of processes that have ended."""
        known: dict[Path, Entry | None] = {}
        for user, folder in folders:
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in names:
                if name.endswith(_TICKET):
                    path = folder / name
                    known[path] = self._known[path] if path in self._known else _read(path, user)
        self._known = known
        return sorted((entry for entry in known.values() if entry is not None), key=lambda entry: entry.order)


def clean(folder: Path, alive: Iterable[Entry]) -> None:
    """Remove what processes of this account have left that have ended. The mutex must be held."""
    kept = {entry.id for entry in alive}
    for path in list(folder.iterdir()):
        id_ = path.stem.rpartition("-")[2]
        if path.suffix in (_TICKET, _WAKE, _LABEL, _NEW) and id_ not in kept:
            with suppress(OSError):
                path.unlink()


def _read(path: Path, user: int) -> Entry | None:
    try:
        order, _, id_ = path.stem.split("-")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != user:
                return None
            data = os.pread(descriptor, _REPORT_AT, 0)
        finally:
            os.close(descriptor)
        fields = json.loads(data.partition(b"\n")[0])
        if fields["v"] != _VERSION:
            return None
        return Entry(
            id=id_,
            order=int(order),
            path=path,
            user=user,
            pid=int(fields["pid"]),
            pid_namespace=int(fields["pid_namespace"]),
            since=float(fields["since"]),
            options=tuple(Option(**option) for option in fields["options"]),
            count=int(fields["count"]),
            pack=bool(fields["pack"]),
            parts=tuple(Part(**part) for part in fields["parts"]),
        )
    except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or nothing of ours
        return None


def new_entry(folder: Path, order: int, options: tuple[Option, ...], count: int, pack: bool) -> Entry:
    """Return what a new ticket of this process says."""
    return Entry(
        id=os.urandom(8).hex(),
        order=order,
        path=folder,
        user=os.getuid(),
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        since=time.time(),
        options=options,
        count=count,
        pack=pack,
    )


def pid_namespace() -> int:
    """Return what tells this process's pid namespace from others; 0 where it is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def report(used_bytes: Mapping[str, int]) -> None:
    """Write down, in a worker, how much memory it uses of each GPU that it has a lease on.

    Others then know what of a GPU's use is not ours. What is never told counts as another program's.

    Parameters
    ----------
    used_bytes : mapping
        By UUID, the CUDA context included.
    """
    lease = Lease.from_environment(os.environ)
    if lease is None:
        return
    told: dict[str, Any] = {"pid": os.getpid(), "used": dict(used_bytes)}
    text = json.dumps(told).encode()
    data = b"%08x %s\n" % (zlib.crc32(text), text)
    if len(data) > _REPORT_BYTES:
        return
    with suppress(OSError):  # it is no more, or nobody can write there any more
        descriptor = os.open(lease.ticket, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(descriptor, data, _REPORT_AT)
        finally:
            os.close(descriptor)
