"""What a worker imports, told while it goes on: one that is ended by its time limit tells nothing later."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_TELL_S = 0.25  # at least, between two times that something is told


@contextmanager
def seen_by(look: Callable[[str], None]) -> Iterator[None]:
    """Call ``look`` before each import of a module that is not there yet, with its name, within the block.

    No loader is wrapped for that: tracebacks of modules that cannot be imported stay as they are.
    """
    finder = _Finder(look)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the task has made a list of its own
            sys.meta_path.remove(finder)


class _Finder:
    """Stands in front of all finders, and finds nothing."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self._look = look
        self._pid = os.getpid()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Leave the module to others. In a process that the task has forked this does nothing else."""
        if os.getpid() == self._pid:
            with suppress(Exception):  # the task has closed all descriptors
                self._look(name)


class ImportTime:
    """How long a call has been importing, as far as its imports ask for others; told to its caller."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._seconds = 0.0
        self._outermost = ""  # the module whose import has led to the others
        self._looked_at = self._told_at = 0.0

    def look(self, name: str) -> None:
        """Add the time since the last look, if all of it was part of one import."""
        now = time.monotonic()
        spec = getattr(sys.modules.get(self._outermost), "__spec__", None)
        if getattr(spec, "_initializing", False):  # as importlib itself marks it
            self._seconds += now - self._looked_at
            if now - self._told_at >= _TELL_S:
                self._told_at = now
                self._send({"event": "importing", "seconds": self._seconds})
        else:
            self._outermost = name
        self._looked_at = now


class ImportedModules:
    """Which modules a call has imported, told now and then."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._count = len(sys.modules)
        self._told_at = 0.0

    def look(self, _: str) -> None:
        """Tell it, if it is something else than the last time, and that was not just now."""
        now = time.monotonic()
        if len(sys.modules) != self._count and now - self._told_at >= _TELL_S:
            self._count, self._told_at = len(sys.modules), now
            self._tell()
