"""Ctrl-C at a moment when it may not come: a process or a descriptor would be lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[..., Any]

# The handlers that wait for their turn, innermost block last. Of the main thread: no other gets a Ctrl-C.
_waiting: list[tuple[Handler, list[tuple[Any, ...]]]] = []


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Let a Ctrl-C wait for the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: arrived.append(arguments))
    _waiting.append((handler, arrived))
    try:
        yield
    finally:
        _waiting.pop()
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])


@contextmanager
def allowed_interrupts() -> Iterator[None]:
    """Let a Ctrl-C come within a block of :func:`deferred_interrupts`, while nothing can be lost."""
    if threading.current_thread() is not threading.main_thread() or not _waiting:
        yield
        return
    handler, arrived = _waiting[-1]
    deferring = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived.pop(0))
        yield
    finally:
        signal.signal(signal.SIGINT, deferring)
