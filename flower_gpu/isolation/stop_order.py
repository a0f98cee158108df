"""An order to end workers, given in one thread to others that watch them."""

from __future__ import annotations

import os
from contextlib import suppress


class StopOrder:
    """Tells those who watch a worker to end it.

    Attributes
    ----------
    descriptor : int
        Readable once the order is given.
    asks_where : bool
        Whether each worker is to say first where its threads are.
    """

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        self.asks_where = False
        self._is_given = False

    def give(self, *, asks_where: bool = False) -> None:
        """Give it; a second time changes nothing."""
        if not self._is_given:
            self._is_given = True
            self.asks_where = asks_where
            os.close(self._write)  # its other end can be read then, by all who look

    def close(self) -> None:
        """Give it, and let go of it, when nobody looks any more."""
        self.give()
        with suppress(OSError):
            os.close(self.descriptor)
