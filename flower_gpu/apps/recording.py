"""Recording of a run in its trace (start, GPU samples, end), and the registry of running runs.

**Recording.** A :class:`RecordedRun` writes ``run_started``, ``gpu_sample`` and ``run_finished``. The process
of the run calls :meth:`RecordedRun.begin` and :meth:`RecordedRun.end`, usually through the context
:func:`recorded_run`. In between, a daemon thread writes one sample every ``INTERVAL_S``, if the host has a
GPU. The thread waits on an event, so ``end`` stops it at once. ``end`` joins the thread before it writes the
last sample, so no sample follows ``run_finished``.

**Registry.** ``flower-gpu top`` and the metrics exporter need to find the running runs of an account. Each
run has a file with its :class:`RunningRun` in the state folder. The process of the run holds an exclusive
lock on this file until it ends, and then removes the file. The kernel releases the lock of a
killed process, so a file without a lock belongs to a dead run. :func:`running_runs` finds out with a shared
lock, and removes the files of dead runs.

Two races follow, and :func:`_locked` handles both. A reader holds its shared lock for a moment, so a new run
waits up to ``_READERS_S`` for the lock. A reader may also remove the file of a dead run after a new run has
opened the file and before it has locked it. The new run would then hold a lock on a file without a name. So
it checks the name after it has the lock, and opens the file again if the name is gone. A reader in turn never
removes an empty file, because its run is about to write it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import flower_gpu
from flower_gpu import files, trace
from flower_gpu.apps.failures import COMPLETED
from flower_gpu.apps.folder import in_use
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import inventory
from flower_gpu.options import RESERVE
from flower_gpu.workers import state_folder
from flower_gpu.workers.threads import cores

#: Seconds between two samples. A sample takes one or two milliseconds per GPU.
INTERVAL_S: Final = 0.5


def look_at_gpus(folder: Path) -> bool:
    """Write a ``gpu_sample`` event into the trace in a folder. Return True if the host has a GPU."""
    gpus = [gpu for gpu in inventory.take(processes=False).gpus if gpu.uuid]
    celsius = inventory.temperatures()
    samples = [
        {
            "uuid": gpu.uuid,
            "used_bytes": gpu.used_bytes,
            "utilization_percent": gpu.utilization_percent,
            "temperature_c": celsius.get(gpu.uuid),
        }
        for gpu in gpus
    ]
    if samples:
        trace.write_to(folder, "gpu_sample", gpus=samples)
    return bool(samples)


class RecordedRun:
    """A run that is being recorded in the trace of a folder.

    ``description``: fields of its ``run_started`` event.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        #: The outcome: ``"completed"``, ``"failed"`` or ``"interrupted"``.
        self.outcome = COMPLETED
        #: Additional fields of ``run_finished``.
        self.end_told: dict[str, Any] = {}
        self._folder = folder
        self._description = description
        self._began: float | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write ``run_started`` and start to sample the GPUs. Calling it again has no effect."""
        if self._began is not None:
            return
        self._began = time.monotonic()
        trace.keep_open(self._folder)
        trace.write_to(
            self._folder,
            "run_started",
            **self._description,
            pid=os.getpid(),
            host=platform.node(),
            cores=cores(),
            version=flower_gpu.__version__,
            gpus=described_gpus(),
        )
        # The first sample shows the GPUs before the run, and the last sample shows them after it.
        if look_at_gpus(self._folder):
            self._thread = threading.Thread(target=self._look, name="flower-gpu-samples", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(INTERVAL_S):
            look_at_gpus(self._folder)

    def end(self) -> None:
        """Write the last GPU sample and ``run_finished``. It has no effect if the run has not begun."""
        if self._began is None:
            return
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            look_at_gpus(self._folder)
            inventory.close()
        seconds = round(time.monotonic() - self._began, 3)
        trace.write_to(self._folder, "run_finished", outcome=self.outcome, seconds=seconds, **self.end_told)
        trace.release(self._folder)


@contextmanager
def recorded_run(
    folder: Path,
    kind: str,
    name: str,
    *,
    clients: int | None = None,
    num_rounds: int | None = None,
    settings: Mapping[str, Any] | None = None,
    begins: bool = True,
) -> Iterator[RecordedRun]:
    """Record and register a run of an app while in the context.

    An exception makes the outcome ``"failed"``, and a KeyboardInterrupt makes it ``"interrupted"``.

    ``kind``: the command, as in :class:`RunningRun`. ``settings``: the settings that the run was started
    with.
    ``begins``: False if the caller calls :meth:`RecordedRun.begin` itself. Until then no event is written.
    Raises ConfigError if another process continues this run.
    """
    description = {
        "kind": kind,
        "name": name,
        "clients": clients,
        "num_rounds": num_rounds,
        "settings": settings,
    }
    with in_use(folder / trace.FILE_NAME), registered(folder, kind, name):
        run = RecordedRun(folder, description)
        try:
            if begins:
                run.begin()
            yield run
        except KeyboardInterrupt:
            run.outcome = "interrupted"
            raise
        except BaseException:
            run.outcome = "failed"
            raise
        finally:
            run.end()


def described_gpus() -> list[dict[str, Any]]:
    """Return the usable GPUs of this host in the form that a trace has them."""
    reserve = RESERVE.resolve(None, os.environ)
    return [
        {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "name": gpu.name,
            "total_bytes": gpu.total_bytes,
            "capacity_bytes": max(0, (gpu.total_bytes or 0) - (gpu.reserved_bytes or 0) - reserve),
        }
        for gpu in inventory.take(processes=False).usable
    ]


# The registry: one file per running run, locked by its process for as long as the process lives

_FOLDER = "runs"
_ENTRY_NAME = re.compile(r"[0-9a-f]{16}\.json")
#: Seconds to wait for a lock on an entry, because a reader may hold it for a moment.
_READERS_S = 0.3


@dataclass(frozen=True)
class RunningRun:
    """A run that is still running on this host."""

    folder: str  # folder with the trace
    kind: str  # "launch", "simulate" or "supernodes"
    name: str  # name of the app
    pid: int  # process that started the run
    since: float  # time of the start, in Unix seconds


@contextmanager
def registered(folder: Path, kind: str, name: str) -> Iterator[None]:
    """Register a run while in the context, so that other processes of this account can find it."""
    digest = hashlib.blake2b(os.fsencode(folder.absolute()), digest_size=8).hexdigest()
    descriptor, path = -1, _folder() / f"{digest}.json"
    run = RunningRun(str(folder), kind, name, os.getpid(), time.time())
    try:
        state_folder.made_state_dir()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = _locked(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(run)).encode(), 0)
    except (ConfigError, OSError):
        # Without its entry the run is invisible to other processes, but it can run.
        pass
    try:
        yield
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def running_runs() -> list[RunningRun]:
    """Return this account's running runs on this host, oldest first. Remove the entries of dead runs."""
    runs = []
    with suppress(OSError):
        for path in sorted(_folder().iterdir()):
            if _ENTRY_NAME.fullmatch(path.name) and (run := _read(path)) is not None:
                runs.append(run)
    return sorted(runs, key=lambda run: run.since)


def _locked(path: Path) -> int:
    """Return a descriptor of the file at ``path``, locked and created if necessary.

    Raises TimeoutError if another process holds the lock.
    """
    deadline = time.monotonic() + _READERS_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # A reader may hold the lock for a moment, so wait until the deadline.
            files.lock(descriptor, deadline)
            # A reader may have removed the entry of a dead process after it was opened here.
            if files.still_has_name(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _read(path: Path) -> RunningRun | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return None
        if not files.try_lock(descriptor, fcntl.LOCK_SH):
            entry = json.loads(os.pread(descriptor, 1 << 16, 0))
            return RunningRun(**{field.name: entry[field.name] for field in fields(RunningRun)})
        # The run of this entry is dead. Keep an empty file, because a new run is about to write it.
        if os.fstat(descriptor).st_size:
            path.unlink()
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(descriptor)


def _folder() -> Path:
    return state_folder.state_dir() / _FOLDER
