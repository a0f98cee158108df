"""Defer Ctrl-C while a caller starts or ends a worker, and let other signals act as Ctrl-C.

Ctrl-C raises KeyboardInterrupt between any two steps of Python code. In the middle of starting or ending a
worker, that could lose a descriptor or leave a worker running. :func:`deferred_interrupts` marks such blocks:
a Ctrl-C within the block is recorded, and its handler runs at the end of the block. Within it,
:func:`allowed_interrupts` marks long waits, in which a Ctrl-C can lose neither.

Python runs signal handlers in the main thread only, so these blocks have no effect in other threads, and
``_waiting`` needs no lock.

:func:`ended_by_signals` makes SIGTERM and SIGHUP act as Ctrl-C does at that moment. So a deferred block
defers them as well.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[..., Any]

# The deferred handlers with the arguments of signals that have arrived, innermost block last.
_waiting: list[tuple[Handler, list[tuple[Any, ...]]]] = []


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer a Ctrl-C to the end of the block."""
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
    """Allow a Ctrl-C in a part of a block of :func:`deferred_interrupts`, for a long wait."""
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


# Signals that ask a program to end. ``kill``, batch systems and containers send SIGTERM. A terminal that
# closes sends SIGHUP.
_ENDING = (signal.SIGTERM, signal.SIGHUP)

# The previous handlers of these signals, while the signals act as Ctrl-C.
_previous_handlers: dict[int, Any] = {}


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP act as Ctrl-C does, and yield a list that receives the signal's number.

    Only the first signal counts, because further signals must not interrupt the end of a run. If SIGHUP is
    ignored (``nohup``), it stays ignored. Use this in the main thread of our own programs only.
    """
    received: list[int] = []
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: Any) -> None:
        if received:
            return
        received.append(number)
        for descriptor in terminals:
            # The terminal has closed, so printing to it would raise another error.
            if not os.isatty(descriptor):
                _discard(descriptor)
        # Call the current handler of Ctrl-C, which may defer the signal to the end of a block.
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(number, frame)

    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            _previous_handlers[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        _restore()


def _discard(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _restore() -> None:
    for number, handler in _previous_handlers.items():
        signal.signal(number, handler)
    _previous_handlers.clear()


# A fork gets the previous handlers back, so that SIGTERM ends a pool that the program has forked.
os.register_at_fork(after_in_child=_restore)
