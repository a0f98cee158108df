"""The time in which a run has calls and no worker, since others have the cores, the memory or the GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from typing import Any

from flower_gpu.leases.ledger import SAID_AFTER_S, reason_for_wait


class WorkerWaits:
    """Adds up how long no call of a run could get a worker, as often as somebody looks.

    ``tell``: gets the events of it: ``run_waits`` with a ``text``, and at its end ``run_waited`` with
    ``seconds``.
    """

    def __init__(self, tell: Callable[..., Any]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._since: float | None = None
        self._seconds = self._before_s = 0.0
        self._asked_s = SAID_AFTER_S
        self._is_said = False

    def look(self, since: float | None, now: float, pids: Container[int]) -> float:
        """Return how long it was in all.

        ``since``: since when calls wait and none has a worker; None: that is not so.
        ``now``: on the same clock.
        ``pids``: of the processes that ask for leases.
        """
        with self._lock:
            if since != self._since:
                if self._is_said:
                    self._tell("run_waited", seconds=round(self._seconds, 3))
                self._before_s += self._seconds
                self._since, self._seconds, self._is_said, self._asked_s = since, 0.0, False, SAID_AFTER_S
            if since is not None:
                self._seconds = max(0.0, now - since)
                if not self._is_said and self._seconds >= self._asked_s:
                    self._asked_s += SAID_AFTER_S  # where nothing of it is in the ledger yet
                    if text := reason_for_wait(pids):
                        self._is_said = True
                        self._tell("run_waits", text=text)
            return self._before_s + self._seconds
