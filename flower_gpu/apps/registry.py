"""Which runs there are now: a file for each, locked by its process for as long as that lives."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.workers import state_folder

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
def registered(folder: Path, kind: str, name: str) -> Iterator[bool]:
    """Let others of this user see a run, while in the context.

    Yields False if another process of this host has registered this run already.
    """
    descriptor, path = (
        -1,
        (_folder() / f"{hashlib.blake2b(os.fsencode(folder.absolute()), digest_size=8).hexdigest()}.json"),
    )
    run = RunningRun(str(folder), kind, name, os.getpid(), time.time())
    is_first = True
    try:
        state_folder.made_state_dir()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = _locked(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(run)).encode(), 0)
    except TimeoutError:
        is_first = False
    except (ConfigError, OSError):  # nobody sees it then, which is no reason not to run
        pass
    try:
        yield is_first
    finally:
        if is_first:
            with suppress(OSError):
                path.unlink()
        if descriptor >= 0:
            os.close(descriptor)


def running() -> list[RunningRun]:
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
