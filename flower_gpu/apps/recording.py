"""Writes a run as a whole into its trace: its start, samples of the GPUs, its end. Says which runs go on."""

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

#: Seconds between two looks. One takes a millisecond or two for a GPU.
INTERVAL_S: Final = 0.5


def look_at_gpus(folder: Path) -> bool:
    """Write a ``gpu_sample`` line into the trace in a folder; tell whether there is a GPU."""
    found = [gpu for gpu in inventory.take(processes=False).gpus if gpu.uuid]
    celsius = inventory.temperatures()
    gpus = [
        {
            "uuid": gpu.uuid,
            "used_bytes": gpu.used_bytes,
            "utilization_percent": gpu.utilization_percent,
            "temperature_c": celsius.get(gpu.uuid),
        }
        for gpu in found
    ]
    if gpus:
        trace.write_to(folder, "gpu_sample", gpus=gpus)
    return bool(gpus)


class RecordedRun:
    """A run that is being recorded in the trace of a folder; ``told`` is what its ``run_started`` tells."""

    def __init__(self, folder: Path, told: Mapping[str, Any]) -> None:
        #: How it has ended: ``"completed"``, ``"failed"`` or ``"interrupted"``.
        self.outcome = COMPLETED
        #: What else its ``run_finished`` tells.
        self.end_told: dict[str, Any] = {}
        self._folder = folder
        self._told = told
        self._began: float | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write down that it has begun, and look at the GPUs from now on."""
        if self._began is not None:
            return
        self._began = time.monotonic()
        trace.keep_open(self._folder)
        trace.write_to(
            self._folder,
            "run_started",
            **self._told,
            pid=os.getpid(),
            host=platform.node(),
            cores=cores(),
            version=flower_gpu.__version__,
            gpus=told_gpus(),
        )
        # The first look is what was there before the run, the last what is there after it.
        if look_at_gpus(self._folder):
            self._thread = threading.Thread(target=self._look, name="flower-gpu-samples", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(INTERVAL_S):
            look_at_gpus(self._folder)

    def end(self) -> None:
        """Look at the GPUs a last time, and write down how it has ended."""
        if self._began is None:
            return
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            look_at_gpus(self._folder)
            inventory.close()
        seconds = round(time.monotonic() - self._began, 3)
        trace.write_to(self._folder, "run_finished", outcome=self.outcome, seconds=seconds, **self.end_told)
        trace.let_go(self._folder)


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
    """Record a run of an app, while in the context; ``kind`` is as in :class:`RunningRun`.

    ``settings`` is what it was started with. An exception is a failure, a KeyboardInterrupt an interruption.
    Without ``begins`` nothing is written before :meth:`RecordedRun.begin` is called. Raises ConfigError if
    another process goes on with this run.
    """
    told = {"kind": kind, "name": name, "clients": clients, "num_rounds": num_rounds, "settings": settings}
    with in_use(folder / trace.FILE_NAME), registered(folder, kind, name):
        run = RecordedRun(folder, told)
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


def told_gpus() -> list[dict[str, Any]]:
    """Return the GPUs of this host, as a trace tells of them."""
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


# Which runs there are now: a file for each, locked by its process for as long as that lives

_FOLDER = "runs"
_OURS = re.compile(r"[0-9a-f]{16}\.json")
_READERS_S = 0.3  # for which a lock may be that of a reader


@dataclass(frozen=True)
class RunningRun:
    """A run that goes on."""

    folder: str  # where its trace is
    kind: str  # "launch", "simulate" or "supernodes"
    name: str  # of its app
    pid: int  # the process that has started it
    since: float  # Unix seconds


@contextmanager
def registered(folder: Path, kind: str, name: str) -> Iterator[None]:
    """Let others of this user see a run, while in the context."""
    digest = hashlib.blake2b(os.fsencode(folder.absolute()), digest_size=8).hexdigest()
    descriptor, path = -1, _folder() / f"{digest}.json"
    run = RunningRun(str(folder), kind, name, os.getpid(), time.time())
    try:
        state_folder.made_state_dir()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = _locked(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(run)).encode(), 0)
    except (ConfigError, OSError):  # nobody sees it then, which is no reason not to run
        pass
    try:
        yield
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def running_runs() -> list[RunningRun]:
    """Return this user's runs on this host, the oldest first; remove the entries of dead ones."""
    found = []
    with suppress(OSError):
        for path in sorted(_folder().iterdir()):
            if _OURS.fullmatch(path.name) and (run := _read(path)) is not None:
                found.append(run)
    return sorted(found, key=lambda run: run.since)


def _locked(path: Path) -> int:
    """Return a descriptor of a file, made where it is missing, that is locked and still has that name.

    Raises TimeoutError if another process has it.
    """
    deadline = time.monotonic() + _READERS_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            files.lock(descriptor, deadline)  # perhaps only a reader has it, and is about to let go of it
            # A reader may have taken away what a dead process has left, just when it was opened here.
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
            told = json.loads(os.pread(descriptor, 1 << 16, 0))
            return RunningRun(**{field.name: told[field.name] for field in fields(RunningRun)})
        if os.fstat(descriptor).st_size:  # not one that is just being made
            path.unlink()
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(descriptor)


def _folder() -> Path:
    return state_folder.state_dir() / _FOLDER
