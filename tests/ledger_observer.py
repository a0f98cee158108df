"""An observer of the ledger. It takes no leases itself, so it sees mistakes of the processes that do."""

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
    """Record the holders of leases like :func:`observed_states`."""
    with observed_states(ledger, lambda state: note(state.holders)) as seen:
        yield seen


@contextmanager
def observed_states(ledger: Path, note: Callable[[State], T]) -> Iterator[list[T]]:
    """Read the state of the ledger every few milliseconds, with its mutex held, while the block runs.

    Parameters
    ----------
    ledger : Path
        The ledger's folder.
    note : callable
        Returns the value to keep for one state of the ledger.

    Yields
    ------
    list
        The kept values. If reading the state failed, the block fails at its end, because later values are
        missing.
    """
    seen: list[T] = []
    failed: list[Exception] = []
    ended = threading.Event()
    opened = Ledger(LedgerFolder(ledger))

    def look() -> None:
        try:
            while not ended.wait(_LOOK_S):
                seen.append(note(opened.status()))
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
    assert seen, "the state of the ledger was never read"
