"""Log messages of a caller that waits for a fork server.

A fork server may take minutes to start on a busy machine, or to import libraries from a slow disk. A caller
that waits in silence looks as if it hung.
"""

from __future__ import annotations

import logging
import os
import time

from flower_gpu.options import SAY_WAIT

_log = logging.getLogger("flwr.flower_gpu")


class Wait:
    """One wait of a caller. Its reason may change meanwhile."""

    def __init__(self) -> None:
        self._say_s: float = SAY_WAIT.resolve(None, os.environ)
        self._last = time.monotonic()  # time of the last log message, or of the start of the wait
        self._logged: set[str] = set()

    def say(self, reason: str) -> None:
        """Log the reason for the wait, unless it was logged already or another message was logged recently.

        The shortest time between two messages is ``FLOWER_GPU_SAY_WAIT_S``.
        """
        if reason not in self._logged and time.monotonic() - self._last > self._say_s:
            self._logged.add(reason)
            self._last = time.monotonic()
            _log.warning("still waiting: %s", reason)
