"""Events that a running task sends to its caller, and prefixes of its log lines.

A worker has no terminal, so it sends events about progress, imports and the result, and its caller shows
them.
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

#: A function that receives one event, a flat dict of numbers and short strings.
Sink = Callable[[dict[str, Any]], None]

_MIN_INTERVAL_S = 0.1

# The sink belongs to one thread, because several threads of a process may each run a call.
_sink: ContextVar[Sink | None] = ContextVar("flower_gpu_sink", default=None)


@contextmanager
def sending_to(sink: Sink | None, *, all_threads: bool = False) -> Iterator[None]:
    """Send the events of the call inside the block to ``sink``.

    ``all_threads``: True also sends events from threads that the task starts. This is for workers, which run
    one call at a time.
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
    """Send one event to the caller. Outside of a call, this has no effect."""
    sink = _sink.get() or facts.sink
    if sink is not None:
        sink({"event": event, **fields})


def progress(iterable: Iterable[T], desc: str = "", total: int | None = None) -> Iterator[T]:
    """Iterate over ``iterable``, and let the caller of this worker show the progress.

    Outside of a worker, the function only iterates, so the same code runs anywhere.

    Parameters
    ----------
    iterable : iterable
        For example a ``DataLoader``.
    desc : str
        Text in front of the progress bar.
    total : int, optional
        Number of items; by default ``len(iterable)`` if it has a length.

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


_REPORT_INTERVAL_S = 0.25  # shortest time between two reports


class SeenImports:
    """A finder that reports to the caller how long a call imports, and which modules its worker imports.

    It comes before all other finders, and finds no module itself. No loader is wrapped, so tracebacks of
    failed imports stay as they are.

    ``names``: function that returns the modules imported so far; None if the caller does not want them.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], names: Callable[[], list[str]] | None) -> None:
        self._send = send
        self._names = names
        self._pid = os.getpid()
        self._outermost = ""  # the module whose import has caused the other imports
        facts.import_s = self._reported_s = self._looked_at = self._reported_at = 0.0
        self._reported_count = self._count()

    def __enter__(self) -> SeenImports:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # the task has replaced the list
            sys.meta_path.remove(self)
        self._report()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Return None, so that other finders find the module. Forks of the worker report nothing."""
        if os.getpid() == self._pid:
            with suppress(Exception):  # the task has closed all descriptors
                self._look(name)

    def _look(self, name: str) -> None:
        """Add the time since the previous look, if all of it was part of one import."""
        now = time.monotonic()
        spec = getattr(sys.modules.get(self._outermost), "__spec__", None)
        if getattr(spec, "_initializing", False):  # importlib sets this during an import
            facts.import_s += now - self._looked_at
        else:
            self._outermost = name
        self._looked_at = now
        if now - self._reported_at >= _REPORT_INTERVAL_S:
            self._reported_at = now
            self._report()

    def _report(self) -> None:
        """Report the import time and the modules, if they have changed since the previous report."""
        if facts.import_s != self._reported_s:
            self._reported_s = facts.import_s
            self._send({"event": "importing", "seconds": facts.import_s})
        if self._names is not None and (count := self._count()) != self._reported_count:
            self._reported_count = count
            self._send({"event": "imported", "names": self._names()})

    def _count(self) -> int:
        return len(sys.modules) + len(facts.imported_by_forks or ())


def note_imported(names: Iterable[str]) -> None:
    """Record the imports of a fork of this process, if its fork server collects them."""
    if facts.imported_by_forks is not None:
        facts.imported_by_forks.update(dict.fromkeys(names))


#: Our logger. It is below Flower's, so our lines get Flower's handler and format if Flower is imported.
LOGGER: Final = "flwr.flower_gpu"

_LOGGERS: Final = ("flwr", LOGGER)


class _Prefix:
    """A logging filter that puts a text in front of messages."""

    def __init__(self) -> None:
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if self.text and record.msg != "":
            # With arguments, the message is a template. A % in a client's name must not become part of it.
            text = self.text.replace("%", "%%") if record.args else self.text
            try:
                record.msg = f"{text}{record.msg}"
            except Exception:  # The message cannot be converted to text. The handler reports that.
                return True
        return True


_prefix = _Prefix()


def begin_log_lines(text: str) -> None:
    """Put a text, such as ``"client 3, round 2: "``, in front of all later log lines of Flower and ours.

    The task's own loggers are not changed.
    """
    if text and not _prefix.text:
        for name in _LOGGERS:  # Adding a filter twice has no effect.
            logging.getLogger(name).addFilter(_prefix)
    _prefix.text = text


def log_prefix() -> str:
    """Return the current text in front of log lines."""
    return _prefix.text
