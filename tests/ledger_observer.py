"""An observer of the ledger: not one of those who lease, so it would see what they do wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from flower_gpu.leases.entries import Entry
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder
from flower_gpu.leases.state import State

T = TypeVar("T")

_LOOK_S = 0.02


@contextmanager
def observed(ledger: Path, note: Callable[[tuple[Entry, ...]], T]) -> Iterator[list[T]]:
    """Look at who holds leases, see :func:`observed_states`."""
    with observed_states(ledger, lambda state: note(state.holders)) as seen:
        yield seen


@contextmanager
def observed_states(ledger: Path, note: Callable[[State], T]) -> Iterator[list[T]]:
    """Look every few milliseconds, with the ledger's mutex held, at who holds leases and who waits.

    Parameters
    ----------
    ledger : Path
        The ledger's folder.
    note : callable
        Makes of what the ledger says what is to be kept of one look.

    Yields
    ------
    list
        What was kept. If a look failed the block does, too: later ones are missing.
    """
    seen: list[T] = []
    failed: list[Exception] = []
    ended = threading.Event()
    own = Ledger(LedgerFolder(ledger))

    def look() -> None:
        try:
            while not ended.wait(_LOOK_S):
                seen.append(note(own.status()))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]
    assert seen, "nobody looked"
