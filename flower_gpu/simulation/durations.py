"""Estimates the duration of calls from earlier ones.

The longest message of a round goes out first. Then a round takes at most a third longer than in the best
order (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969, https://doi.org/10.1137/0117039), and
with many messages for each worker hardly longer at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import fmean


class Durations:
    """What the calls of a run's clients take. Methods may be called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, dict[int, float]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is known."""
        return not self._seconds

    def learn(self, kind: str, client: int, seconds: float) -> None:
        """Take note of a call that has succeeded.

        ``kind``: the message's type.
        ``client``: the partition.
        ``seconds``: from the start of its worker, or from when it was sent to one that was there, to its
        result. The wait for a lease is no part of that.
        """
        with self._lock:
            known = self._seconds.setdefault(kind, {})
            # The last calls count most: a client's data may grow.
            known[client] = (known.get(client, seconds) + seconds) / 2

    def expected_s(self, calls: Sequence[tuple[str, int | None]]) -> list[float]:
        """Return the seconds that each call is expected to take, of which kind and client are given.

        A client of which nothing is known, or None, is expected to take the mean of all clients. In sizes
        with a long tail most are below it: so that client goes out early, after those known to be long.
        Where nothing is known of a kind, its calls are expected to take 0 seconds.
        """
        with self._lock:
            known = {kind: self._seconds.get(kind, {}) for kind in {kind for kind, _ in calls}}
            means = {kind: fmean(seconds.values()) if seconds else 0.0 for kind, seconds in known.items()}
            return [
                means[kind] if client is None else known[kind].get(client, means[kind])
                for kind, client in calls
            ]
