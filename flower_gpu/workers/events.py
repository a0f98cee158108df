"""What a running task tells its caller: progress now, the result at the end.

A worker has no terminal. It sends events to its caller, which draws them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from flower_gpu.errors import shortened

T = TypeVar("T")

#: Takes one event, a flat dict of numbers and short strings.
Sink = Callable[[dict[str, Any]], None]

_MIN_INTERVAL_S = 0.1

# Of this thread alone: several threads of a process may each run a call in it.
_sink: ContextVar[Sink | None] = ContextVar("flower_gpu_sink", default=None)
# Of a worker, which is there for one call: also for the threads that the task starts.
_sink_of_process: Sink | None = None


@contextmanager
def sending_to(sink: Sink | None, *, all_threads: bool = False) -> Iterator[None]:
    """Send the events of the call inside the block to ``sink``."""
    global _sink_of_process
    token = _sink.set(sink)
    if all_threads:
        _sink_of_process = sink
    try:
        yield
    finally:
        _sink.reset(token)
        if all_threads:
            _sink_of_process = None


def send(event: str, **fields: Any) -> None:
    """Send one event to the caller; do nothing outside of a call."""
    sink = _sink.get() or _sink_of_process
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
