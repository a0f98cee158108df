"""How long a ServerApp waits for replies before it asks its SuperLink again."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from flower_gpu.flower.waits import pace
from flower_gpu.flower.waits.wakeup import NodeGroup

_LEAST_S: Final = 0.1  # where nobody tells of replies
_TOLD_LEAST_S: Final = 0.5  # where SuperNodes tell: only errors of the SuperLink's own are found by asking
#: How many questions all threads may ask in a second when they are told again and again.
_QUESTIONS_PER_S: Final = 40.0
_FOREVER_S: Final = 3600.0


class GridTime:
    """The module ``time`` for Flower's grid, of which several threads may wait.

    ``group`` are the SuperNodes that tell of their replies.
    """

    def __init__(self, group: NodeGroup | None = None) -> None:
        self._wake_ups = group.lead() if group is not None else None
        self._group = group
        self._changed = threading.Condition()
        self._told = 0  # how often this was told of a reply
        self._waiting = 0  # threads
        self._of_thread = threading.local()
        if self._wake_ups is not None:
            threading.Thread(target=self._listen, args=(self._wake_ups,), daemon=True).start()

    def sent(self) -> None:
        """Note that this thread has sent messages, and will wait for replies."""
        if self._group is not None:
            self._group.wake_nodes()
        self._of_thread.told = self._told
        self.received()

    def received(self) -> None:
        """Note that this thread has got a reply."""
        self._of_thread.since = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait until there may be a reply, but not longer than Flower wants."""
        of_thread = self._of_thread
        now = time.monotonic()
        since = of_thread.__dict__.setdefault("since", now)
        least_s = _LEAST_S if self._wake_ups is None else _TOLD_LEAST_S
        with self._changed:
            self._waiting += 1
            longest_s = min(seconds, pace.wait_s(now - since, least_s))
            told = of_thread.__dict__.setdefault("told", self._told)
            self._changed.wait_for(lambda: self._told != told, longest_s)
            self._waiting -= 1
            shortest_s = min(longest_s, (self._waiting + 1) / _QUESTIONS_PER_S)
        # Replies come together: one question for several, and no thread asks for each of the others'.
        time.sleep(max(0.0, now + shortest_s - time.monotonic()))
        of_thread.told = self._told

    def _listen(self, wake_ups: Any) -> None:
        while True:
            if wake_ups.wait(_FOREVER_S):
                wake_ups.clear()
                with self._changed:
                    self._told += 1
                    self._changed.notify_all()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
