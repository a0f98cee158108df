"""The state of this process, as a worker, a program or a caller, and of the calls that run in it.

Only the standard library is imported here, because a worker imports this module before its environment is
set.

A fork copies this state. :class:`OwnLock` is a lock that is always free in the fork, because the thread that
held it does not exist there. Calls do not continue in a fork either, so it forgets their variables.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OwnProcess:
    """The role of this process, and its resources."""

    #: True for a fork that runs a program, with libraries imported before the fork.
    is_program: bool = False
    #: True if another call may follow the current call of this worker.
    may_stay: bool = False
    #: True if a task has left this worker in a state that other tasks do not expect.
    has_to_leave: bool = False
    #: Descriptor that this worker keeps open for its caller until its next call or its end, or -1. It passes
    #: the descriptor on to workers that it starts for the same call, so that they share its lease.
    lease_descriptor: int = -1
    #: Callback that runs once when this worker waits for another call.
    when_idle: Callable[[], None] | None = None
    #: True if this process is confined to what the app of a message needs.
    is_confined: bool = False
    #: Receiver of the events of this worker's call, including events from threads that the task has started.
    sink: Callable[[dict[str, Any]], None] | None = None
    #: Modules imported by forks of this process. None if this process does not report them to a fork server.
    imported_by_forks: dict[str, None] | None = None
    #: Seconds of imports in this worker's call, as seen by :class:`events.SeenImports`.
    import_s: float = 0.0
    #: Descriptor of this worker's socket folder, or -1. The folder stays
    #: locked until the worker and all of its forks have ended.
    sockets_lock: int = -1
    #: Keys of the preload entries already run in this process.
    preloaded: set[str] = field(default_factory=set)

    def keep(self, descriptor: int) -> None:
        """Keep ``descriptor`` open, or -1 for none, and close the descriptor that was kept before."""
        previous, self.lease_descriptor = self.lease_descriptor, descriptor
        if previous >= 0:
            with suppress(OSError):
                os.close(previous)

    def be_idle(self) -> None:
        """Run the callback ``when_idle``, unless it has already run."""
        callback, self.when_idle = self.when_idle, None
        if callback is not None:
            with suppress(Exception):  # An error here must not fail a call.
                callback()


facts = OwnProcess()


class OwnLock:
    """A lock that is free in a fork of this process, because the thread that held it does not exist there."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_lock = OwnLock()
# The variables that running calls have set. Each has its value from before the first of these calls, and the
# number of these calls.
_borrowed: dict[str, tuple[str | None, int]] = {}
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


@contextmanager
def restored_environment(names: Iterable[str]) -> Iterator[None]:
    """Restore the values of these variables after the block.

    If blocks of several threads overlap, the last block to end restores the values from before the first
    block. An earlier restore would change the variables for threads that still use them.
    """
    names = tuple(names)
    with _lock:
        for name in names:
            original, count = _borrowed.get(name, (os.environ.get(name), 0))
            _borrowed[name] = original, count + 1
    try:
        yield
    finally:
        with _lock:
            for name in names:
                original, count = _borrowed.pop(name)
                if count > 1:
                    _borrowed[name] = original, count - 1
                elif original is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = original


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment with changes.

    The lock is needed because a plain copy fails if another thread removes a variable meanwhile.
    """
    with _lock:
        return {**os.environ, **changes}


@contextmanager
def inside() -> Iterator[None]:
    """Mark the block as part of a call that runs in this process."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def is_inside() -> bool:
    """Return True if the calling code is part of a call that runs in this process."""
    return _is_inside.get()


def belongs_here(name: str) -> bool:
    """Return True if a variable is set, and not only by a call that runs in another thread."""
    return name in os.environ and (name not in _borrowed or is_inside())


def _after_fork_in_child() -> None:
    _borrowed.clear()  # The calls do not run in the fork.
    _is_inside.set(False)


os.register_at_fork(after_in_child=_after_fork_in_child)
