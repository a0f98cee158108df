"""Facts of this very process, as a worker, a program or a caller of others, and calls that run in it.

Only the standard library is imported here: a worker has this module before its environment is set.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_gpu.workers.confinement import Confinement
    from flower_gpu.workers.transport import GivenRequest


@dataclass
class OwnProcess:
    """The role of this process, and its resources."""

    #: Whether it is a fork that is a program: it began with libraries.
    is_program: bool = False
    #: Whether another call may follow the one that runs in this worker.
    may_stay: bool = False
    #: Whether a task has left this worker in a state that other tasks do not expect.
    has_to_leave: bool = False
    #: Descriptor that this worker keeps open for its caller until the next call, or its end; -1 for none. A
    #: worker that starts others for the same call gives it to them, so that its lease is theirs as well.
    held: int = -1
    #: Is called once when this worker waits for another call.
    when_idle: Callable[[], None] | None = None
    #: By what this process is confined; None where it is not.
    confinement: Confinement | None = None
    #: The request of the call that runs in this worker, where it came in a memory file.
    request: GivenRequest | None = None
    #: Takes the events of this worker's call, also from threads that the task has started.
    sink: Callable[[dict[str, Any]], None] | None = None
    #: What forks of this process had to import, in a process that reports it to its fork server; else None.
    imported_by_forks: dict[str, None] | None = None
    #: Seconds that this worker's call has been importing, as far as :class:`events.SeenImports` sees that.
    import_s: float = 0.0
    #: Descriptor of this worker's folder for sockets, locked as long as it or a fork of it is there.
    sockets_lock: int = -1
    #: What calls that run in this process have preloaded.
    preloaded: set[str] = field(default_factory=set)

    def keep(self, descriptor: int) -> None:
        """Keep a descriptor open in the place of the one before; -1 for none."""
        before, self.held = self.held, descriptor
        if before >= 0:
            with suppress(OSError):
                os.close(before)

    def be_idle(self) -> None:
        """Run the steps for a moment without a call."""
        then, self.when_idle = self.when_idle, None
        if then is not None:
            with suppress(Exception):  # no call's problem
                then()


facts = OwnProcess()


class OwnLock:
    """A lock that is free in a fork of this process: the thread that held it does not exist there."""

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
# What each variable was before the first of the calls that set it now, and how many these are.
_borrowed: dict[str, tuple[str | None, int]] = {}
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


@contextmanager
def restored_environment(names: Iterable[str]) -> Iterator[None]:
    """Restore the variables after the block.

    Where several threads do so at the same time, the last one puts back what was there before the first: what
    one of them finds in between is another one's.
    """
    names = tuple(names)
    with _lock:
        for name in names:
            before, count = _borrowed.get(name, (os.environ.get(name), 0))
            _borrowed[name] = before, count + 1
    try:
        yield
    finally:
        with _lock:
            for name in names:
                before, count = _borrowed.pop(name)
                if count > 1:
                    _borrowed[name] = before, count - 1
                elif before is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = before


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment with changes; a plain copy fails where a variable goes."""
    with _lock:
        return {**os.environ, **changes}


@contextmanager
def inside() -> Iterator[None]:
    """Mark the block as a call."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def is_inside() -> bool:
    """Tell whether the code that asks is part of a call that runs in this process."""
    return _is_inside.get()


def belongs_here(name: str) -> bool:
    """Tell whether a variable is set, and not only by a call that runs in another thread of this process."""
    return name in os.environ and (name not in _borrowed or is_inside())


def _after_fork_in_child() -> None:
    _borrowed.clear()  # none of the calls runs there
    _is_inside.set(False)


os.register_at_fork(after_in_child=_after_fork_in_child)
