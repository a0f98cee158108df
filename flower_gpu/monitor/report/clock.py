"""The time of a run: seconds since its start, without the time in which it was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_gpu.monitor.report.recorded import RunHistory


@dataclass(frozen=True)
class Clock:
    """Turns Unix seconds into seconds of a run.

    Parameters
    ----------
    start, end : float
        When the run began and ended, or when the trace ends; Unix seconds.
    pauses : tuple of (float, float)
        What lies between the runs of which each went on with the one before.
    """

    start: float
    end: float
    pauses: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, history: RunHistory) -> Clock:
        """Return the clock of a run."""
        start = history.started_at if history.started_at is not None else history.first_at
        if start is None:  # there is no event
            return cls(0.0, 0.0)
        end = history.finished_at if history.finished_at is not None else history.last_at
        end = max(start, start if end is None else end)
        pauses, free_from = [], start
        for begin, until in sorted(history.pauses):
            begin, until = max(begin, free_from), min(until, end)
            if begin < until:
                pauses.append((begin, until))
                free_from = until
        return cls(start, end, tuple(pauses))

    @property
    def duration_s(self) -> float:
        """How long the run took, in seconds."""
        return self.end - self.start - sum(until - begin for begin, until in self.pauses)

    def seconds(self, time: float) -> float:
        """Return the seconds since the start; times outside of the run are its start and its end."""
        time = min(max(time, self.start), self.end)
        paused = sum(min(until, time) - begin for begin, until in self.pauses if begin < time)
        return max(0.0, time - self.start - paused)

    def all_seconds(self, times: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the seconds of many times."""
        return np.array([self.seconds(time) for time in times], dtype=float)

    @property
    def pauses_s(self) -> tuple[float, ...]:
        """Where the pauses lie, in seconds of the run."""
        return tuple(self.seconds(begin) for begin, _ in self.pauses)
