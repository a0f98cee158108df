"""Tickets of this process: one file for each claim and lease, locked by its owner while that lives.

Nothing needs to be given back: the kernel lets go of the lock when the last process that has the file open is
gone, whatever ended it. Only its owner writes it; :mod:`.entries` reads those of all.
"""

from __future__ import annotations

import json
import os
import select
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flower_gpu import files
from flower_gpu.leases.entries import (
    LABEL,
    LABEL_BYTES,
    LAST_ORDER,
    NEW,
    REPORT_AT,
    REPORT_BYTES,
    TICKET,
    VERSION,
    WAKE,
    Entry,
    is_locked,
    lock,
    opened,
    pid_namespace,
)
from flower_gpu.leases.lease import Lease

_DYING_S = 2.0  # a killed process needs a moment, on a busy host a long one
_LOOK_S = 0.002


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
        new = folder / f"{entry.name}{NEW}"
        wake_path = folder / f"{entry.name}{WAKE}"
        try:
            said = files.opened(folder / f"{entry.name}{LABEL}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(said, label.encode(errors="replace")[:LABEL_BYTES])
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
            "v": VERSION,
            "pid": entry.pid,
            "pid_namespace": entry.pid_namespace,
            "since": entry.since,
            "count": entry.count,
            "pack": entry.pack,
            "gpu_needs": [asdict(need) for need in entry.gpu_needs],
            "parts": [asdict(part) for part in entry.parts],
            "host_needs": [asdict(need) for need in entry.host_needs],
        }
        data = json.dumps(fields).encode() + b"\n"
        self._revision += 1
        path = self.entry.path.parent / f"{entry.order:015d}-{self._revision}-{entry.name}{TICKET}"
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

    def report_worker(self, pid: int, memory_bytes: int, used_bytes: Mapping[str, int] | None = None) -> None:
        """Report the use of a worker that does not write here itself.

        ``memory_bytes``: main memory that it has taken since its start.
        ``used_bytes``: memory that it uses of each GPU in its lease, by UUID.
        """
        with suppress(OSError):  # the disk is full
            os.pwrite(self.descriptor, _report_of(pid, used_bytes or {}, memory_bytes), REPORT_AT)

    def let_go(self) -> bool:
        """Give up the lock; return False if another process has it even after a moment.

        Processes of a worker have it too, and are being killed. One that the kernel cannot kill keeps it.
        """
        self.descriptor.close()
        deadline = time.monotonic() + _DYING_S
        while self.entry.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def remove(self) -> None:
        """Remove it."""
        remove(self.entry.path.parent, self.entry.name, self.entry.path)
        self.leave()

    def leave(self) -> None:
        """Close it, and leave its files to the processes that have its lock; see :func:`clean`."""
        self._wake.close()
        self.descriptor.close()


def remove(folder: Path, name: str, path: Path | None = None) -> None:
    """Remove the files of a ticket."""
    for file in (path, *(folder / f"{name}{suffix}" for suffix in (NEW, WAKE, LABEL))):
        if file is not None:
            with suppress(OSError):
                file.unlink()


def clean(folder: Path, alive: Iterable[Entry]) -> None:
    """Remove files of this account's ended processes. The mutex must be held."""
    kept = {entry.name for entry in alive}
    left = []
    for file in os.listdir(folder):
        stem, suffix = os.path.splitext(file)
        name = stem.rpartition("-")[2]
        if suffix in (TICKET, WAKE, LABEL, NEW) and name not in kept:
            if suffix == TICKET and is_locked(folder / file):
                kept.add(name)  # another version of this package has written it
            else:
                left.append((name, folder / file))
    for name, path in left:
        if name not in kept:
            with suppress(OSError):
                path.unlink()


def new_entry(folder: Path, order: int, count: int, pack: bool) -> Entry:
    """Return the content of a new ticket of this process, without its needs."""
    return Entry(
        id=f"{os.getuid()}-{os.urandom(8).hex()}",
        order=min(order, LAST_ORDER),
        path=folder,
        user=os.getuid(),
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        since=time.time(),
        count=count,
        pack=pack,
    )


def _report_of(pid: int, used_bytes: Mapping[str, int], memory_bytes: int, *, is_idle: bool = False) -> bytes:
    told: dict[str, Any] = {
        "pid": pid,
        "used": dict(used_bytes),
        "memory_bytes": memory_bytes,
        "idle": is_idle,
    }
    text = json.dumps(told).encode()
    data = b"%08x %s\n" % (zlib.crc32(text), text)
    return data if len(data) <= REPORT_BYTES else b""


def report(used_bytes: Mapping[str, int], memory_bytes: int = 0, *, is_idle: bool = False) -> None:
    """Report, in a worker, how much memory it uses of each GPU in its lease, and of main memory.

    Other processes then know which use is not ours. Unreported use counts as another program's.

    ``used_bytes``: by UUID, the CUDA context included.
    ``memory_bytes``: main memory that it has taken since its start.
    ``is_idle``: whether it waits for another call.
    """
    lease = Lease.from_environment(os.environ)
    if lease is None:
        return
    with suppress(OSError), opened(Path(lease.ticket), os.O_WRONLY) as descriptor:  # it is gone, or no room
        os.pwrite(descriptor, _report_of(os.getpid(), used_bytes, memory_bytes, is_idle=is_idle), REPORT_AT)
