"""What a running task tells its caller: progress and imports now, the result at the end; and its log lines.

A worker has no terminal. It sends events to its caller, which draws them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from flower_gpu.errors import shortened
from flower_gpu.workers.own_process import facts

T = TypeVar("T")

#: Takes one event, a flat dict of numbers and short strings.
Sink = Callable[[dict[str, Any]], None]

_MIN_INTERVAL_S = 0.1

# Of this thread alone: several threads of a process may each run a call in it.
_sink: ContextVar[Sink | None] = ContextVar("flower_gpu_sink", default=None)


@contextmanager
def sending_to(sink: Sink | None, *, all_threads: bool = False) -> Iterator[None]:
    """Send the events of the call inside the block to ``sink``.

    ``all_threads``: of a worker, which has one call at a time: also for the threads that the task starts.
    """
    token = _sink.set(sink)
    if all_threads:
        facts.sink = sink
    try:
        yield
    finally:
        _sink.reset(token)
        if all_threads:
            facts.sink = None


def send(event: str, **fields: Any) -> None:
    """Send one event to the caller; do nothing outside of a call."""
    sink = _sink.get() or facts.sink
    if sink is not None:
        sink({"event": event, **fields})


def progress(iterable: Iterable[T], desc: str = "", total: int | None = None) -> Iterator[T]:
    """Iterate, and let the caller of this worker show how far it is.

    Outside of a worker it just iterates, so the same code runs anywhere.

    Parameters
    ----------
    iterable : iterable
        For example a ``DataLoader``.
    desc : str
        Shown before the bar.
    total : int, optional
        Number of items; by default ``len(iterable)`` where it has one.

    Yields
    ------
    object
        The items of ``iterable``.

    Examples
    --------
    >>> for images, labels in flower_gpu.progress(loader, desc="epoch 1"):
    ...     train_step(images, labels)
    """
    if total is None:
        try:
            total = len(iterable)  # type: ignore[arg-type]
        except TypeError:  # a generator, or an IterableDataset without a length
            total = None
    total = None if total is None else int(total)  # JSON has no numpy integers
    desc = shortened(str(desc))
    done = sent = 0
    sent_at = time.monotonic()
    send("progress", desc=desc, n=0, total=total)
    for done, item in enumerate(iterable, start=1):
        yield item
        now = time.monotonic()
        if now - sent_at >= _MIN_INTERVAL_S:
            sent, sent_at = done, now
            send("progress", desc=desc, n=done, total=total)
    if sent != done:
        send("progress", desc=desc, n=done, total=total)


_TELL_S = 0.25  # at least, between two times that something is told


class SeenImports:
    """Tells a caller how long a call has been importing, and which modules its worker had to import.

    Stands in front of all finders, and finds nothing. No loader is wrapped for that: tracebacks of modules
    that cannot be imported stay as they are. ``names`` returns the modules by now; None: nobody wants them.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], names: Callable[[], list[str]] | None) -> None:
        self._send = send
        self._names = names
        self._pid = os.getpid()
        self._outermost = ""  # the module whose import has led to the others
        facts.import_s = self._told_s = self._looked_at = self._told_at = 0.0
        self._told_count = self._count()

    def __enter__(self) -> SeenImports:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # the task has made a list of its own
            sys.meta_path.remove(self)
        self._tell()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Leave the module to others. In a process that the task has forked this does nothing else."""
        if os.getpid() == self._pid:
            with suppress(Exception):  # the task has closed all descriptors
                self._look(name)

    def _look(self, name: str) -> None:
        """Add the time since the last look, if all of it was part of one import."""
        now = time.monotonic()
        spec = getattr(sys.modules.get(self._outermost), "__spec__", None)
        if getattr(spec, "_initializing", False):  # as importlib itself marks it
            facts.import_s += now - self._looked_at
        else:
            self._outermost = name
        self._looked_at = now
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            self._tell()

    def _tell(self) -> None:
        """Tell what is more than the last time."""
        if facts.import_s != self._told_s:
            self._told_s = facts.import_s
            self._send({"event": "importing", "seconds": facts.import_s})
        if self._names is not None and (count := self._count()) != self._told_count:
            self._told_count = count
            self._send({"event": "imported", "names": self._names()})

    def _count(self) -> int:
        return len(sys.modules) + len(facts.imported_by_forks or ())


def note_imported(names: Iterable[str]) -> None:
    """Note the imports of a fork of this process, if its fork server collects them."""
    if facts.imported_by_forks is not None:
        facts.imported_by_forks.update(dict.fromkeys(names))


#: Of our own lines: below Flower's, whose handler and format they have where Flower is imported.
LOGGER: Final = "flwr.flower_gpu"

_LOGGERS: Final = ("flwr", LOGGER)


class _Prefix:
    """Puts a text in front of the messages of loggers that have it as a filter."""

    def __init__(self) -> None:
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if self.text and record.msg != "":
            # With arguments the message is a template, and a % in a client's name would be a part of it.
            text = self.text.replace("%", "%%") if record.args else self.text
            try:
                record.msg = f"{text}{record.msg}"
            except Exception:  # not a text, and cannot be one: the handler says so
                return True
        return True


_prefix = _Prefix()


def begin_log_lines(text: str) -> None:
    """Put a text, as ``"client 3, round 2: "``, in front of all log lines that follow.

    Flower's and ours say then whose they are; loggers of the task's own are left alone.
    """
    if text and not _prefix.text:
        for name in _LOGGERS:  # a logger has a filter once, however often it is added
            logging.getLogger(name).addFilter(_prefix)
    _prefix.text = text


def log_prefix() -> str:
    """Return the text that is put in front now."""
    return _prefix.text
