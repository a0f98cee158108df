"""How fast messages are answered, and how long the rest takes: told only once that means something.

The first replies of a run come late and slowly: workers start, libraries are imported, data are loaded. And
workers that begin together are done together. So a round's pace is told once the time since its first reply
has passed evenly: the middle third of it has about as many replies as the last. How long rounds take is told
from the second one on, or from the first one if that had no slow start.
"""

from __future__ import annotations

from typing import Final

from flower_gpu.watch.spans import OpenRound

_LEAST_REPLIES: Final = 4  # in each third
_EVEN: Final = 1.5  # times as many, at most
_SLOW_START: Final = 0.05  # of the first round


def rate(one: OpenRound | None, now: float) -> float | None:
    """Return the clients per second of a round; None as long as they say little."""
    if one is None or one.first_reply_at is None:
        return None
    third_s = (now - one.replied_at[0]) / 3
    if third_s <= 0 or now - one.first_reply_at < one.first_reply_at - one.started_at:
        return None
    last = sum(at > now - third_s for at in one.replied_at)
    middle = sum(at > now - 2 * third_s for at in one.replied_at) - last
    if min(last, middle) < _LEAST_REPLIES or max(last, middle) > _EVEN * min(last, middle):
        return None
    return (middle + last) / (2 * third_s)


def left_s(one: OpenRound | None, now: float) -> float | None:
    """Return how long a round takes if it goes on as fast; None as long as that is not known."""
    per_s = rate(one, now)
    if one is None or per_s is None or one.messages is None:
        return None
    return max(one.messages - one.replies, 0) / per_s


class RoundsLeft:
    """Estimates how long the rounds take that are left, from the rounds of this process that are over.

    Times are Unix seconds.
    """

    def __init__(self) -> None:
        self._num_over = -1
        self._round = 0
        self._began: list[float] = []  # the first two rounds, and the one that is under way
        self._waits_s: list[float] = []  # of the first two rounds: the time to the first reply
        self._has_reply = False  # the round that is under way

    def begin(self, server_round: int, now: float) -> None:
        """Note that a round begins."""
        self._num_over += 1
        self._round, self._has_reply = server_round, False
        self._began = [*self._began[:2], now]

    def replied(self, one: OpenRound | None) -> None:
        """Note a reply."""
        if one is None or one.first_reply_at is None or self._has_reply:
            return
        self._has_reply = True
        if len(self._waits_s) == self._num_over < 2:
            self._waits_s.append(one.first_reply_at - one.started_at)

    def left_s(self, num_rounds: int | None, now: float) -> float | None:
        """Return how long it takes; None as long as that is not known."""
        if not num_rounds or self._num_over < 1:
            return None
        if self._num_over == 1:
            each_s = self._began[1] - self._began[0]
            if len(self._waits_s) < 2 or self._waits_s[0] - self._waits_s[1] > _SLOW_START * each_s:
                return None
        else:
            each_s = (self._began[2] - self._began[1]) / (self._num_over - 1)
        left_s = each_s * (num_rounds - self._round + 1) - (now - self._began[-1])
        return left_s if left_s > 0 else None  # it takes longer than thought
