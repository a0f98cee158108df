"""Tickets of this process: one locked file for each claim or lease.

A lease is a file because the kernel releases the file's lock when the last process with the file open ends.
So a killed process cannot leave a lease behind, and no daemon has to watch over processes. Only processes of
the owner's account write a ticket. :mod:`.entries` reads the tickets of all accounts.
"""

from __future__ import annotations

import json
import os
import select
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
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

# Seconds to wait until a killed process has ended. On a busy host that takes long.
_EXIT_WAIT_S = 2.0
_POLL_S = 0.002


class Ticket:
    """A ticket of this process.

    The ledger's mutex must be held to create, write or remove it.
    """

    def __init__(self, entry: Entry, descriptor: files.Descriptor, wake: files.Descriptor) -> None:
        self.entry = entry
        self.descriptor = descriptor
        self._wake = wake
        self._revision = 0

    @classmethod
    def create(cls, folder: Path, entry: Entry, label: str) -> Ticket:
        """Write a ticket into ``folder``. It is locked before other processes can see it."""
        new = folder / f"{entry.name}{NEW}"
        wake_path = folder / f"{entry.name}{WAKE}"
        try:
            label_file = files.opened(
                folder / f"{entry.name}{LABEL}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
            )
            os.write(label_file, label.encode(errors="replace")[:LABEL_BYTES])
            label_file.close()
            os.mkfifo(wake_path, 0o622)
            # Independent of the umask: other accounts may write to the pipe but not read it.
            os.chmod(wake_path, 0o622)
            # Also open for writing. Otherwise poll reports a hang-up whenever no writer has the pipe open.
            wake = files.opened(wake_path, os.O_RDWR | os.O_NONBLOCK)
            descriptor = files.opened(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            lock(descriptor)
            os.fchmod(descriptor, 0o644)
            ticket = cls(replace(entry, path=new), descriptor, wake)
            ticket.write(entry)
            return ticket
        except BaseException:
            remove(folder, entry.name)
            raise

    def write(self, entry: Entry) -> None:
        """Change the content, under a new name so that readers with the old name read the file again."""
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
        # The mutex is held, so no process reads the file between the two calls. If this process is killed
        # here, the ticket loses its lock.
        os.pwrite(self.descriptor, data, 0)
        self.entry.path.rename(path)
        self.entry = replace(entry, path=path)

    def relabel(self, label: str) -> None:
        """Name it after another call, because its worker does several calls under one lease."""
        folder, name = self.entry.path.parent, self.entry.name
        new = folder / f"{name}{NEW}"
        with suppress(OSError):  # no room: the label of an earlier call stays
            with closing(files.opened(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)) as said:
                os.write(said, label.encode(errors="replace")[:LABEL_BYTES])
            new.replace(folder / f"{name}{LABEL}")

    @property
    def wake_descriptor(self) -> int:
        """Descriptor that is readable after another process has woken this one, until :meth:`wait`."""
        return self._wake

    def wait(self, timeout_s: float) -> bool:
        """Wait until another process wakes this one. Return False after ``timeout_s`` seconds."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return False
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        return True

    def report_worker(self, pid: int, memory_bytes: int, used_bytes: Mapping[str, int] | None = None) -> None:
        """Report the memory use of a worker that cannot write the report itself.

        ``memory_bytes``: main memory used by the worker since its start.
        ``used_bytes``: memory used on each GPU of its lease, by UUID.
        """
        with suppress(OSError):  # the disk is full
            os.pwrite(self.descriptor, _report_text(pid, used_bytes or {}, memory_bytes), REPORT_AT)

    def release_lock(self) -> bool:
        """Release the lock. Return False if another process still holds it after :data:`_EXIT_WAIT_S`.

        The processes of a worker inherit the lock. They are being killed when this is called, but the kernel
        cannot kill a process in uninterruptible sleep.
        """
        self.descriptor.close()
        deadline = time.monotonic() + _EXIT_WAIT_S
        while self.entry.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def remove(self) -> None:
        """Remove the files and close the descriptors."""
        remove(self.entry.path.parent, self.entry.name, self.entry.path)
        self.close()

    def close(self) -> None:
        """Close the descriptors. The files stay, and :func:`remove_stale` removes them later."""
        self._wake.close()
        self.descriptor.close()


def remove(folder: Path, name: str, path: Path | None = None) -> None:
    """Remove the files of a ticket."""
    for file in (path, *(folder / f"{name}{suffix}" for suffix in (NEW, WAKE, LABEL))):
        if file is not None:
            with suppress(OSError):
                file.unlink()


def remove_stale(folder: Path, alive: Iterable[Entry]) -> None:
    """Remove the files of this account's ended processes. The ledger's mutex must be held."""
    kept_names = {entry.name for entry in alive}
    stale = []
    for file in os.listdir(folder):
        stem, suffix = os.path.splitext(file)
        name = stem.rpartition("-")[2]
        if suffix in (TICKET, WAKE, LABEL, NEW) and name not in kept_names:
            if suffix == TICKET and is_locked(folder / file):
                kept_names.add(name)  # a ticket written by another version of this package
            else:
                stale.append((name, folder / file))
    for name, path in stale:
        if name not in kept_names:
            with suppress(OSError):
                path.unlink()


def new_entry(folder: Path, order: int, count: int, pack: bool) -> Entry:
    """Return the entry of a new ticket of this process, without needs."""
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


def _report_text(
    pid: int, used_bytes: Mapping[str, int], memory_bytes: int, *, is_idle: bool = False
) -> bytes:
    fields: dict[str, Any] = {
        "pid": pid,
        "used": dict(used_bytes),
        "memory_bytes": memory_bytes,
        "idle": is_idle,
    }
    text = json.dumps(fields).encode()
    data = b"%08x %s\n" % (zlib.crc32(text), text)
    return data if len(data) <= REPORT_BYTES else b""


def report(used_bytes: Mapping[str, int], memory_bytes: int = 0, *, is_idle: bool = False) -> None:
    """Report the memory use of this worker in the ticket of its lease.

    Other processes subtract it from the use of a GPU. Without a report, they count it as another program's
    use.

    ``used_bytes``: memory used on each GPU of the lease, by UUID, including the CUDA context.
    ``memory_bytes``: main memory used since the start of the worker.
    ``is_idle``: True if the worker waits for another call.
    """
    lease = Lease.from_environment(os.environ)
    if lease is None:
        return
    # An OSError means that the ticket was removed, or that the disk is full.
    with suppress(OSError), opened(Path(lease.ticket), os.O_WRONLY) as descriptor:
        os.pwrite(descriptor, _report_text(os.getpid(), used_bytes, memory_bytes, is_idle=is_idle), REPORT_AT)
