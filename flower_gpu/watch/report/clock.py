"""The time of a run: seconds since its start, without the time in which it was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_gpu.watch.history import History


@dataclass(frozen=True)
class Clock:
    """Turns Unix seconds into seconds of a run."""

    start: float  # of the run
    end: float  # of the run, or of the trace
    pauses: tuple[tuple[float, float], ...] = ()  # between the runs of which each went on with the one before

    @classmethod
    def of(cls, history: History) -> Clock:
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
        """How long the run took."""
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
