"""Descriptors that a fork of this process must not keep: while a copy is open, a lock is held."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_own: set[int] = set()
_passed_on = threading.local()
# No fork comes between a descriptor and the note of it. Held for a system call on a file, never for waiting.
_lock = threading.RLock()


def opened(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file as ``os.open`` does; the descriptor is closed in forks of this process."""
    with _lock:
        descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
        _own.add(descriptor)
        return descriptor


def close(descriptor: int) -> None:
    """Close a descriptor that was noted."""
    with _lock:
        _own.discard(descriptor)
        os.close(descriptor)


@contextmanager
def passed_on(descriptor: int) -> Iterator[None]:
    """Let forks that this thread makes in the block keep a descriptor: they are what it is meant for."""
    _passed_on.descriptor = descriptor
    try:
        yield
    finally:
        _passed_on.descriptor = None


def _after_fork_in_child() -> None:
    _lock.release()
    kept = getattr(_passed_on, "descriptor", None)
    for descriptor in _own - {kept}:
        with suppress(OSError):
            os.close(descriptor)
    _own.clear()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)
