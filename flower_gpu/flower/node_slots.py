"""How many messages SuperNodes handle at a time: files, of which each can be locked by one.

The kernel lets go of a lock when its process is gone, whatever ended it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from flower_gpu import files
from flower_gpu.workers.forkserver import sockets

VARIABLE = "FLOWER_GPU_SLOTS"

_LOOK_S = 0.05
_QUEUE = "queue"
_OURS = re.compile(r"(\d+)-\d+")


def make(count: int) -> Path:
    """Make slots for the SuperNodes of this process; those of processes that are gone are removed.

    SuperNodes find the folder that is returned by :data:`VARIABLE`.
    """
    slots = sockets.folder() / "slots"
    slots.mkdir(mode=0o700, exist_ok=True)
    for folder in slots.iterdir():
        found = _OURS.fullmatch(folder.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove_unless_held(folder)
    folder = slots / f"{os.getpid()}-{time.time_ns()}"
    new = slots / f".{folder.name}"
    new.mkdir(mode=0o700)
    # Not closed: the lock lasts as long as this process, whose number says nothing in another container.
    fcntl.flock(os.open(new, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)
    for name in (_QUEUE, *map(str, range(count))):
        (new / name).touch(mode=0o600)
    return new.rename(folder)


def _remove_unless_held(folder: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            if files.try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def keep(environ: Mapping[str, str]) -> None:
    """Let a host that tidies up files nobody has used for days see that these are used."""
    folder = environ.get(VARIABLE)
    with suppress(OSError):
        for path in Path(folder).iterdir() if folder else ():
            os.utime(path)


@contextmanager
def held(environ: Mapping[str, str]) -> Iterator[None]:
    """Wait for a slot, where this SuperNode has such, and hold it for the block. First come, first served."""
    folder = environ.get(VARIABLE)
    if not folder:
        yield
        return
    slot = _wait(Path(folder))
    try:
        yield
    finally:
        os.close(slot)


def _wait(folder: Path) -> int:
    queue = os.open(folder / _QUEUE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(queue, fcntl.LOCK_EX)  # only the first in line looks for a slot
        slots = [path for path in folder.iterdir() if path.name != _QUEUE]
        while True:
            for path in slots:
                slot = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if files.try_lock(slot):
                    return slot
                os.close(slot)
            time.sleep(_LOOK_S)
    finally:
        os.close(queue)
