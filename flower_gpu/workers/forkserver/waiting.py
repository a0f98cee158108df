"""What a caller tells its user while it waits for a fork server.

A fork server that starts on a busy machine, or imports libraries from a slow disk, takes minutes. A caller
that waits for it in silence looks as if it hung.
"""

from __future__ import annotations

import logging
import time
from typing import Final

SAY_S: Final = 5.0  # a usual wait is shorter

_log = logging.getLogger("flwr.flower_gpu")


class Wait:
    """One wait of a caller, which may be for several things in turn."""

    def __init__(self) -> None:
        self._last = time.monotonic()  # when something was logged, or the wait began
        self._said: set[str] = set()

    def say(self, reason: str) -> None:
        """Log the reason for the wait, once, if nothing was logged for longer than :data:`SAY_S`."""
        if reason not in self._said and time.monotonic() - self._last > SAY_S:
            self._said.add(reason)
            self._last = time.monotonic()
            _log.warning("still waiting: %s", reason)
