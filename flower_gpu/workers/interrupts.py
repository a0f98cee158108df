"""Ctrl-C in a caller waits where something could be lost; and other signals that end a program as it does."""

from __future__ import annotations

import os
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


# What asks a program to end: ``kill``, batch systems and containers; a terminal that closes.
_ENDING = (signal.SIGTERM, signal.SIGHUP)

# What these signals did before, while they mean a Ctrl-C here.
_before: dict[int, Any] = {}


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP act as Ctrl-C does, and yield a list for the signal that came.

    Only the first of them counts: what ends a run may not be interrupted by more of the same. SIGHUP stays
    ignored where it is (``nohup``). To be used in the main thread of a program that is ours.
    """
    received: list[int] = []
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: Any) -> None:
        if received:
            return
        received.append(number)
        for descriptor in terminals:
            if not os.isatty(descriptor):  # it is closed: what is printed would be an error of its own
                _discard(descriptor)
        # Whatever Ctrl-C does at this moment: it may have to wait for the end of a block.
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(number, frame)

    for each in _ENDING:
        if signal.getsignal(each) != signal.SIG_IGN:
            _before[each] = signal.signal(each, handle)
    try:
        yield received
    finally:
        _restore()


def _discard(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _restore() -> None:
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()


# Of this process only: a pool that the program has forked is ended by SIGTERM.
os.register_at_fork(after_in_child=_restore)
