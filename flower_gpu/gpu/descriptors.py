"""Descriptors that a fork of this process must not keep: while a copy is open, a lock is held."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_own: set[int] = set()
_passed_on = threading.local()


def own(descriptor: int) -> int:
    """Take note of a descriptor that is closed in forks of this process, and return it."""
    _own.add(descriptor)
    return descriptor


def close(descriptor: int) -> None:
    """Close a descriptor that was noted."""
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
    kept = getattr(_passed_on, "descriptor", None)
    for descriptor in _own - {kept}:
        with suppress(OSError):
            os.close(descriptor)
    _own.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
