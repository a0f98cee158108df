"""The time until workers train, in a run in which each message has a worker of its own.

Such a worker imports the app's modules, and most apps load their data again for each message. This may take
longer than the training, and it looks like training: only the first step of an optimizer tells them apart.
PyTorch reports that step. With other frameworks, only the time until the app's function begins is known.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from flower_gpu.printable import duration_text

_KEPT: Final = 1000  # starts of each kind
_ENOUGH: Final = 4  # starts before the first advice
_LONG_S: Final = 0.5
_LONG_PART: Final = 0.2  # of the calls' time


class WorkerStarts:
    """The times until new workers were ready, as the workers reported them.

    ``has_preload``: whether data are loaded once for all workers. Then there is no advice.
    """

    def __init__(self, *, has_preload: bool) -> None:
        self._has_preload = has_preload
        self._lock = threading.Lock()
        # Seconds until the worker was ready, and of the whole call; by whether an optimizer has made a step.
        self._starts: dict[bool, deque[tuple[float, float]]] = {
            is_step: deque(maxlen=_KEPT) for is_step in (False, True)
        }
        self._is_advised = False

    def learn(self, ready_s: Mapping[bool, float], call_s: float) -> str | None:
        """Learn from a call; return a line of advice if starts take long, once.

        ``ready_s``: seconds until the app's function began (False), and until the first step (True).
        ``call_s``: seconds of the whole call, with the start of its worker.
        """
        with self._lock:
            # A call in the run's own process has no worker, and no duration here.
            for is_step, seconds in ready_s.items() if call_s > 0 else ():
                self._starts[is_step].append((seconds, call_s))
            starts = self._starts[self._has_steps]
            if self._is_advised or self._has_preload or len(starts) < _ENOUGH:
                return None
            median_s = statistics.median(seconds for seconds, _ in starts)
            part = sum(seconds for seconds, _ in starts) / sum(call_s for _, call_s in starts)
            if median_s < _LONG_S or part < _LONG_PART:
                return None
            self._is_advised = True
            return (
                f"each message has a new worker, which takes {duration_text(median_s)} "
                f"{_until(self._has_steps)}, {100 * part:.0f} % of its time. --preload loads data once for "
                "all workers"
            )

    def facts(self) -> dict[str, Any]:
        """Return the facts for the result: the median of the seconds, and until what they count."""
        with self._lock:
            seconds = [seconds for seconds, _ in self._starts[self._has_steps]]
            if not seconds:
                return {}
            return {"worker_ready_s": statistics.median(seconds), "worker_ready": _until(self._has_steps)}

    @property
    def _has_steps(self) -> bool:
        return bool(self._starts[True])


def _until(is_step: bool) -> str:
    return "until its first optimizer step" if is_step else "until the app's function begins"
