"""What a caller tells its user while it waits for a fork server.

A fork server that starts on a busy machine, or imports libraries from a slow disk, takes minutes. A caller
that waits for it in silence looks as if it hung.
"""

from __future__ import annotations

import logging
import os
import time

from flower_gpu.options import SAY_WAIT

_log = logging.getLogger("flwr.flower_gpu")


class Wait:
    """One wait of a caller, which may be for several things in turn."""

    def __init__(self) -> None:
        self._say_s: float = SAY_WAIT.resolve(None, os.environ)
        self._last = time.monotonic()  # when something was logged, or the wait began
        self._said: set[str] = set()

    def say(self, reason: str) -> None:
        """Log the reason for the wait, once, after ``FLOWER_GPU_SAY_WAIT_S`` without a line."""
        if reason not in self._said and time.monotonic() - self._last > self._say_s:
            self._said.add(reason)
            self._last = time.monotonic()
            _log.warning("still waiting: %s", reason)
