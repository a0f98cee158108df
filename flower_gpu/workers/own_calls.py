"""Calls that run in this very process, and the environment variables they set there meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flower_gpu.workers.own_process import OwnLock

_lock = OwnLock()
# What each variable was before the first of the calls that set it now, and how many these are.
_borrowed: dict[str, tuple[str | None, int]] = {}
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


@contextmanager
def restored_environment(names: Iterable[str]) -> Iterator[None]:
    """Put variables back after the block to what they were.

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


@contextmanager
def inside() -> Iterator[None]:
    """Mark what runs in the block as a call."""
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
