"""Measures how long a run has calls but no worker, because others hold the cores, the memory or the GPUs.

The problem: a run that gets no lease looks as if it hangs. So its user should read who holds the resources,
and its result should state the time that was lost.

The object: an engine creates a :class:`WorkerWaits` for a run, and calls :meth:`WorkerWaits.look` from time
to time. The history of the run knows since when calls have been waiting. The ledger knows the reason.

Races: several threads may call ``look``, so a lock protects the sums. The lock is held while an event is
reported and while the ledger is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from typing import Any

from flower_gpu.leases.ledger import SAID_AFTER_S, reason_for_wait


class WorkerWaits:
    """Adds up the time in which no call of a run could get a worker.

    ``tell``: function that receives the events. ``run_waits`` has the reason as ``text``. ``run_waited``
    follows at the end of the wait, and has its duration as ``seconds``.
    """

    def __init__(self, tell: Callable[..., Any]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._since: float | None = None
        self._seconds = self._earlier_s = 0.0  # durations of the current wait, and of all earlier waits
        self._ask_after_s = SAID_AFTER_S  # duration of the wait at which the ledger is read next
        self._is_reported = False  # True if run_waits was sent for the current wait

    def look(self, since: float | None, now: float, pids: Container[int]) -> float:
        """Update the sum, send events if needed, and return the total wait in seconds.

        ``since``: time since which calls have been waiting with no worker running, or None.
        ``now``: the current time on the same clock.
        ``pids``: the processes that request the leases.
        """
        with self._lock:
            if since != self._since:
                if self._is_reported:
                    self._tell("run_waited", seconds=round(self._seconds, 3))
                self._earlier_s += self._seconds
                self._since, self._seconds = since, 0.0
                self._is_reported, self._ask_after_s = False, SAID_AFTER_S
            if since is not None:
                self._seconds = max(0.0, now - since)
                if not self._is_reported and self._seconds >= self._ask_after_s:
                    # The ledger may not know the reason yet, so the next question comes later.
                    self._ask_after_s += SAID_AFTER_S
                    if text := reason_for_wait(pids):
                        self._is_reported = True
                        self._tell("run_waits", text=text)
            return self._earlier_s + self._seconds
